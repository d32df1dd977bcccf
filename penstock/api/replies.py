"""What a request makes of its streams: events as they come, or one JSON body at the end.

Both kinds of reply give every request exactly one end, and free its streams when the client has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..streaming.assembler import Assembler, Piece
from ..streaming.stream import Stream, StreamError, chunk
from ..streaming.table import StreamTable
from ..streaming.token_table import TokenTable, escape_json
from ..wire.frames import Finish, Logprobs
from .events import DONE, EventShape, error_event, usage
from .fleet import Fleet
from .logprobs import LogprobFormatter
from .plan import RequestPlan
from .sink import Sink

_REASON = {Finish.EOS: b"stop", Finish.STOP_TOKEN: b"stop", Finish.LENGTH: b"length"}
_ABORTED = StreamError(500, "engine_error", "The engine stopped this request.")


class ClientGone(Exception):
    """The client closed its connection before its reply was complete."""


class StreamFailed(Exception):
    """A stream of a request that is not streamed failed."""

    def __init__(self, error: StreamError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(slots=True)
class TextTables:
    """Token texts, made once per process. ``plain``: one entry per id of the engine's vocabulary."""

    table: TokenTable
    """With special tokens skipped."""
    full: TokenTable
    """With special tokens as text."""
    plain: list[bytes | None]
    """The fast path's: None for tokens that need care, special ones included."""
    nothing: list[bytes | None]
    """All None: every row takes the slow path."""

    def of(self, plan: RequestPlan) -> TokenTable:
        return self.table if plan.skip_special_tokens else self.full


@dataclass(slots=True)
class Prompt:
    """One tokenized prompt."""

    ids: bytes
    """int32 little-endian."""
    length: int
    echo: str = ""
    """Text to put before the output."""


@dataclass(slots=True)
class Choice:
    """One stream's state beyond the fast path."""

    prompt: Prompt
    assembler: Assembler
    stream: Stream | None = None
    """None once the stream has ended."""
    tokens: list[int] = field(default_factory=list)
    """Collected reply: the output so far. Streamed reply: tokens of text held back."""
    text: list[str] = field(default_factory=list)
    """Collected reply: the output's text so far. Streamed reply: text held for a slow client."""
    logprobs: LogprobFormatter | None = None
    generated: int = 0
    """Tokens of the output, known at its end."""
    begun: bool = False
    finish_reason: bytes = b""
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestContext:
    """What a reply needs from its process."""

    fleet: Fleet
    streams: StreamTable
    tables: TextTables
    on_end: Callable[[StreamedReply | CollectedReply, str], None]
    """Called once per reply with its outcome: stop, length, error, abort."""
    max_backlog: int


