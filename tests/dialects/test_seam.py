"""An API of another shape is added without changes outside its own code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.completions import openapi
from penstock.dialects.completions.dialect import Completions
from penstock.dialects.openapi_schema import check_names
from penstock.generation.dialect import NO_INFO, EventContent, ReplyFormat, RequestInfo
from penstock.generation.parsers.delta import TextKind
from penstock.generation.plan import RequestPlan
from penstock.generation.replies.collected import CollectedReply
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.errors import ApiError
from penstock.streaming.stream import StreamError
from penstock.wire.frames import FinishReason
from tests.generation.planning import body, tiny_input_processor, tiny_tokenizer
from tests.generation.replying import Desk, MemorySink, in_loop, tables_of


class NumberedReply(ReplyFormat):
    """Events with a sequence number and a name; the last one repeats the text."""

    api = "numbered"
    fast_path = False

    def __init__(self, id: str, note: str) -> None:
        self.id = id
        self._note = note
        self._number = 0
        self._text = b""

    def _event(self, name: str, **fields: Any) -> bytes:
        self._number += 1
        data = json.dumps({"type": name, "sequence_number": self._number, **fields})
        return f"event: {name}\ndata: {data}\n\n".encode()

    def head(self, index: int, kind: TextKind = TextKind.CONTENT) -> bytes:
        return b""

    def tail(self, kind: TextKind = TextKind.CONTENT) -> bytes:
        return b""

    def first(self, index: int, prompt_token_ids: Sequence[int] | None, usage: TokenUsage | None) -> bytes:
        return self._event("created", note=self._note) + self._event("in_progress")

    def event(self, index: int, content: EventContent) -> bytes:
        text = content.text
        self._text += text
        delta = self._event("delta", text=json.loads(b'"%b"' % text)) if text else b""
        done = self._event("done", text=json.loads(b'"%b"' % self._text)) if content.finish_reason else b""
        return delta + done

    def end(self, usage: TokenUsage | None) -> bytes:
        return self._event("completed")

    def error(self, error: StreamError) -> bytes:
        return self._event("failed", code=error.code)

    def whole(self, reply: CollectedReply) -> Iterator[bytes]:
        yield bytes(reply.choices[0].text)


class Numbered(Completions):
    """The body of a completion with a note, and numbered events."""

    path = "/v1/numbered"

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        plan = super().plan(body, info)
        plan.dialect_fields = {"note": "kept"}
        return plan

    def reply_format(self, plan: RequestPlan, request_id: str) -> ReplyFormat:  # type: ignore[override]
        return NumberedReply(request_id, plan.dialect_fields["note"])

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return b"failed: " + error.message.encode()


def numbered() -> Numbered:
    return Numbered(ServeConfig(), tiny_input_processor())


def events_of(sink: MemorySink) -> list[Any]:
    return [json.loads(line.partition("data: ")[2]) for line in sink.data.decode().split("\n\n")[:-1]]


def streamed(dialect: Numbered) -> tuple[Desk, MemorySink]:
    desk = Desk(tables_of(tiny_tokenizer().raw))
    plan = dialect.plan(body(stream=True, max_tokens=20))
    _, sink = desk.streamed(plan, format=dialect.reply_format(plan, "r"))
    return desk, sink


def test_its_format_sees_every_event() -> None:
    def run() -> None:
        desk, sink = streamed(numbered())
        tokens = tiny_tokenizer().encode("def main(): pass", False)
        desk.deliver(desk.rows(0, [[token] for token in tokens], FinishReason.LENGTH))
        events = events_of(sink)
        assert [event["sequence_number"] for event in events] == list(range(1, len(events) + 1))
        assert [event["type"] for event in events[:2]] == ["created", "in_progress"]
        assert events[0]["note"] == "kept"
        assert [event["type"] for event in events[-2:]] == ["done", "completed"]
        text = "".join(event["text"] for event in events if event["type"] == "delta")
        assert text == events[-2]["text"] == tiny_tokenizer().decode(tokens)

    in_loop(run)


def test_its_errors_have_its_shape() -> None:
    def run() -> None:
        desk, sink = streamed(numbered())
        desk.deliver(desk.rows(0, [[tiny_tokenizer().encode("def", False)[0]]]))
        desk.streams.fail(0, 0, StreamError(503, "engine_died", "The engine is gone."))
        assert [event["type"] for event in events_of(sink)][-1] == "failed"

    in_loop(run)
    assert numbered().error_body(ApiError(400, "no"), "r") == b"failed: no"


def test_names_of_two_apis_must_differ() -> None:
    with pytest.raises(ValueError, match="both define /v1/completions"):
        check_names((openapi.DESCRIPTION, openapi.DESCRIPTION))
