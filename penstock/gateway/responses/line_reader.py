"""Reads replies that are JSON, a line each, as Ollama's API sends them."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.gateway.responses.event_reader import (
    EMPTY_EVENT,
    TOKENS_ONLY,
    ContentError,
    ParsedEvent,
    error_in,
)
from penstock.gateway.responses.token_usage import UsageFields
from penstock.streaming.sse_parser import Event, SSEError


class _Message(msgspec.Struct, gc=False):
    content: Any = None
    thinking: Any = None
    tool_calls: Any = None


class _Line(msgspec.Struct, gc=False):
    message: _Message | None = None
    response: Any = None
    thinking: Any = None
    tool_calls: Any = None
    done: Any = None
    error: msgspec.Raw = msgspec.Raw()
    prompt_eval_count: Any = None
    eval_count: Any = None


_decode = msgspec.json.Decoder(_Line).decode


def read_line(data: bytes, name: bytes = b"") -> ParsedEvent:
    """Parse a line. Raises ContentError."""
    if not data or data.isspace():
        return EMPTY_EVENT
    try:
        line = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise ContentError(f"not a line of Ollama's: {fault}") from None
    message = line.message or _Message(line.response, line.thinking, line.tool_calls)
    tokens = bool(message.content or message.thinking or message.tool_calls)
    if not line.done:
        error = error_in(line.error)
        return ParsedEvent(error=error) if error else TOKENS_ONLY if tokens else EMPTY_EVENT
    usage = None
    if line.eval_count is not None or line.prompt_eval_count is not None:
        usage = UsageFields(prompt_tokens=line.prompt_eval_count, completion_tokens=line.eval_count)
    return ParsedEvent(tokens=tokens, usage=usage, finish=True, end=True)


class LineParser:
    """Splits a stream into lines, as :class:`~penstock.streaming.sse_parser.SSEParser` does into events."""

    def __init__(self, max_line_bytes: int = 16 << 20) -> None:
        self._most = max_line_bytes
        self._pending = bytearray()

    @property
    def between_events(self) -> bool:
        """Whether the next byte starts a line."""
        return not self._pending

    @property
    def pending(self) -> bytes:
        """Bytes after the last line that was returned."""
        return bytes(self._pending)

    @property
    def pending_bytes(self) -> int:
        """How many bytes are :attr:`pending`."""
        return len(self._pending)

    def feed(self, chunk: bytes) -> list[Event]:
        """The lines that ``chunk`` completes. Raises SSEError; what was not returned is pending then."""
        end = chunk.rfind(b"\n") + 1
        lines = bytes(self._pending + chunk[:end]) if end else b""
        if end:
            self._pending.clear()
        self._pending += chunk[end:]
        if len(self._pending) > self._most:
            raise SSEError(f"a line of more than {self._most} bytes")
        return [Event(line, line.strip() or None) for line in lines.splitlines(keepends=True)]
