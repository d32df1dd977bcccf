"""What servers behind a gateway do in tests."""

from __future__ import annotations

import socket

from tests.gateway.processes import Call

TEXT = '{"choices":[{"index":0,"text":" a"}]}'
USAGE = '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
ERROR = '{"error":{"message":"engine gone","code":"engine_error"}}'
DONE = "[DONE]"
LATIN_1 = "text/event-stream; charset=latin-1"
REPLY = b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}'


def good(call: Call) -> None:
    """Streams with usage when asked for it, or answers whole."""
    if not call.json.get("stream"):
        call.reply(200, REPLY)
    elif (call.json.get("stream_options") or {}).get("include_usage"):
        call.stream(TEXT, TEXT, USAGE, DONE)
    else:
        call.stream(TEXT, TEXT, DONE)


def broken_stream(call: Call) -> None:
    """By the end of the connection: a reset may overtake what was sent before."""
    call.stream(TEXT, end=False)
    call.connection.shutdown(socket.SHUT_RDWR)


def cut_head(call: Call) -> None:
    call.send(b"HTTP/1.1 200 OK\r\ncontent-")
    call.reset()


def stalled(call: Call) -> None:
    call.wait_until_gone()


def stalled_in_stream(call: Call) -> None:
    call.stream(TEXT, end=False)
    call.wait_until_gone()
