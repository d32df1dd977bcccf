"""What crosses to an engine of prompts that go on from earlier ones, and what the engine makes of it."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from penstock.dispatch import sent_prompts
from penstock.dispatch.sent_prompts import MIN_BYTES, KnownPrefix, SentPrompts
from penstock.engine.loop.kept_prompts import KeptPrompts
from penstock.wire.decoding import decode_from_server
from penstock.wire.messages import (
    KeptPrefix,
    SamplingParams,
    Submit,
    encode,
)
from penstock.wire.submits import join_submits, split_submit

PEER = b"api-server-0-0"
ROOM = 40 * MIN_BYTES
_random = random.Random(1)


def tokens(count: int) -> bytes:
    return _random.randbytes(4 * count)


def submit(prompt: bytes, stream: int = 0) -> Submit:
    return Submit(stream, prompt, SamplingParams(5, 7))


class Wire:
    """Both ends of a connection."""

    def __init__(self, room: int = ROOM) -> None:
        self.sent = SentPrompts(room)
        self.kept = KeptPrompts(room)

    def send(self, request: Submit, known: KnownPrefix | None = None) -> Submit:
        """What crosses. The other end has the request."""
        short = self.sent.shorten(request, known)
        received = decode_from_server(encode(short))
        assert isinstance(received, Submit)
        assert self.kept.restore(PEER, received) == request
        return short


def test_a_turn_crosses_as_its_new_tokens() -> None:
    wire = Wire()
    history = tokens(MIN_BYTES)
    assert wire.send(submit(history)) == replace(submit(history), keep=1)
    for turn in range(1, 5):
        more = tokens(800)
        short = wire.send(submit(history + more))
        assert short.prompt == more
        assert short.prefix == KeptPrefix(turn, len(history) // 4, replaced=True)
        history += more
        assert wire.kept.bytes == len(history)
    assert (wire.kept.hits, wire.kept.misses) == (4, 0)


def test_what_a_template_has_dropped_of_the_last_turn_is_sent_again() -> None:
    wire = Wire()
    history = tokens(MIN_BYTES)
    wire.send(submit(history))
    changed = history[:-40] + tokens(100)
    short = wire.send(submit(changed))
    assert len(short.prompt) <= 4 * 100
    assert changed.endswith(short.prompt)


def test_the_same_prompt_again_crosses_as_its_last_token() -> None:
    wire = Wire()
    prompt = tokens(MIN_BYTES)
    wire.send(submit(prompt))
    assert wire.send(submit(prompt)).prompt == prompt[-4:]


def test_conversations_with_the_same_beginning_go_on_side_by_side() -> None:
    wire = Wire()
    system = tokens(MIN_BYTES // 2)
    histories = [system + tokens(MIN_BYTES // 2) for _ in range(3)]
    for history in histories:
        wire.send(submit(history))
    for _ in range(4):
        for number, history in enumerate(histories):
            more = tokens(800)
            assert wire.send(submit(history + more)).prompt == more
            histories[number] = history + more


def test_short_prompts_and_those_of_resubmitted_streams_cross_whole() -> None:
    wire = Wire()
    short = submit(tokens(MIN_BYTES // 4 - 1))
    assert wire.send(short) == short
    long = submit(tokens(MIN_BYTES))
    wire.send(long)
    again = replace(long, resubmitted=True)
    assert wire.send(again) == again


def test_choices_share_a_prompt_of_which_only_new_tokens_cross() -> None:
    wire = Wire()
    history, more = tokens(MIN_BYTES), tokens(10)
    wire.send(submit(history))
    prompt = history + more
    requests = [submit(prompt), submit(prompt, 1), submit(tokens(20), 2)]
    short = wire.sent.shorten(join_submits(requests))
    assert short.prompt == more
    assert list(split_submit(wire.kept.restore(PEER, short))) == requests


def test_both_ends_forget_the_same_prompts_first() -> None:
    """Sessions that go on, fork, are cut and begin anew, more than there is room for."""
    wire = Wire(400_000)
    histories = [b""] * 12
    crossed = whole = 0
    for _ in range(1500):
        number = _random.randrange(len(histories))
        history = _random.choice(histories) if _random.random() < 0.03 else histories[number]
        history = history[: max(0, len(history) - 4 * _random.choice((0, 0, 3, 50)))]
        history += tokens(_random.randrange(1, 600))
        histories[number] = (
            history[: _random.choice((20_000, 100_000))] if len(history) > 120_000 else history
        )
        crossed += len(wire.send(submit(histories[number])).prompt)
        whole += len(histories[number])
        assert wire.kept.bytes <= 400_000
    assert wire.kept.misses == 0
    assert crossed < whole / 2


def test_after_a_clear_nothing_is_referred_to() -> None:
    wire = Wire()
    history = tokens(MIN_BYTES)
    wire.send(submit(history))
    wire.sent.clear()
    assert wire.send(submit(history + tokens(8))).prefix is None


def test_what_is_known_of_a_prompt_is_not_compared() -> None:
    wire = Wire()
    history = tokens(MIN_BYTES)
    wire.send(submit(history))
    for turn in range(1, 30):
        longer = history[:-8] + tokens(400)
        short = wire.send(submit(longer), KnownPrefix(history, len(history) - 8))
        assert short.prefix == KeptPrefix(turn, len(history) // 4 - 2, replaced=True)
        history = longer
    assert wire.send(submit(history + tokens(2))).prefix is not None, "found without what is known"
    assert sorted(wire.sent._latest) == sorted(set(sent_prompts._probes(history)))


def test_what_is_known_of_a_prompt_that_is_not_kept_counts_for_nothing() -> None:
    wire = Wire()
    history = tokens(MIN_BYTES)
    wire.send(submit(history))
    copy = bytes(bytearray(history))
    assert wire.send(submit(history + tokens(2)), KnownPrefix(copy, len(copy))).prefix is not None
    assert wire.send(submit(history), KnownPrefix(history, len(history))).prompt == history[-4:]


@pytest.mark.parametrize("at", [0, 1, 100, MIN_BYTES // 4 - 1, MIN_BYTES // 4, MIN_BYTES])
def test_prompts_are_compared_to_the_token(at: int) -> None:
    wire = Wire()
    one = tokens(2 * MIN_BYTES)
    wire.send(submit(one))
    other = bytearray(one)
    other[4 * at] ^= 1
    wire.send(submit(bytes(other)))
