"""Streamed responses, whole ones and the items that both end with."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.serve import ServeConfig
from penstock.dialects.responses.dialect import Responses
from penstock.dialects.responses.reasoning_content import open_reasoning
from penstock.dialects.responses.reply import ResponsesReply
from penstock.generation.dialect import EventContent
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.replies import turns
from penstock.generation.replies.logprobs import PIECE_CANDIDATES, TokenLogprobs
from penstock.streaming.stream import StreamError
from penstock.wire.arrays import F32, I32
from penstock.wire.frames import FinishReason
from tests.dialects.responses.reading import events_of, final_response
from tests.generation.planning import tiny_input_processor, tiny_tokenizer
from tests.generation.replying import Desk, in_loop, tables_of
from tests.store.stores import opened

AGENT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
    "{# <think></think> <tool_call></tool_call> #}"
)
TOOLS = [
    {"type": "function", "name": "look", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
]
THOUGHT, SECOND_THOUGHT = "<think>\nIt is “late”.\n</think>\n\n", "<think>quick</think>"
TEXT, MORE_TEXT = 'The "answer" is \\ 42, naïve 👍🏽.\n', "  And more."
LOOK = (
    '<tool_call>\n{"name": "look", "arguments": {"place": "caf\\u00e9 \\"x\\"", "n": [1, 2]}}\n</tool_call>'
)
PATCH = '<tool_call>{"name": "patch", "arguments": {"input": "a\\n\\t\\"b\\" \\ud83d\\ude00 é"}}</tool_call>'
RAW_PATCH = '<tool_call>{"name": "patch", "arguments": {"text": "no input"}}</tool_call>'
SPAWN = '\n<tool_call>{"name": "agents__spawn", "arguments": {}}</tool_call>\n'
PLAIN = "The answer is 42."
PIECES = (TEXT, MORE_TEXT, LOOK, PATCH, RAW_PATCH, SPAWN)


@cache
def dialect() -> Responses:
    template = ChatTemplate({"default": AGENT_TEMPLATE}, {})
    return Responses(ServeConfig(), tiny_input_processor(template=template))


@cache
def tables() -> Any:
    return tables_of(tiny_tokenizer().raw)


def request(**fields: Any) -> bytes:
    return json.dumps({"input": "Hi.", "tools": TOOLS} | fields).encode()


def rows_of(text: str, widths: list[int]) -> list[list[int]]:
    tokens = tiny_tokenizer().encode(text, False)
    rows, start = [], 0
    while start < len(tokens):
        width = widths[len(rows) % len(widths)]
        rows.append(tokens[start : start + width])
        start += width
    return rows


def streamed(
    text: str,
    widths: list[int],
    finish: FinishReason = FinishReason.LENGTH,
    error: StreamError | None = None,
    pause: int = 1 << 30,
    **fields: Any,
) -> list[dict[str, Any]]:
    """The events of a response. ``pause``: rows after which the client does not read for as many."""

    def run() -> None:
        desk = Desk(tables())
        plan = dialect().plan(request(stream=True, **fields))
        reply, sink = desk.streamed(plan, format=dialect().reply_format(plan, "r"))
        rows = rows_of(text, widths)
        last = FinishReason.NONE if error else finish
        frames = desk.rows(0, rows, last, logprobs="include" in fields)
        desk.deliver(frames[:pause])
        if pause < len(frames):
            reply.on_pause()
            desk.deliver(frames[pause : 2 * pause + 1])
            if not reply.ended:
                reply.on_resume()
            desk.deliver(frames[2 * pause + 1 :])
        if error is not None:
            desk.streams.fail(0, 0, error)
        found.extend(events_of(sink.data.decode()))

    found: list[dict[str, Any]] = []
    in_loop(run)
    return found


def whole(text: str, finish: FinishReason = FinishReason.LENGTH, **fields: Any) -> dict[str, Any]:
    def run() -> None:
        desk = Desk(tables())
        plan = dialect().plan(request(**fields))
        format = dialect().reply_format(plan, "r")
        reply = desk.collected(plan, format=format)
        desk.deliver(desk.rows(0, rows_of(text, [7]), finish, logprobs="include" in fields))
        assert format.keep(reply) is None
        found.update(json.loads(b"".join(format.whole(reply))))

    found: dict[str, Any] = {}
    in_loop(run)
    return found


def comparable(response: dict[str, Any]) -> dict[str, Any]:
    """Without what is drawn for each request: ids, and the time."""
    text = json.dumps(response).replace(response["id"].removeprefix("resp_"), "ID")
    calls: dict[str, str] = {}
    text = re.sub(r"call_[0-9a-f]{24}", lambda match: calls.setdefault(match[0], f"call_{len(calls)}"), text)
    made: dict[str, Any] = json.loads(text)
    return made | {"created_at": 0, "completed_at": made["completed_at"] and 1}


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def test_every_kind_of_item() -> None:
    text = THOUGHT + TEXT + LOOK + PATCH + SPAWN
    final = final_response(streamed(text, [1], FinishReason.GRAMMAR))
    thought, message, look, patch, spawn = final["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "It is “late”.\n"}]
    assert thought["summary"] == []
    assert message["content"][0]["text"].strip() == TEXT.strip()
    assert (look["name"], json.loads(look["arguments"])) == ("look", {"place": 'café "x"', "n": [1, 2]})
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", 'a\n\t"b" 😀 é')
    assert (spawn["name"], spawn["namespace"], spawn["arguments"]) == ("spawn", "agents", "{}")
    assert len({item["id"] for item in final["output"]}) == 5
    assert (final["status"], {item["status"] for item in final["output"]}) == ("completed", {"completed"})
    usage = final["usage"]
    assert usage["output_tokens"] == len(tiny_tokenizer().encode(text, False))
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(("", THOUGHT, SECOND_THOUGHT)),
    st.lists(st.sampled_from(PIECES), max_size=4),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.sampled_from((FinishReason.LENGTH, FinishReason.GRAMMAR)),
    st.integers(0, 40),
    st.booleans(),
    st.booleans(),
    st.integers(1, 40),
)
def test_events_are_the_final_object_and_the_whole_response(
    thought: str,
    pieces: list[str],
    widths: list[int],
    finish: FinishReason,
    cut: int,
    summary: bool,
    logprobs: bool,
    pause: int,
) -> None:
    text = thought + "".join(pieces)
    text = text[: max(1, len(text) - cut)] or "x"
    fields: dict[str, Any] = {"include": ["reasoning.encrypted_content"]}
    if summary:
        fields["reasoning"] = {"summary": "auto"}
    if logprobs:
        fields["include"].append("message.output_text.logprobs")
    final = final_response(streamed(text, widths, finish, pause=pause, **fields))
    assert comparable(final) == comparable(whole(text, finish, **fields))


@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_can_be_sent_back(summary: str | None) -> None:
    fields = {"reasoning": {"summary": summary}, "include": ["reasoning.encrypted_content"]}
    item, _ = final_response(streamed(THOUGHT + TEXT, [3], **fields))["output"]
    text = item["summary"][0]["text"] if summary else item["content"][0]["text"]
    assert open_reasoning(item["encrypted_content"]) == text
    assert ("content" in item) == (summary is None)


def test_an_output_that_is_cut_is_incomplete() -> None:
    final = final_response(streamed(THOUGHT + LOOK[:60], [4]))
    assert final["status"] == "incomplete"
    assert final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in final["output"]] == ["completed", "incomplete"]


def test_a_failure_after_the_start_is_an_event() -> None:
    error = StreamError(503, "engine_died", "The engine is gone.")
    final = final_response(streamed(TEXT, [2], error=error))
    assert final["status"] == "failed"
    assert final["error"]["code"] == "server_error"
    assert final["error"]["message"] == "The engine is gone."
    assert final["output"][0]["status"] == "incomplete"
    assert final["output"][0]["content"][0]["text"].startswith("The ")


def test_an_empty_output_has_an_empty_message() -> None:
    final = final_response(streamed("x", [1], FinishReason.EOS))
    assert kinds(final) == ["message"]
    assert final["output"][0]["content"][0]["text"] == ""
    assert comparable(final) == comparable(whole("x", FinishReason.EOS))


def test_text_after_calls_is_a_message_of_its_own() -> None:
    final = final_response(streamed(TEXT + LOOK + MORE_TEXT, [1], FinishReason.GRAMMAR))
    assert kinds(final) == ["message", "function_call", "message"]


def test_plain_text_asks_the_format_for_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EventContent] = []
    write = ResponsesReply.event

    def event(self: ResponsesReply, index: int, content: EventContent) -> bytes:
        asked.append(content)
        return write(self, index, content)

    monkeypatch.setattr(ResponsesReply, "event", event)
    events = streamed("Plain text of several tokens, one after the other.", [1], tools=[])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert len(deltas) > 8
    assert len(asked) == 2, "the first text and the end"
    assert final_response(events)["output"][0]["content"][0]["text"].startswith("Plain text")


class Spelled:
    """How many candidates were spelled: of each piece of JSON."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        spell = TokenLogprobs._entries

        def counted(logprobs: TokenLogprobs, ids: I32, values: F32) -> bytes:
            self.sizes.append(ids.size)
            return spell(logprobs, ids, values)

        monkeypatch.setattr(TokenLogprobs, "_entries", counted)

    def take(self) -> list[int]:
        sizes, self.sizes = self.sizes, []
        return sizes


