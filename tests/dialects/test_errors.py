"""An error has one type, whether it is a reply or an event of a stream."""

from __future__ import annotations

import json

import pytest

from penstock.dialects.chat.reply import ChatReply
from penstock.dialects.completions.reply import CompletionReply
from penstock.dialects.openai_reply import OpenAIReply
from penstock.generation.replies.stream_failure import stream_failed
from penstock.http.errors import TYPES
from penstock.streaming.stream import StreamError


@pytest.mark.parametrize("kind", [CompletionReply, ChatReply])
@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_an_event_has_the_body_of_the_reply(kind: type[OpenAIReply], status: int) -> None:
    error = StreamError(status, "some_code", "It failed.", 5)
    event = kind("id", "m", "assistant").error(error)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    body = json.loads(event.removeprefix(b"data: "))
    assert body["error"]["message"] == f"It failed. (status {status})"
    assert body["error"] | {"message": "It failed."} == stream_failed(error).fields()
    assert body["error"]["type"] == TYPES[status]


def test_no_done_follows_an_error() -> None:
    error = StreamError(503, "engine_died", "The engine is gone.")
    plain = CompletionReply("id", "m", "assistant").error(error)
    assert b"[DONE]" not in plain
