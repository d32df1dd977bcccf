"""Observers of chat completions that pass on the same reply in the API of the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.gateway.responses.response_observer import MAX_ERROR_BYTES, ReplyObserver, StreamObserver
from penstock.gateway.translation.chat_output import UNREADABLE, ChatOutput, TranslationError, error_of
from penstock.gateway.translation.translated_request import TranslatedReply
from penstock.generation.dialect import EventContent
from penstock.generation.parsers.delta import Delta
from penstock.generation.replies.token_usage import TokenUsage
from penstock.streaming.sse_parser import Event
from penstock.streaming.stream import StreamError

MAX_OUTPUT_BYTES = 4 << 20
"""Bytes of the output of one reply: responses are repeated whole at the end."""
_DONE = b"[DONE]"
_json = msgspec.json.Decoder()


def _ignore() -> None: ...


@dataclass(slots=True, kw_only=True)
class TranslatedStream(StreamObserver):
    """A stream of chat completions. Each of its events is passed on as it comes."""

    output: ChatOutput
    reply: TranslatedReply
    on_failed: Callable[[], None] = _ignore
    """Called when the reply has ended with an error, whatever the server sends besides."""
    ended: bool = False
    """The last event was made."""
    _made: bytearray = field(default_factory=bytearray)
    _opened: bool = False
    _size: int = 0
    """Bytes of output."""

    def feed(self, chunk: bytes, now: float) -> bytes:
        StreamObserver.feed(self, chunk, now)
        self._between_events = False  # no event may bypass this method
        if self.seen.unread and not self.ended:
            self.seen.note_problem(self.seen.unread)
            self._fail(StreamError(502, UNREADABLE, f"The reply cannot be read: {self.seen.unread}"))
        return self._take()

    def finish(self, now: float) -> bytes:
        StreamObserver.finish(self, now)
        if self.seen.ended:
            self._try(self._end)
        elif not self.seen.lacks_end:  # that the relay tells
            self._made += self.error(StreamError(502, UNREADABLE, "The model server's reply has no end."))
        return self._take()

    def _read(self, event: Event, now: float) -> Any:
        meaning = StreamObserver._read(self, event, now)
        if event.data is None and event.raw.startswith(b":") and not self.ended:
            self._made += self.reply.keep_alive  # it tells clients that somebody is there
        if (data := event.data) is not None:
            self._try(lambda: self._translate(data))
        if meaning.error is not None and not self.ended:
            self._fail(StreamError(502, "upstream_failed", "The model server failed."))
        return meaning

    def _try(self, step: Callable[[], None]) -> None:
        """Make what is next; if that fails, the end."""
        if self.ended:
            return
        try:
            step()
        except TranslationError as error:
            if not error.own:
                self.seen.note_problem(str(error))
            self._fail(error.error)

    def _translate(self, data: bytes) -> None:
        if data.startswith(_DONE):
            self._end()
            return
        if not data or data.isspace():
            return
        output = self.output
        had_ended = output.finish_reason is not None
        delta = output.read(data)
        if had_ended or not output.begun:
            return
        content = EventContent(delta=delta)
        if output.finish_reason is not None:
            delta.add(output.end())
            content.finish_reason, content.stop_reason = output.finish_reason, output.stop_sequence
        elif not delta and self._opened:
            return
        self._send(content)

    def _send(self, content: EventContent) -> None:
        assert content.delta is not None, "all content is a delta here"
        size = _size(content.delta)
        if self._size + size > MAX_OUTPUT_BYTES or not self.held.reserve_bytes(size):
            error = StreamError(502, UNREADABLE, "The model server's reply is too long to be translated.")
            raise TranslationError(error)
        self._size += size
        self._open()
        self._made += self._whole(self.reply.event(0, content))

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            usage = self.output.usage
            prompt, cached = (0, None) if usage is None else (usage.prompt_tokens, usage.cached_tokens)
            self._made += self.reply.first(0, None, TokenUsage(prompt, 0, cached))

    def _end(self) -> None:
        output = self.output
        if output.finish_reason is None:
            self._send(EventContent(delta=output.end(), finish_reason=b"stop"))
        assert output.finish_reason is not None, "it has ended"
        usage = output.usage or TokenUsage(0, self.seen.token_events, None)
        self.reply.conclude(output.finish_reason, usage)
        self._made += self._whole(self.reply.end(usage))
        self.ended = True

    def _fail(self, error: StreamError) -> None:
        self._made += self.error(error)
        asyncio.get_running_loop().call_soon(self.on_failed)

    def error(self, error: StreamError) -> bytes:
        """The events that end the stream; empty if it has ended."""
        if self.ended:
            return b""
        self.ended = True
        return self._whole(self.reply.error(error))

    def _whole(self, events: bytes) -> bytes:
        """``events`` with what the reply has left of them."""
        rest = self.reply.take_rest()
        return events if rest is None else b"".join((events, *rest))

    def close(self) -> None:
        StreamObserver.close(self)
        self.held.release_bytes(self._size)
        self._size = 0

    def _take(self) -> bytes:
        made = bytes(self._made)
        self._made.clear()
        return made


def _size(delta: Delta) -> int:
    return sum(len(piece.text) if hasattr(piece, "text") else len(piece.arguments) for piece in delta.pieces)


@dataclass(slots=True, kw_only=True)
class TranslatedBody(ReplyObserver):
    """A whole chat completion, or an error in the place of any reply."""

    output: ChatOutput
    reply: TranslatedReply
    status: int
    """Status of the reply."""
    error_body: Callable[[StreamError], bytes]
    on_error: Callable[[int, str], None]
    """Called with the status of an error that the client gets, and why; empty: the server says so."""
    problem: str = ""
    """Why the reply is none that can be translated."""

    def feed(self, chunk: bytes, now: float) -> bytes:
        ReplyObserver.feed(self, chunk, now)
        return b""

    def finish(self, now: float) -> bytes:
        body = bytes(self._body)
        ReplyObserver.finish(self, now)
        if self.status >= 400:
            return self.error_body(_error_in(body, self.status))
        problem = self.problem or self.seen.unread
        if problem:
            return self._error(
                StreamError(502, UNREADABLE, f"The model server's reply cannot be read: {problem}"), problem
            )
        try:
            delta = self.output.read(body)
            if not self.output.begun:
                raise TranslationError(
                    StreamError(502, UNREADABLE, "The model server's reply has no choices.")
                )
        except TranslationError as error:
            return self._error(error.error, "" if error.own else str(error))
        delta.add(self.output.end())
        content = EventContent(
            delta=delta,
            finish_reason=self.output.finish_reason,
            stop_reason=self.output.stop_sequence,
        )
        return b"".join(self.reply.body(content, self.output.usage or TokenUsage(0, 0, None)))

    def _error(self, error: StreamError, reason: str) -> bytes:
        self.on_error(502, reason)
        return self.error_body(error)


def _error_in(body: bytes, status: int) -> StreamError:
    """The error that a body has; what is no JSON may be a page of some proxy."""
    try:
        said = _json.decode(body) if len(body) <= MAX_ERROR_BYTES else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        said = None
    if isinstance(said, list) and said:
        said = said[0]
    if not isinstance(said, dict):
        said = {"message": f"The model server answered with status {status}."}
    error = said.get("error") or said
    if isinstance(error, str) and isinstance(said.get("message"), str):
        error = said
    if isinstance(error, dict) and "message" not in error and "detail" in error:
        error = {"message": str(error["detail"])[:1000]}
    found = error_of(error, status)
    return StreamError(status, found.code, found.message, param=found.param)