def test_logprobs_of_a_whole_reply_are_spelled_once_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    spelled = Spelled(monkeypatch)

    def run() -> None:
        desk = Desk(tables())
        plan = dialect().plan(request(tools=[], **LOGPROBS))
        format = dialect().reply_format(plan, "r")
        reply = desk.collected(plan, format=format)
        rows = rows_of(PLAIN * 400, [256])
        desk.deliver(desk.rows(0, rows, FinishReason.LENGTH, logprobs=True))
        assert format.keep(reply) is None
        assert spelled.take() == [], "before the reply is sent"
        sizes, body = [], b""
        for piece in format.whole(reply):
            body += piece
            sizes.append(sum(spelled.take()))
        assert max(sizes) <= PIECE_CANDIDATES
        candidates = 2 * sum(map(len, rows))
        assert candidates > 4 * PIECE_CANDIDATES
        assert sum(sizes) == candidates
        [item] = json.loads(body)["output"]
        assert len(item["content"][0]["logprobs"]) == candidates // 2

    in_loop(run)


@pytest.mark.parametrize("text", [PLAIN, PLAIN * 400], ids=["short", "long"])
def test_an_ended_response_is_freed_without_a_collection(text: str) -> None:
    async def run(*, stream: bool) -> None:
        desk = Desk(tables())
        plan = dialect().plan(request(tools=[], stream=stream, **LOGPROBS))
        format = dialect().reply_format(plan, "r")
        rows = rows_of(text, [256])
        if stream:
            _, sink = desk.streamed(plan, format=format)
            desk.deliver(desk.rows(0, rows, FinishReason.LENGTH, logprobs=True))
            while not sink.ended:  # noqa: ASYNC110 - the sink is no asyncio object
                await asyncio.sleep(0)
            sink.listener = None  # as connections do
        else:
            reply = desk.collected(plan, format=format)
            desk.deliver(desk.rows(0, rows, FinishReason.LENGTH, logprobs=True))
            assert format.keep(reply) is None
            assert json.loads(b"".join(format.whole(reply)))["status"] == "incomplete"

    def alive() -> int:
        return sum(type(each) is ResponsesReply for each in gc.get_objects())

    gc.collect()
    before = alive()  # of other tests
    gc.disable()
    try:
        for stream in (False, True):
            asyncio.run(run(stream=stream))
            assert alive() <= before
    finally:
        gc.enable()


