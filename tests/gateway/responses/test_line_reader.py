"""Replies in JSON lines, however they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.gateway.responses.expected_reply import make_observer
from penstock.gateway.responses.held_bytes import HeldBytes
from penstock.gateway.responses.line_reader import LineParser
from penstock.gateway.responses.outcome import Outcome, TransportResult, classify_outcome
from penstock.gateway.responses.response_observer import Observation, StreamObserver
from penstock.gateway.responses.token_usage import ReportedUsage
from penstock.streaming.sse_parser import SSEError


def line(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "created_at": "t", "done": False} | fields).encode() + b"\n"


def message(text: str, **more: Any) -> bytes:
    return line(message={"role": "assistant", "content": text, **more})


END = line(message={"role": "assistant", "content": ""}, done=True, prompt_eval_count=7, eval_count=5)
CHAT = (
    message("", thinking="Hm")
    + message("a")
    + b" "
    + message("ä\\n")
    + message("", tool_calls=[{"function": {"name": "f"}}])
    + END
)
PROMPT = line(response="a") + line(response="b") + line(response="", thinking="c") + line(response="d") + END


def watch(*chunks: bytes) -> Observation:
    kind = [(b"content-type", b"application/x-ndjson")]
    observer = make_observer(
        200, kind, "stream", on_response=lambda id: None, strip_usage=False, held=HeldBytes()
    )
    assert isinstance(observer, StreamObserver)
    relayed = [observer.feed(chunk, float(at)) for at, chunk in enumerate(chunks)]
    assert b"".join(relayed) + observer.finish(9.0) == b"".join(chunks)
    return observer.seen


def outcome(seen: Observation) -> Outcome:
    return classify_outcome(TransportResult.COMPLETE, 200, seen, "/api/chat")


@pytest.mark.parametrize("raw", [CHAT, PROMPT, PROMPT.removesuffix(b"\n")])
def test_tokens_and_usage_however_it_is_cut(raw: bytes) -> None:
    for at in range(len(raw) + 1):
        seen = watch(raw[:at], raw[at:])
        assert (seen.token_events, seen.usage) == (4, ReportedUsage(7, 5))
        assert (seen.content_problem, outcome(seen)) == (None, Outcome.OK)
    assert watch(*raw.splitlines(keepends=True)).token_events == 4


def test_what_goes_wrong() -> None:
    failed = watch(message("a"), b'{"error": "gone"}\n')
    assert (failed.error, outcome(failed)) == ("", Outcome.MODEL_SERVER_ERROR)
    assert outcome(watch(message("a"))) is Outcome.NETWORK_ERROR
    assert outcome(watch(message("a"), b"<html>\n", END)) is Outcome.CONTENT_ERROR
    assert outcome(watch(message("a") + line(done=True))) is Outcome.OK_WITHOUT_USAGE


def test_a_line_is_bounded() -> None:
    parser = LineParser(max_line_bytes=10)
    assert [event.data for event in parser.feed(b"{}\n\r\n[]")] == [b"{}", None]
    with pytest.raises(SSEError, match="more than 10 bytes"):
        parser.feed(b"x" * 9)
    assert parser.pending == b"[]" + b"x" * 9
