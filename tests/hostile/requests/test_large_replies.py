"""Replies with millions of logprobs are held compactly and formatted in turns with other work."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from penstock.api import time_sliced_sender
from penstock.api.api_request import ApiRequest
from penstock.dialects.chat.reply import ChatReply
from penstock.dialects.completions.reply import CompletionReply
from penstock.dialects.openai_reply import OpenAIReply
from penstock.generation.replies import turns
from penstock.generation.replies.logprobs import (
    PIECE_CANDIDATES,
    LogprobCollector,
    PromptLogprobFormatter,
    TokenNames,
)
from penstock.generation.replies.turns import Turns
from penstock.generation.request.validation import MAX_STREAMED_CANDIDATES, check_streamed_echo
from penstock.http.errors import ApiError
from penstock.streaming.token_table import TokenTable
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from tests.api.requests import api_request
from tests.generation.planning import tiny_tokenizer
from tests.http.requests import FakeSink, http_request

NAMES = TokenNames(TokenTable.from_tokenizer(tiny_tokenizer().raw, skip_special_tokens=False))
TOKENS, ALTERNATIVES = 2000, 20


def scored_prompt(tokens: int = TOKENS) -> PromptLogprobFormatter:
    made = PromptLogprobFormatter(NAMES, [7] * (tokens + 1), ALTERNATIVES)
    shape = tokens, 1 + ALTERNATIVES
    ids = np.resize(np.arange(20, 320, dtype=np.int32), shape)
    positions = np.arange(1, tokens + 1, dtype=np.int32)
    made.add(PromptLogprobs(positions * 0, positions, ids, -np.ones(shape, np.float32), positions))
    return made


def test_a_prompts_logprobs_are_made_in_small_pieces() -> None:
    pieces = list(scored_prompt().field())
    assert max(piece.count(b'"rank"') for piece in pieces) <= PIECE_CANDIDATES
    field = json.loads(b"".join(pieces))
    assert len(field) == TOKENS + 1
    assert {len(entry) for entry in field[1:]} == {1 + ALTERNATIVES}


@pytest.mark.parametrize("format", [ChatReply, CompletionReply])
def test_so_are_those_of_an_echoed_prompt(format: type[OpenAIReply]) -> None:
    collector = LogprobCollector(NAMES, scored_prompt(), alternatives=ALTERNATIVES)
    taken = collector.take()
    assert taken is not None
    pieces = list(format("id", "m", "assistant").logprobs(taken))
    assert max(piece.count(b"-1.0") for piece in pieces) <= max(PIECE_CANDIDATES, TOKENS)
    assert len(pieces) > TOKENS * ALTERNATIVES / PIECE_CANDIDATES


def test_what_waits_for_the_end_of_a_reply_takes_a_few_bytes_per_candidate() -> None:
    collector = LogprobCollector(NAMES, alternatives=ALTERNATIVES)
    tracemalloc.start()
    try:
        for _ in range(TOKENS):
            ids = np.full((1, 1 + ALTERNATIVES), 7, np.int32)
            row = Logprobs(np.zeros(1, np.int32), ids, ids.astype(np.float32), np.ones(1, np.int32))
            collector.add([7], row)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 24 * TOKENS * (1 + ALTERNATIVES)


def test_a_stream_echoes_long_prompts_without_logprobs_only() -> None:
    check_streamed_echo(MAX_STREAMED_CANDIDATES // 21, 20)
    with pytest.raises(ApiError) as refused:
        check_streamed_echo(MAX_STREAMED_CANDIDATES // 21 + 1, 20)
    assert refused.value.param == "echo"


class Leaving(FakeSink):
    """A client that leaves after a part of the reply."""

    def __init__(self, leaves_after: int = -1) -> None:
        super().__init__()
        self._leaves_after = leaves_after

    def write_body(self, data: bytes) -> None:
        super().write_body(data)
        if len(self.parts) == self._leaves_after:
            assert self.listener is not None
            self.listener.on_disconnect()


def requested(sink: FakeSink) -> ApiRequest:
    return api_request(http_request(sink=sink))


async def rounds_while(work: Any) -> int:
    """Rounds of the event loop until ``work`` is done."""
    task, rounds = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0)
        rounds += 1
    task.result()
    return rounds


def pieces(count: int, made: list[int]) -> Iterator[bytes]:
    for number in range(count):
        made.append(number)
        yield b"x" * 4096


def test_large_replies_take_turns_with_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0)

    async def attack() -> None:
        sender, made = time_sliced_sender.TimeSlicedSender(Turns()), list[int]()
        sinks = [FakeSink() for _ in range(3)]
        work = [sender.send_json(requested(each), pieces(200, made)) for each in sinks]
        assert await rounds_while(asyncio.gather(*work)) >= 3 * 199
        for each in sinks:
            assert each.body == b"x" * 4096 * 200
            assert max(map(len, each.parts)) <= time_sliced_sender.WHOLE_BYTES + 4096
            assert len(each.parts) > 2
            assert each.ended == "finish"

    asyncio.run(attack())


def test_small_ones_are_sent_at_once() -> None:
    sink = FakeSink()
    asyncio.run(time_sliced_sender.TimeSlicedSender(Turns()).send_json(requested(sink), iter([b"{", b"}"])))
    assert sink.parts == [b"{}"]
    assert sink.headers[b"content-length"] == b"2"


def test_formatting_ends_when_the_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0)
    sink, made = Leaving(leaves_after=2), list[int]()
    asyncio.run(time_sliced_sender.TimeSlicedSender(Turns()).send_json(requested(sink), pieces(1000, made)))
    assert len(made) < 200


def test_a_reply_of_known_size_has_its_length_and_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, made = FakeSink(), list[int]()
    sender, size = time_sliced_sender.TimeSlicedSender(Turns()), 100 * 4096
    asyncio.run(sender.send_sized(requested(sink), pieces(100, made), b"a/b", size))
    assert (sink.headers[b"content-type"], sink.headers[b"content-length"]) == (b"a/b", b"%d" % size)
    assert (sink.body, len(sink.parts), sink.ended) == (b"x" * size, 100, "finish")
    small = FakeSink()
    asyncio.run(sender.send_sized(requested(small), pieces(2, made), b"a/b", 2 * 4096))
    assert (small.headers[b"content-length"], len(small.parts)) == (b"8192", 1)
    leaving, made = Leaving(leaves_after=2), []
    asyncio.run(sender.send_sized(requested(leaving), pieces(1000, made), b"a/b", 1000 * 4096))
    assert len(made) < 10
