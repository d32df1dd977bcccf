"""Server-sent events, written as rows arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.generation.dialect import ReplyFormat, TokenUsage
from penstock.generation.plan import RequestPlan
from penstock.generation.replies import Choice, Prompt, RequestContext, RequestReply, prompt_token_ids
from penstock.http.sink import Sink
from penstock.streaming.chunked import chunk
from penstock.streaming.request_states import ReplyEvent, ReplyState
from penstock.streaming.stream import Stream, StreamError
from penstock.streaming.token_table import escape_json
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs

TOKEN_BYTES = 40
"""Memory of a token id that is held for a client: a reference and an int object."""
CANDIDATE_BYTES = 1024
"""The same of a token's logprob and of each of its alternatives: a dictionary, text and bytes."""
COMMENT = b": keep-alive\n\n"
"""A comment, which clients skip by the rules of server-sent events."""
_NOT_READING = (ReplyState.BLOCKED, ReplyState.PAUSED)
_WITH_TEXT = (FinishReason.NONE, FinishReason.LENGTH, FinishReason.GRAMMAR)
"""Rows whose tokens all belong to the text."""


class StreamedReply(RequestReply):
    """Server-sent events, written as rows arrive. The headers go out with the first event.

    Text, token ids and logprobs leave together: what a row adds is held until there is text to send, so that
    no event has a part of them, and while the client does not read, when it becomes one event.
    """

    def __init__(
        self,
        context: RequestContext,
        plan: RequestPlan,
        format: ReplyFormat,
        arrival: float,
        sink: Sink,
        on_end: Callable[[StreamError | None], None],
    ) -> None:
        """``on_end`` is called once, at the end; with an error if nothing was sent before it."""
        super().__init__(context, plan, format, arrival)
        self.sink = sink
        self._on_end: Callable[[StreamError | None], None] | None = on_end
        self._tail = format.tail() + b"\r\n"
        self._last_comment = 0.0
        """When the last comment was sent."""
        self._backlog = 0
        """Bytes that wait for the client; counted while it does not read."""
        self._plain = (
            not plan.stop
            and plan.logprobs < 0
            and not plan.return_token_ids
            and not plan.continuous_usage
            and plan.skip_special_tokens
            and plan.max_tokens != 0
        )

    def add(self, prompt: Prompt, rank: int) -> Stream:
        stream = super().add(prompt, rank)
        if prompt.echo:
            self.choices[-1].text += prompt.echo.encode()
        return stream

    def _make_stream(self, index: int, rank: int) -> Stream:
        return Stream(self, index, rank, self.sink.write, self.format.head(index), self._tail)

    @property
    def _paused(self) -> bool:
        return self.state in _NOT_READING

    # -- rows

    def on_row(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
    ) -> None:
        choice = self.choices[stream.index]
        held = choice.text or not choice.plain or choice.parser is not None  # a parser is told of the end
        if held or self._paused or not self._plain or finish not in _WITH_TEXT:
            super().on_row(stream, tokens, finish, cached, logprobs)
            return
        texts = self.context.tables.plain
        try:
            text = b"".join([texts[token] for token in tokens])  # type: ignore[misc]
        except TypeError:  # a None: a token that does not stand for itself
            text = b""
        if text:
            self._plain_row(choice, stream, text, finish, cached)
        else:
            super().on_row(stream, tokens, finish, cached, logprobs)

    def _plain_row(
        self, choice: Choice, stream: Stream, text: bytes, finish: FinishReason, cached: int
    ) -> None:
        """The first or the last row of most streams: JSON-escaped ``text``, as the rows between have it."""
        self._add_cached(stream, cached)
        format, index = self.format, stream.index
        opening = b"" if choice.begun else format.first(index, None, None)
        choice.begun = True
        if finish:
            self._close(choice, stream, finish)
            said = choice.kv_transfer_params
            last = format.event(index, text, finish_reason=choice.finish_reason, kv_transfer_params=said)
            self._put(choice, opening + last)
        else:
            self._send(b"".join((opening, stream.head, text, self._tail[:-2])))
            self._choose_path(choice)

    def _extend(
        self, choice: Choice, stream: Stream, text: str, tokens: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        self._hold(choice, text, tokens, logprobs)
        if self._paused and choice.stream is not None:
            if self._backlog > self.context.max_backlog:
                self._cut()
            return
        self._put(choice, self._event(choice, stream))

    def _put(self, choice: Choice, data: bytes) -> None:
        """Send events of a choice; what else ends the reply with them if it was the last one."""
        if choice.stream is None and self._all_ended():
            usage = self.usage() if self.plan.include_usage else None
            self._finish(self._outcome(), data + self.format.end(usage))
            return
        if data:
            self._send(data)
        self._choose_path(choice)

    def _hold(self, choice: Choice, text: str, tokens: Sequence[int], logprobs: Logprobs | None) -> None:
        """Keep what a row adds for the choice's next event."""
        encoded = text.encode()
        choice.text += encoded
        self._backlog += len(encoded)
        if self.plan.return_token_ids:
            choice.tokens += tokens
            self._backlog += TOKEN_BYTES * len(tokens)
        if choice.logprobs is not None:
            choice.logprobs.add(tokens, logprobs)
            self._backlog += CANDIDATE_BYTES * (1 + self.plan.logprobs) * len(tokens)

    def _choose_path(self, choice: Choice) -> None:
        """Whether the choice's next row may take the table's texts as they are."""
        if self._plain and self.state is ReplyState.STREAMING and choice.stream is not None:
            choice.stream.fast_path = choice.plain  # while text is held back, no token may overtake it

    # -- events

    def _event(self, choice: Choice, stream: Stream, *, failed: bool = False) -> bytes:
        """All that the choice holds as one event; nothing while that is no text, unless the choice ends.

        The event that opens a choice, where the API has one, leaves with the first row in any case.
        ``failed``: no more rows come, so tokens without text are sent as well.
        """
        plan, format, index = self.plan, self.format, stream.index
        ended = bool(choice.finish_reason)
        opening, prompt_ids = b"", None
        if not choice.begun:
            prompt_ids = prompt_token_ids(choice.prompt) if plan.return_token_ids else None
            opening = format.first(index, prompt_ids, self._usage(choice, 0))
            if opening:
                choice.begun, prompt_ids = True, None
        text, delta = choice.text.decode(), None
        choice.text.clear()
        if choice.parser is not None:
            delta, text = choice.parse(text), ""
        if not (text or delta or ended or failed):
            return opening
        tokens, choice.tokens = choice.tokens, []
        logprobs = None if choice.logprobs is None else choice.logprobs.take()
        if not (text or delta or ended or tokens or logprobs):
            return opening
        choice.begun = True
        generated = (
            self.context.streams.num_delivered(stream) if choice.stream is stream else choice.generated
        )
        return opening + format.event(
            index,
            escape_json(text),
            delta=delta,
            finish_reason=choice.finish_reason if ended else None,
            stop_reason=choice.stop_reason,
            logprobs=logprobs,
            token_ids=tokens if plan.return_token_ids else None,
            prompt_token_ids=prompt_ids,
            usage=self._usage(choice, generated),
            kv_transfer_params=choice.kv_transfer_params,
        )

    def _usage(self, choice: Choice, generated: int) -> TokenUsage | None:
        """For every event, if the client wants it."""
        return TokenUsage(choice.prompt.length, generated, None) if self.plan.continuous_usage else None

    # -- writing

    def _send(self, data: bytes, *, last: bool = False) -> None:
        self._advance(ReplyEvent.SEND)
        self.sink.send(chunk(data), last=last)
        if len(self.choices) == 1 and (stream := self.choices[0].stream) is not None:
            stream.descriptor = self.sink.descriptor  # what has just been sent may wait before it

    def send_keep_alive(self, since: float, now: float) -> None:
        """Send a comment unless there was one after ``since``. It may be the first thing the client gets."""
        if not self._paused and self._last_comment <= since:
            self._last_comment = now
            self._send(COMMENT)

    def on_pause(self) -> None:
        """The client does not read: from here on its rows are held, to become one event per choice."""
        self._advance(ReplyEvent.PAUSE)
        self._backlog = self.sink.unread()
        for choice in self.choices:
            if choice.stream is not None:
                choice.stream.fast_path = False

    def on_resume(self) -> None:
        self._advance(ReplyEvent.RESUME)
        data = b""
        for choice in self.choices:
            stream = choice.stream
            if stream is not None and self.context.streams.num_delivered(stream):
                data += self._event(choice, stream)
                self._choose_path(choice)
        if data:
            self._send(data)  # last, as it may pause again

    # -- ends

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        if self.ended:
            return
        running = [(choice, choice.stream) for choice in self.choices if choice.stream is not None]
        self.drop_streams(stream)
        data = b"".join([self._rest(*each) for each in running if each[0].generated])
        if not self.started and not data:  # an HTTP status can tell it
            self._end("error")
            self._notify_end(error)
            return
        self._finish("error", data + self.format.error(error))

    def _rest(self, choice: Choice, stream: Stream) -> bytes:
        """What a choice holds that ends too early: nothing that was generated is lost with it."""
        if choice.assembler is not None:
            choice.text += choice.assembler.finish().text.encode()
        return self._event(choice, stream, failed=True)

    def _finish(self, outcome: str, data: bytes) -> None:
        """Send the last events."""
        self._end(outcome)
        self._send(data, last=True)
        self._notify_end(None)

    def on_disconnect(self) -> None:
        if not self.ended:
            self._abandon("abort")

    def _cut(self) -> None:
        """The client read too slowly for too long."""
        self.sink.cut()
        self._abandon("cut")

    def _abandon(self, outcome: str) -> None:
        self.drop_streams()
        self._end(outcome)
        self._notify_end(None)

    def _notify_end(self, error: StreamError | None) -> None:
        on_end, self._on_end = self._on_end, None  # breaks a reference cycle
        assert on_end is not None
        on_end(error)