def test_a_long_response_is_stored_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spelled = Spelled(monkeypatch)
    monkeypatch.setattr(turns, "TURN_S", 0)  # a turn has one piece

    async def run() -> None:
        with opened(tmp_path / "store") as store:
            keeping = Responses(ServeConfig(), dialect()._processor, store)
            desk = Desk(tables())
            plan = keeping.plan(request(tools=[], **LOGPROBS))
            format = keeping.reply_format(plan, "r")
            reply = desk.collected(plan, format=format)
            desk.deliver(desk.rows(0, rows_of(PLAIN * 400, [256]), FinishReason.LENGTH, logprobs=True))
            kept = format.keep(reply)
            assert kept is not None
            rounds = []
            while not kept.done():
                rounds.append(sum(spelled.take()))
                await asyncio.sleep(0)
            assert 0 < max(rounds) <= PIECE_CANDIDATES < sum(rounds)
            stored = await store.get(format.id, "")
            assert stored is not None
            assert stored.body == b"".join(format.whole(reply))
            [item] = json.loads(stored.body)["output"]
            assert await store.items([item["id"]], "")

    asyncio.run(run())


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


@pytest.mark.parametrize("text", [TEXT, THOUGHT + TEXT, THOUGHT + TEXT + LOOK])
@pytest.mark.parametrize("width", [1, 3, 7])
def test_logprobs_of_characters_of_several_tokens(text: str, width: int) -> None:
    spelled = [json.loads(tables().names[token].quoted) for token in tiny_tokenizer().encode(TEXT, False)]
    streams = final_response(streamed(text, [width], FinishReason.GRAMMAR, **LOGPROBS))
    for final in streams, whole(text, FinishReason.GRAMMAR, **LOGPROBS):
        [part] = [item["content"][0] for item in final["output"] if item["type"] == "message"]
        told = [entry["token"] for entry in part["logprobs"]]
        assert "".join(told).strip() == "".join(spelled).strip()


@pytest.mark.parametrize("width", [1, 2, 5])
def test_logprobs_of_text_that_began_as_a_mark(width: int) -> None:
    broken = '<tool_call>\n{"name": 5, "arguments": {"place": 1}}\n</tool_call>'
    text = THOUGHT + broken
    final = final_response(streamed(text, [width], FinishReason.GRAMMAR, **LOGPROBS))
    assert comparable(final) == comparable(whole(text, FinishReason.GRAMMAR, **LOGPROBS))
    [part] = [item["content"][0] for item in final["output"] if item["type"] == "message"]
    assert part["text"] == broken
    assert "".join(entry["token"] for entry in part["logprobs"]).strip() == broken


@pytest.mark.parametrize("text", [PLAIN, THOUGHT + PLAIN, THOUGHT + PLAIN + LOOK])
def test_logprobs_are_those_of_the_text(text: str) -> None:
    final = final_response(streamed(text, [1], FinishReason.GRAMMAR, **LOGPROBS))
    [part] = [item["content"][0] for item in final["output"] if item["type"] == "message"]
    told = bytes(byte for entry in part["logprobs"] for byte in entry["bytes"])
    assert told.strip() == PLAIN.encode() == part["text"].encode().strip()
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {1}
    whole_part = [item for item in whole(text, FinishReason.GRAMMAR, **LOGPROBS)["output"] if "role" in item]
    assert whole_part[0]["content"][0]["logprobs"] == part["logprobs"]
