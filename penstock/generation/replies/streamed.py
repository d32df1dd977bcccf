"""The reply to a request with ``stream``: server-sent events, written as token rows arrive.

A client that does not read gets its rows later as one event; it is cut when too much waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from penstock.generation.dialect import EventContent, ReplyFormat
from penstock.generation.plan import RequestPlan
from penstock.generation.replies.long_events import LongEvents
from penstock.generation.replies.reply import Choice, Prompt, RequestContext, RequestReply, prompt_token_ids
from penstock.generation.replies.token_usage import TokenUsage
from penstock.http.sink import EventSink
from penstock.logging_setup import RateLimitedLog
from penstock.streaming.output_processor import FAULT
from penstock.streaming.request_states import ReplyEvent, ReplyState
from penstock.streaming.rows.token_fields import SpelledLogprobs, TokenFields
from penstock.streaming.stream import Stream, StreamError, StreamFields
from penstock.streaming.token_table import escape_json
from penstock.wire.frames import WITH_TEXT, FinishReason
from penstock.wire.logprobs import ENTRY_CANDIDATES, Logprobs

log = logging.getLogger(__name__)
_log_fault = RateLimitedLog(log, logging.ERROR)
_log_slow = RateLimitedLog(log)

TOKEN_BYTES = 40
"""Memory in bytes of one held token id: a reference and an int object."""
CANDIDATE_BYTES = 48
"""Bytes of one held logprob, of a token or an alternative: 8 in its columns, and about 40 when it is sent."""
NOT_KEPT = StreamError(500, "internal_error", "The response could not be stored.")
_NOT_READING = (ReplyState.BLOCKED, ReplyState.PAUSED)


class StreamedReply(RequestReply):
    """Writes events to the client's connection; the headers precede the first event.

    An event has text, token ids and logprobs of the same tokens: they are held until there is text to send.
    While the client does not read, all rows are held, and become one event per choice; and so they are while
    events are sent that take long to make.
    """

    # -- at first
    _last_comment = 0.0
    """When the last comment was sent."""
    _backlog = 0
    """Bytes that wait for the client, counted while rows are held."""
    _long: LongEvents | None = None
    """Events that are being sent in turns."""
    _after_long: Callable[[], None] | None = None
    """What comes after them."""

    def __init__(
        self,
        context: RequestContext,
        plan: RequestPlan,
        format: ReplyFormat,
        arrival: float,
        *,
        sink: EventSink,
        on_end: Callable[[StreamError | None], None],
    ) -> None:
        """``arrival``: of the request, monotonic seconds. ``on_end`` is called once, at the end; with an
        error if nothing was sent before it."""
        super().__init__(context, plan, format, arrival)
        self.sink = sink
        self._on_end: Callable[[StreamError | None], None] | None = on_end
        self._tail = format.tail()
        self._with_tokens = plan.return_token_ids or format.sends_tokens
        of_text = (
            format.fast_path
            and not plan.stop
            and not plan.continuous_usage
            # parsers drop the markers
            and (plan.skip_special_tokens or plan.format is not None or not format.sends_text)
            and plan.max_tokens != 0
        )
        self._plain = of_text and plan.logprobs < 0 and not self._with_tokens
        """Whether events need no more than the texts of their tokens."""
        self._fields: TokenFields | None = None
        """What events have for each token besides its text, if the output processor may write them."""
        if of_text and not self._plain and plan.logprobs < ENTRY_CANDIDATES:
            names = context.tables.names_for(plan)
            self._fields = format.token_fields(names, 1 + plan.logprobs, ids=self._with_tokens)

    def add(self, prompt: Prompt, rank: int) -> Stream:
        stream = super().add(prompt, rank)
        if self._fields is not None:
            logprobs = self.choices[-1].logprobs
            places = None if logprobs is None or not self._fields.placed else logprobs.places
            stream.fields = StreamFields(self._fields, places)
        if prompt.echo and self.plan.format is None:
            self.choices[-1].text += prompt.echo.encode()
        return stream

    def _make_stream(self, index: int, rank: int) -> Stream:
        format = self.format
        return Stream(self, index, rank, self.sink.write, format.head(index), self._tail, format.record)

    @property
    def _paused(self) -> bool:
        """Whether rows are held."""
        return self.state in _NOT_READING or self._long is not None

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
        plain = self._plain or (self._fields is not None and (choice.begun or not self._with_tokens))
        held = choice.text or choice.holds_tokens or not choice.plain or choice.parsed is not None
        if held or self._paused or not plain or finish not in WITH_TEXT:  # a parser must see the end
            super().on_row(stream, tokens, finish, cached, logprobs)
            return
        texts = self.context.tables.plain
        try:
            text = b"".join([texts[token] for token in tokens])  # type: ignore[misc]
        except TypeError:  # None: a token whose text depends on others
            text = b""
        if not text:
            super().on_row(stream, tokens, finish, cached, logprobs)
            return
        content = EventContent(text)
        if choice.logprobs is not None and isinstance(logprobs, SpelledLogprobs):
            content.spelled_logprobs = logprobs.field
            choice.logprobs.places.at += logprobs.characters
        elif choice.logprobs is not None:
            choice.logprobs.add(tokens, logprobs)
            content.logprobs = choice.logprobs.take()
        if self._with_tokens:
            content.token_ids = tokens
        self._plain_row(choice, stream, content, finish, cached)

    def _plain_row(
        self, choice: Choice, stream: Stream, content: EventContent, finish: FinishReason, cached: int
    ) -> None:
        """The first or last row of most streams."""
        self._on_slow_row(stream, cached)
        format, index = self.format, stream.index
        opening = b"" if choice.begun else format.first(index, None, self._first_usage(choice))
        choice.begun = True
        if finish:
            self._finish_choice(choice, stream, finish)
            content.finish_reason = choice.finish_reason
            content.kv_transfer_params = choice.kv_transfer_params
            content.weight_versions = choice.weight_versions
            self._send_choice(choice, opening + format.event(index, content))
        else:
            made = format.blocks or self._fields is not None
            event = format.event(index, content) if made else stream.event(content.text)
            self._send_choice(choice, opening + event)

    def _extend(
        self, choice: Choice, stream: Stream, text: str, tokens: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        self._hold(choice, text, tokens, logprobs)
        if self._paused and choice.stream is not None:
            if self._backlog > self.context.max_backlog and self.state in _NOT_READING:
                _log_slow(
                    "slow",
                    "a stream is cut: it is made faster than its client reads, for which %d bytes wait; "
                    "--max-stream-backlog allows %d",
                    self._backlog,
                    self.context.max_backlog,
                )
                self._cut()
            return
        self._send_choice(choice, self._event(choice, stream))

    def _send_choice(self, choice: Choice, events: bytes) -> None:
        """Send events of a choice. With the end of the last choice the reply ends."""
        if self._long is not None:
            self._after_long = partial(self._send_choice, choice, events)
            return
        rest = self.format.take_rest()
        ended = choice.stream is None and self._all_choices_ended()
        if rest is not None:
            self._send_long(events, rest, partial(self._end_complete, b"") if ended else self._go_on)
            return
        if ended:
            self._end_complete(events)
            return
        if events:
            self._send(events)
        self._choose_path(choice)

    def _hold(self, choice: Choice, text: str, tokens: Sequence[int], logprobs: Logprobs | None) -> None:
        """Keep a row's text, tokens and logprobs for the choice's next event."""
        if choice.parsed is not None:
            self._backlog += choice.parsed.size
        encoded = text.encode()
        choice.text += encoded
        self._backlog += len(encoded)
        if self._with_tokens:
            choice.tokens += tokens
            self._backlog += TOKEN_BYTES * len(tokens)
        if choice.logprobs is not None:
            choice.logprobs.add(tokens, logprobs)
            self._backlog += CANDIDATE_BYTES * (1 + self.plan.logprobs) * len(tokens)

    def _choose_path(self, choice: Choice) -> None:
        """Let the output processor write the choice's next rows itself, unless text is held back."""
        stream = choice.stream
        if stream is None or self.state is not ReplyState.STREAMING or self._long is not None:
            return
        if not self._plain and self._fields is None:
            return
        kind, format, index = choice.plain, self.format, stream.index
        if kind is not None and not choice.holds_tokens and format.text_open(index, kind):
            if format.blocks or choice.parsed is not None:
                stream.set_event(format.head(index, kind), format.tail(kind))
            path = self.sink.write_target if len(self.choices) == 1 else None
            stream.write_plain_rows(path, guarded=choice.guarded)
        else:
            stream.stop_plain_rows()

    def choose_paths(self) -> None:
        """Choose again how the next rows are written: something else was written to the client."""
        for choice in self.choices:
            if choice.begun:
                self._choose_path(choice)

    # -- events

    def _event(self, choice: Choice, stream: Stream, *, failed: bool = False) -> bytes:
        """All that the choice holds as one event; empty if there is no text and the choice goes on.

        The API's opening event, if it has one, precedes the first row in any case. ``failed``: no more rows
        come, so tokens without text are sent too.
        """
        plan, format, index = self.plan, self.format, stream.index
        ended = bool(choice.finish_reason)
        opening, prompt_ids = b"", None
        if not choice.begun:
            prompt_ids = prompt_token_ids(choice.prompt) if plan.return_token_ids else None
            opening = format.first(index, prompt_ids, self._first_usage(choice))
            if opening:
                choice.begun, prompt_ids = True, None
        text, delta = choice.text.decode(), choice.take_delta()
        choice.text.clear()
        if not (text or delta or ended or failed or (format.sends_tokens and choice.tokens)):
            return opening
        tokens, choice.tokens = choice.tokens, []
        logprobs = None if choice.logprobs is None else choice.logprobs.take()
        if not (text or delta or ended or tokens or logprobs):
            return opening
        choice.begun = True
        generated = (
            self.context.streams.num_delivered(stream) if choice.stream is stream else choice.generated
        )
        content = EventContent(
            text=escape_json(text),
            delta=delta,
            finish_reason=choice.finish_reason if ended else None,
            stop_reason=choice.stop_reason,
            logprobs=logprobs,
            token_ids=tokens if self._with_tokens else None,
            prompt_token_ids=prompt_ids,
            usage=self._usage(choice, generated),
            kv_transfer_params=choice.kv_transfer_params,
            weight_versions=choice.weight_versions,
        )
        return opening + format.event(index, content)

    def _first_usage(self, choice: Choice) -> TokenUsage | None:
        """The usage of the opening event."""
        if self.format.usage_first:
            return TokenUsage(choice.prompt.length, 0, choice.cached)
        return self._usage(choice, 0)

    def _usage(self, choice: Choice, generated: int) -> TokenUsage | None:
        """The usage of one event, if the request asks for it in every event."""
        if not self.plan.continuous_usage:
            return None
        return TokenUsage(choice.prompt.length, generated, None, choice.reasoning_tokens(generated))

    # -- writing

    def _send(self, data: bytes, *, last: bool = False) -> None:
        self._advance(ReplyEvent.SEND)
        self.sink.send(data, last=last, kind=self.format.stream_kind)

    def _send_long(self, events: bytes, rest: Iterator[bytes], then: Callable[[], None]) -> None:
        """Send events, and in turns what the format has left of them; ``then`` go on."""
        if events:
            self._send(events)
        for choice in self.choices:
            if choice.stream is not None:
                choice.stream.stop_plain_rows()
        self._backlog = 0
        self._long = LongEvents(
            rest,
            self.context.turns,
            self.sink,
            send=self._send,
            on_sent=self._on_long_sent,
            on_fault=self._cut,
            paused=self.state in _NOT_READING,
        )
        self._after_long = then

    def _on_long_sent(self) -> None:
        then, self._after_long, self._long = self._after_long, None, None
        if then is not None:
            then()

    def _go_on(self) -> None:
        """Send what was held meanwhile, unless the client does not read."""
        if self.state is ReplyState.STREAMING:
            self._send_held()

    def send_keep_alive(self, since: float, now: float) -> None:
        """Send a sign of life unless one was sent after ``since``. It may precede the first event."""
        if not (self._paused or self.ended) and self._last_comment <= since:
            self._last_comment = now
            self._send(self.format.keep_alive)
            if self.started:
                self.choose_paths()  # bytes may wait now

    def on_pause(self) -> None:
        """The client does not read: hold its rows."""
        self._advance(ReplyEvent.PAUSE)
        if self._long is None:
            self._backlog = 0
        else:
            self._long.pause()
        self._backlog += self.sink.unread()
        for choice in self.choices:
            if choice.stream is not None:
                choice.stream.stop_plain_rows()

    def on_resume(self) -> None:
        """The client reads again: send one event per choice."""
        self._advance(ReplyEvent.RESUME)
        if self._long is not None:
            self._long.resume()
            return
        try:
            self._send_held()
        except Exception:  # noqa: BLE001 - this reply ends
            _log_fault("resume", "a reply failed when its client read again", exc_info=True)
            if not self.ended:
                self._fail(None, FAULT)

    def _send_held(self) -> None:
        data = b""
        for choice in self.choices:
            stream = choice.stream
            if stream is not None and self.context.streams.num_delivered(stream):
                data += self._event(choice, stream)
        rest = self.format.take_rest()
        if rest is not None:
            self._send_long(data, rest, self._go_on)
            return
        if data:
            self._send(data)  # which may pause again
        self.choose_paths()

    # -- the end: one of four, each of which calls _end

    def _end_complete(self, events: bytes) -> None:
        """All choices have ended; ``events`` are the last ones of the last choice."""
        kept = self.format.keep(self)
        if kept is None:
            self._end_with(self._complete_outcome(), events + self._last_events())
            return
        if events:
            self._send(events)
        kept.add_done_callback(self._on_kept)

    def _last_events(self) -> bytes:
        return self.format.end(self.usage() if self.plan.include_usage else None)

    def _on_kept(self, kept: asyncio.Future[None]) -> None:
        """What the end had to wait for is done, or has failed."""
        failed = kept.cancelled() or kept.exception() is not None
        if self.ended:  # the client has disconnected
            return
        if failed:
            self._end_with("error", self.format.error(NOT_KEPT))
        else:
            self._end_with(self._complete_outcome(), self._last_events())

    def _end_with(self, outcome: str, events: bytes) -> None:
        """End the body by events, and by what the format has left of them."""
        rest = self.format.take_rest()
        if rest is None:
            self._end(outcome, events)
        else:
            self._send_long(events, rest, partial(self._end, outcome, b""))

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        """A stream failed: send what the choices hold and an error event. If nothing was sent before and
        there is nothing to send, ``on_end`` gets the error, which becomes an HTTP status."""
        if not self.ended:
            self._fail(stream, error)

    def _fail(self, stream: Stream | None, error: StreamError) -> None:
        """End the reply by an error; ``stream`` has ended by itself, the others are aborted."""
        if self._long is not None:
            self._after_long = partial(self._fail, stream, error)
            return
        running = [(choice, choice.stream) for choice in self.choices if choice.stream is not None]
        self.drop_streams(stream)
        events = b"".join([self._held_events(*each) for each in running if each[0].generated])
        if events or self.started:
            self._end_with("error", events + self.format.error(error))
        else:
            self._end(self._unsent_outcome(error), error=self._with_field(error))

    def stop(self) -> None:
        """End the reply with what it has, as its client asks."""
        for choice in self.choices:
            stream = choice.stream
            if stream is not None:
                super().on_row(stream, (), FinishReason.ABORT, 0, None)
                self._drop(stream)

    def on_disconnect(self) -> None:
        """The client is gone."""
        if not self.ended:
            self.drop_streams()
            self._end("abort")

    def _cut(self) -> None:
        """The client's backlog is full, or what it should be sent cannot be made: break the connection."""
        if not self.ended:
            self.sink.cut()
            self.drop_streams()
            self._end("cut")

    def _end(self, outcome: str, last_events: bytes | None = None, error: StreamError | None = None) -> None:
        """Every streamed reply ends here, once. ``last_events`` end the body; ``error`` is left to send."""
        if self._long is not None:
            self._long.cancel()
            self._long = self._after_long = None
        self._record_end(outcome)
        on_end, self._on_end = self._on_end, None  # breaks a reference cycle
        assert on_end is not None
        try:
            if last_events is not None:
                self._send(last_events, last=True)
        except Exception:  # noqa: BLE001 - this reply ends
            _log_fault("last events", "the end of a reply could not be written", exc_info=True)
            self.sink.cut()
        on_end(error)

    def _held_events(self, choice: Choice, stream: Stream) -> bytes:
        """The events of all that a choice still holds when its stream fails; none if what it holds is the
        cause."""
        try:
            if choice.assembler is not None and choice.parsed is not None:
                choice.parsed.end(choice.assembler)
            elif choice.assembler is not None:
                choice.text += choice.assembler.finish().text.encode()
            return self._event(choice, stream, failed=True)
        except Exception:  # noqa: BLE001 - this reply ends
            _log_fault("held", "text of a failed stream could not be sent", exc_info=True)
            return b""
