"""Parses the reply to one request: of HTTP/1.1 from the bytes of its connection, of HTTP/2 as it comes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import httptools
import msgspec

from penstock.client import DONE
from penstock.streaming.sse_parser import SSEParser

EVENTS = b"text/event-stream"
_SHOWN = 300
"""Maximum characters of an error that are kept."""


class Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Text(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int
    text: str | None = None
    delta: _Text | None = None
    message: _Text | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def output(self) -> str:
        part = self.delta or self.message
        return self.text or (part.content if part else None) or ""


class _Reply(msgspec.Struct):
    """An event, or a whole body."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Reply).decode


class ReceivedReply:
    """Over HTTP/1.1 :meth:`feed` gets the bytes that a connection receives during one request. Over HTTP/2
    :meth:`begin`, :meth:`on_body`, and :meth:`end` or :meth:`cut` are called."""

    def __init__(self) -> None:
        self.status = 0
        """HTTP status; 0 before it is received."""
        self.texts: defaultdict[int, str] = defaultdict(str)
        """By choice."""
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        """By choice, if requested."""
        self.finish_reasons: dict[int, str] = {}
        self.usage: Usage | None = None
        self.events = 0
        self.done = False
        """``[DONE]`` was received."""
        self.error = ""
        """The server's error as JSON, or a description of an invalid reply."""
        self.whole = False
        """The HTTP reply is complete."""
        self.reusable = False
        self.cut_reason = ""
        """Why it ended before its end, over HTTP/2."""
        self.refused = False
        """The server has not begun the request, and says so, over HTTP/2."""
        self._parser = httptools.HttpResponseParser(self)
        self._streamed = False
        self._sse = SSEParser()
        self._body = bytearray()

    def feed(self, data: bytes) -> None:
        """More bytes of the connection."""
        if self.whole:
            self.error = self.error or f"bytes after the reply: {data[:_SHOWN]!r}"
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.error = self.error or f"not HTTP: {error}"

    def begin(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """The head of a reply over HTTP/2; names are in lower case."""
        self.status = status
        self._streamed = headers.get(b"content-type", b"").startswith(EVENTS)

    def end(self) -> None:
        """The reply is complete."""
        self.whole = True
        if not self._streamed:
            self._take(bytes(self._body))

    def cut(self, reason: str, *, refused: bool) -> None:
        """The stream or its connection has ended."""
        self.cut_reason, self.refused = reason, refused

    # -- httptools calls these

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._streamed = value.startswith(EVENTS)

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if not self._streamed:
            self._body += data
            return
        for event in self._sse.feed(data):
            if event.data is None:
                continue
            self.events += 1
            if self.done:
                self.error = self.error or f"an event after [DONE]: {event.data[:_SHOWN]!r}"
            elif event.data == DONE:
                self.done = True
            else:
                self._take(event.data)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        self.end()

    def _take(self, data: bytes) -> None:
        try:
            reply = _decode(data)
        except msgspec.MsgspecError as error:
            self.error = self.error or f"{error}: {data[:_SHOWN]!r}"
            return
        if reply.error is not None:
            self.error = self.error or str(reply.error)[:_SHOWN]
        for choice in reply.choices:
            self.texts[choice.index] += choice.output
            self.tokens[choice.index] += choice.token_ids or ()
            if choice.finish_reason is not None:
                self.finish_reasons[choice.index] = choice.finish_reason
        self.usage = reply.usage or self.usage
