"""Server-sent events, written as rows arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ..streaming.stream import Stream, StreamError, chunk
from ..streaming.token_table import escape_json
from ..wire.frames import Logprobs
from .events import DONE, EventShape, error_event, usage
from .plan import RequestPlan
from .replies import Choice, RequestContext, RequestReply, prompt_token_ids
from .sink import Sink


class StreamedReply(RequestReply):
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
        elif self._plain and not self._paused:
            tables = self.context.tables  # while text is held back, the next token must not overtake it
            stream.table = tables.plain if choice.plain else tables.nothing

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
        delta = None
        if choice.parser is not None:
            delta, text = choice.parse(text).fields(), ""
        if not (text or delta or ended or entry or plan.return_token_ids):
            return data
        return data + shape.event(
            index,
            escape_json(text),
            delta=delta,
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
            if choice.stream is not None and self._plain and choice.begun and choice.plain:
                choice.stream.table = self.context.tables.plain

    # -- ends

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        if self.ended:
            return
        self.drop_streams(stream)
        if not self.started:
            self._finish(error)
            return
        data = b""
        for index, choice in enumerate(self.choices):
            if choice.finish_reason:
                continue
            text, delta = choice.assembler.finish().text, None
            if choice.parser is not None:
                delta, text = choice.parse(text).fields(), ""
            if text or delta:
                data += self.shape.event(index, escape_json(text), delta=delta)
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
