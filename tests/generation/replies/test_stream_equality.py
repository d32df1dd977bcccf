"""However tokens arrive, the joined events of a stream say what the reply that is not streamed says."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.generation.plan import RequestPlan
from penstock.generation.replies.reply import TextTables
from penstock.wire.frames import FinishReason
from tests.generation.planning import body, chat_body, planners
from tests.generation.replying import Desk, Reading, in_loop, read_body, read_stream, tables_of, within_text
from tests.stop_reference import until_stop
from tests.tokenizer_kinds import SPECIAL, TRAINED, Case, make_case, token_lists

PLANNER = planners()
EOS = SPECIAL.index("</s>")
ENDS = [FinishReason.LENGTH, FinishReason.EOS, FinishReason.STOP_TOKEN]


@cache
def case(name: str) -> tuple[Case, TextTables]:
    made = make_case(TRAINED[name]())
    return made, tables_of(made.tokenizer)


@st.composite
def streams(draw: st.DrawFn, name: str) -> tuple[list[int], FinishReason]:
    """Tokens of a stream, and how it ends."""
    tokens = draw(token_lists(case(name)[0])) or [draw(st.sampled_from(case(name)[0].ids))]
    finish = draw(st.sampled_from(ENDS))
    return (tokens if finish is FinishReason.LENGTH else [*tokens, EOS]), finish


@st.composite
def stop_strings(draw: st.DrawFn, text: str) -> list[str]:
    """Parts of the text, and texts that begin like a part of it."""
    if not text:
        return []
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text) - 1))
        part = text[start : start + draw(st.integers(1, 12))]
        stops.append(part + draw(st.sampled_from(["", "", "\0never"])))
    return stops


def cut(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    """Rows: the first token alone, then as many as ``sizes`` say, the last size over and over."""
    rows, place = [tokens[:1]], 1
    while place < len(tokens):
        size = sizes[min(len(rows) - 1, len(sizes) - 1)]
        rows.append(tokens[place : place + size])
        place += size
    return rows


def plan_of(chat: bool, fields: dict[str, Any]) -> RequestPlan:
    make, bytes_of = (PLANNER.chat, chat_body) if chat else (PLANNER.completion, body)
    return make(bytes_of(max_tokens=2000, **fields))


def check(
    name: str,
    stream: tuple[list[int], FinishReason],
    rows: list[list[int]],
    merged: int,
    chat: bool,
    fields: dict[str, Any],
) -> None:
    tokens, finish = stream
    made, tables = case(name)
    usage = {"include_usage": True}
    logprobs = fields.get("logprobs") is not None

    whole_desk = Desk(tables)
    whole = whole_desk.collected(plan_of(chat, fields), chat=chat)
    whole_desk.deliver(whole_desk.rows(whole.choices[0].stream.handle, [tokens], finish, logprobs=logprobs))
    expected = read_body(whole)

    desk = Desk(tables)
    reply, sink = desk.streamed(plan_of(chat, fields | {"stream": True, "stream_options": usage}), chat=chat)
    desk.deliver(desk.rows(reply.choices[0].stream.handle, rows, finish, logprobs=logprobs), merged=merged)
    got = within_text(read_stream(sink))

    if not fields.get("return_token_ids"):
        got.tokens = expected.tokens = []
    assert got == expected
    assert sink.lines()[-1] == "data: [DONE]"
    assert (sink.ended, desk.outcomes) == ("finish", whole_desk.outcomes)
    assert sink.over.result() is None

    skip, include = fields.get("skip_special_tokens", True), fields.get("include_stop_str_in_output", False)
    shown = tokens[:-1] if finish is not FinishReason.LENGTH and not include else tokens
    text = made.decode(shown, skip=skip)
    assert (got.text, stop_of(got)) == until_stop(text, fields.get("stop", []), include)
    counted = got.usage["completion_tokens"]
    assert 0 < counted <= len(tokens)
    before_last = sum(map(len, rows[: (len(rows) - 1) // merged * merged]))
    if stop_of(got) is not None and counted < before_last:
        assert len(desk.engine_client.aborted) == 1, "the engine was not told of the stop string at once"
    if stop_of(got) is None or counted > before_last:
        assert not desk.engine_client.aborted


def stop_of(reading: Reading) -> str | None:
    return reading.stop_reason if isinstance(reading.stop_reason, str) else None


def check_any(name: str, data: st.DataObject) -> None:
    """A stream with features, an interval, stop strings and rows as ``data`` has them."""
    stream = data.draw(streams(name))
    made, _ = case(name)
    fields: dict[str, Any] = {"include_stop_str_in_output": data.draw(st.booleans())}
    if data.draw(st.booleans()):
        fields["stop"] = data.draw(stop_strings(made.decode(stream[0], skip=True)))
    if data.draw(st.booleans()):
        fields["skip_special_tokens"] = False
    chat = data.draw(st.booleans())
    if data.draw(st.booleans()):  # logprobs are checked against the token ids of the same event
        fields["return_token_ids"] = True
        if data.draw(st.booleans()):
            fields |= {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}
    interval = data.draw(st.sampled_from([1, 2, 7, "auto", "any"]))
    sizes, merged = [interval], 1
    if interval == "auto":  # one token per row, merged by a server that is behind
        sizes, merged = [1], data.draw(st.integers(1, 5))
    elif interval == "any":
        sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    in_loop(lambda: check(name, stream, cut(stream[0], sizes), merged, chat, fields))


@pytest.mark.parametrize("name", TRAINED)
@settings(max_examples=60)
@given(data=st.data())
def test_joined_events_are_the_whole_reply(name: str, data: st.DataObject) -> None:
    check_any(name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
@settings(max_examples=600)
@given(data=st.data())
def test_joined_events_are_the_whole_reply_in_many_more_cases(name: str, data: st.DataObject) -> None:
    check_any(name, data)


def test_a_stop_string_within_the_last_character_leaves_the_logprobs_whole() -> None:
    """A token of half a character, and an end none of whose tokens is part of the text."""
    fields = {"stop": ["\ufffd"], "return_token_ids": True, "logprobs": 1}
    stream = [129, 2], FinishReason.EOS
    in_loop(lambda: check("byte-level BPE", stream, [[129], [2]], 1, False, fields))