class _Reply:
    """What streamed and collected replies share: their choices, and how streams end."""

    def __init__(self, context: RequestContext, plan: RequestPlan, shape: EventShape, arrival: float) -> None:
        self.context = context
        self.plan = plan
        self.shape = shape
        self.arrival = arrival
        self.choices: list[Choice] = []
        self.cached = 0
        self.ended = False

    def add(self, prompt: Prompt, rank: int) -> Stream:
        """A stream for the next choice; the caller opens and submits it."""
        plan, tables = self.plan, self.context.tables
        index = len(self.choices)
        assembler = Assembler(tables.of(plan), plan.stop, include_stop=plan.include_stop_str)
        choice = Choice(prompt, assembler)
        if plan.logprobs >= 0:
            choice.logprobs = LogprobFormatter(tables.full, chat=plan.chat, alternatives=plan.logprobs)
        stream = self._make_stream(index, rank)
        choice.stream = stream
        self.choices.append(choice)
        return stream

    # -- what the two kinds do differently

    def _make_stream(self, index: int, rank: int) -> Stream:
        raise NotImplementedError

    def _extend(
        self, choice: Choice, stream: Stream, text: str, tokens: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        """A row's text and tokens that count; the choice has ended when its ``stream`` is None."""
        raise NotImplementedError

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        raise NotImplementedError

    # -- rows

    def on_row(
        self, stream: Stream, tokens: Sequence[int], finish: Finish, cached: int, logprobs: Logprobs | None
    ) -> None:
        if finish is Finish.ABORT:
            self.on_failure(stream, _ABORTED)
            return
        choice = self.choices[stream.index]
        self.cached += cached
        if self.plan.max_tokens == 0:  # the one token that is generated is not shown
            tokens, finish, logprobs = (), Finish.LENGTH, None
        piece = assemble(choice.assembler, self._finished_text(tokens, finish), finish)
        self._settle(choice, stream, piece, tokens, finish)
        counted = tokens[: piece.used] if piece.stop is not None else tokens
        self._extend(choice, stream, piece.text, counted, logprobs)

    # -- ends

    def usage(self) -> dict[str, Any]:
        """Prompt tokens count once per prompt, whatever n is."""
        prompts = {id(choice.prompt): choice.prompt.length for choice in self.choices}
        generated = sum(choice.generated for choice in self.choices)
        return usage(sum(prompts.values()), generated, self.cached)

    def drop_streams(self) -> None:
        """Stop the streams that still run; what they send is discarded."""
        for choice in self.choices:
            stream, choice.stream = choice.stream, None
            if stream is not None:
                self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        self.context.fleet.abort(stream)
        self.context.streams.discard(stream, self.context.tables.nothing)

    def _settle(
        self, choice: Choice, stream: Stream, piece: Piece, tokens: Sequence[int], finish: Finish
    ) -> None:
        """Note why the choice ended, if this row ended it. ``piece.stop`` outranks the engine's reason."""
        if piece.stop is not None:
            choice.finish_reason, choice.stop_reason = b"stop", piece.stop
            choice.generated = self.context.streams.generated(stream) - (len(tokens) - piece.used)
            choice.stream = None
            if not finish:
                self._drop(stream)
        elif finish:
            choice.finish_reason = _REASON[finish]
            choice.stop_reason = tokens[-1] if finish is Finish.STOP_TOKEN else None
            choice.generated = self.context.streams.generated(stream) if self.plan.max_tokens != 0 else 0
            choice.stream = None

    def _end(self, outcome: str) -> None:
        assert isinstance(self, StreamedReply | CollectedReply)
        self.ended = True
        self.context.on_end(self, outcome)

    def _outcome(self) -> str:
        return "length" if any(choice.finish_reason == b"length" for choice in self.choices) else "stop"

    def _finished_text(self, tokens: Sequence[int], finish: Finish) -> Sequence[int]:
        """The tokens whose text counts: EOS and stop tokens end a text, they are no part of it.

        Unless special tokens are wanted as text, or the stop itself is (vLLM's include_stop_str).
        """
        if finish in (Finish.EOS, Finish.STOP_TOKEN) and not self.plan.include_stop_str:
            return tokens[:-1]
        return tokens


def assemble(assembler: Assembler, tokens: Sequence[int], finish: Finish) -> Piece:
    """Push a row; at its stream's end, flush. ``used`` counts the row's tokens."""
    piece = assembler.push(tokens)
    if finish and piece.stop is None:
        rest = assembler.finish()
        piece = Piece(piece.text + rest.text, piece.used, rest.stop)
    return piece


class StreamedReply(_Reply):
    """Server-sent events, written as rows arrive. The headers go out with the first event."""

    def __init__(
        self, context: RequestContext, plan: RequestPlan, shape: EventShape, arrival: float, sink: Sink
    ) -> None:
        super().__init__(context, plan, shape, arrival)
        self.sink = sink
        self.done: asyncio.Future[StreamError | None] = asyncio.get_running_loop().create_future()
        """Resolves at the end; to an error when it came before anything was sent."""
        self.started = False
        self._tail = shape.tail() + b"\r\n"
        self._paused = False
        self._held_size = 0
        self._plain = (
            not plan.stop
            and plan.logprobs < 0
            and not plan.return_token_ids
            and not plan.continuous_usage
            and plan.skip_special_tokens
        )
        sink.listen(self)

    def _make_stream(self, index: int, rank: int) -> Stream:
        nothing = self.context.tables.nothing  # the first row starts the reply
        return Stream(self, index, rank, nothing, self.sink.write, self.shape.head(index), self._tail)

    # -- rows

    def _extend(
        self, choice: Choice, stream: Stream, text: str, tokens: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        data = self._events(choice, stream, text, tokens, logprobs)
        if choice.stream is None:
            data += self._ending()
        if data:
            self._send(data)
        if choice.stream is None and all(other.stream is None for other in self.choices):
            self._finish(None)
        elif self._plain and not self._paused and not choice.assembler.pending:
            stream.table = self.context.tables.plain

    def _events(
        self, choice: Choice, stream: Stream, text: str, tokens: Sequence[int], logprobs: Logprobs | None
    ) -> bytes:
        plan, shape, index = self.plan, self.shape, stream.index
        ended = choice.stream is None
        data = b""
        prompt_ids = None
        running_usage = self._running_usage(choice, stream) if plan.continuous_usage else None
        if not choice.begun:
            choice.begun = True
            prompt_ids = prompt_token_ids(choice.prompt) if plan.return_token_ids else None
            text = choice.prompt.echo + text
            if plan.chat:
                start = None if running_usage is None else usage(choice.prompt.length, 0, None)
                data = shape.first(index, prompt_ids, start)
                prompt_ids = None
        entry = None if choice.logprobs is None else choice.logprobs.event(tokens, logprobs)
        if not (text or ended or entry or plan.return_token_ids):
            return data
        return data + shape.event(
            index,
            escape_json(text),
            finish_reason=choice.finish_reason if ended else None,
            stop_reason=choice.stop_reason,
            logprobs=entry,
            token_ids=tokens if plan.return_token_ids else None,
            prompt_token_ids=prompt_ids,
            usage=running_usage,
        )

    def _running_usage(self, choice: Choice, stream: Stream) -> dict[str, Any]:
        generated = choice.generated if choice.stream is None else self.context.streams.generated(stream)
        return usage(choice.prompt.length, generated, None)

    def _ending(self) -> bytes:
        """What follows the last choice's last event."""
        if any(choice.stream is not None for choice in self.choices):
            return b""
        return (self.shape.usage_event(self.usage()) if self.plan.include_usage else b"") + DONE

    # -- writing

    def _send(self, data: bytes) -> None:
        """Write events, or hold them while the client does not read."""
        if not self.started:
            self.started = True
            self.sink.start()
        self.sink.write(chunk(data))
        if self._paused:
            self._held_size += len(data)
            if self._held_size > self.context.max_backlog:
                self._cut()

    def on_pause(self) -> None:
        """The transport's buffer is full: count what else goes into it, row by row."""
        self._paused = True
        self._held_size = 0
        for choice in self.choices:
            if choice.stream is not None:
                choice.stream.table = self.context.tables.nothing

    def on_resume(self) -> None:
        self._paused = False
        for choice in self.choices:
            if choice.stream is not None and self._plain and choice.begun and not choice.assembler.pending:
                choice.stream.table = self.context.tables.plain

    # -- ends

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        if self.ended:
            return
        self.choices[stream.index].stream = None
        self.drop_streams()
        if not self.started:
            self._finish(error)
            return
        data = b""
        for index, choice in enumerate(self.choices):
            rest = choice.assembler.finish().text if not choice.finish_reason else ""
            if rest:
                data += self.shape.event(index, escape_json(rest))
        self._send(data + error_event(error))
        self._finish(error)

    def on_disconnect(self) -> None:
        if not self.ended:
            self.drop_streams()
            self._end("abort")
            if not self.done.done():
                self.done.set_result(None)

    def _cut(self) -> None:
        """The client read too slowly for too long."""
        self.drop_streams()
        self.sink.cut()
        self._end("cut")
        if not self.done.done():
            self.done.set_result(None)

    def _finish(self, error: StreamError | None) -> None:
        if self.ended:
            return
        self._end("error" if error is not None else self._outcome())
        if self.started:
            self.sink.finish()
            error = None
        if not self.done.done():
            self.done.set_result(error)


class CollectedReply(_Reply):
    """One JSON body. Tokens are only gathered until their stream ends; text is made once."""

    def __init__(self, context: RequestContext, plan: RequestPlan, shape: EventShape, arrival: float) -> None:
        super().__init__(context, plan, shape, arrival)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolves when all choices have ended; raises StreamFailed or ClientGone."""

    def _make_stream(self, index: int, rank: int) -> Stream:
        return Stream(self, index, rank, self.context.tables.nothing, _no_write)

    def _extend(
        self, choice: Choice, stream: Stream, text: str, tokens: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        choice.text.append(text)
        choice.tokens.extend(tokens)
        if choice.logprobs is not None:
            choice.logprobs.collect(tokens, logprobs)
        if all(other.stream is None for other in self.choices):
            self._end(self._outcome())
            self.done.set_result(None)

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        if not self.ended:
            self.choices[stream.index].stream = None
            self.drop_streams()
            self._end("error")
            self.done.set_exception(StreamFailed(error))

    def on_disconnect(self) -> None:
        if not self.ended:
            self.drop_streams()
            self._end("abort")
            self.done.set_exception(ClientGone())

    def on_pause(self) -> None:
        pass

    def on_resume(self) -> None:
        pass


def prompt_token_ids(prompt: Prompt) -> list[int]:
    return memoryview(prompt.ids).cast("i").tolist()


def _no_write(data: bytes) -> None:
    raise AssertionError("a collected reply has no fast path")
