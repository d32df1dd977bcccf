"""The base class of replies: turns the token rows of a request's choices into text and ends the choices.

The modules ``streamed`` and ``collected`` beside this one are the two kinds. Both end every request exactly
once and free its streams when the client disconnects.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import tokenizers

from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.sent_prompts import KnownPrefix
from penstock.generation.dialect import ReplyFormat
from penstock.generation.parsers.delta import Delta, TextKind
from penstock.generation.parsers.message import MessageFormat, MessageParser
from penstock.generation.plan import RequestPlan
from penstock.generation.pooling.reply import PooledReply
from penstock.generation.replies.logprobs import LogprobCollector, PromptLogprobFormatter
from penstock.generation.replies.parsed_output import ParsedOutput
from penstock.generation.replies.routed_experts import check_routes
from penstock.generation.replies.text_places import TextPlaces
from penstock.generation.replies.token_usage import RequestTimes, TokenUsage, count_usage
from penstock.generation.replies.turns import Turns
from penstock.streaming.assembler import Assembler, RowText
from penstock.streaming.engine_faults import (
    INVALID_LOGPROBS,
    INVALID_TRANSFER,
    INVALID_VECTORS,
    InvalidOutputError,
)
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.request_states import ReplyEvent, ReplyState, next_reply_state
from penstock.streaming.stop_strings import StopMatcher
from penstock.streaming.stream import Stream, StreamError
from penstock.streaming.token_names import MAX_NAMES, TokenIdNames, TokenNames
from penstock.streaming.token_table import TokenTable
from penstock.streaming.weight_spans import WeightSpan, weight_spans
from penstock.wire.arrays import F32, I32
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.media.items import MediaItem
from penstock.wire.messages import KVTransferParams, RoutedExperts

ABORT = b"abort"
"""Finish reason of a choice that an administrator has ended; its output is what there was by then."""
_REASON = {
    FinishReason.EOS: b"stop",
    FinishReason.STOP_TOKEN: b"stop",
    FinishReason.LENGTH: b"length",
    FinishReason.GRAMMAR: b"stop",
    FinishReason.ABORT: ABORT,
}
_STARTED = (ReplyState.STREAMING, ReplyState.PAUSED, ReplyState.ENDED)
_NO_TEXT = (FinishReason.EOS, FinishReason.STOP_TOKEN)
"""Reasons whose last token is not part of the text."""
GRAMMAR = "structured output"
"""How an engine's message about the grammar of a request starts."""
NO_TEXT = RowText("", 0, None)
"""Of a row whose tokens need not become text."""


@dataclass(slots=True)
class TextTables:
    """Texts of all tokens, built once per process."""

    table: TokenTable
    """Special tokens have no text."""
    full: TokenTable
    """Special tokens have their text."""
    plain: list[bytes | None]
    """JSON-escaped text per token id, one entry per row of the model's output; None for tokens whose text
    depends on others, and for special tokens."""
    names: TokenNames
    """Spellings of tokens in logprobs."""
    id_names: TokenIdNames
    """Names of tokens in logprobs with ``return_tokens_as_token_ids``."""

    @classmethod
    def make(cls, tokenizer: tokenizers.Tokenizer, vocab_size: int, max_logprobs: int = 0) -> TextTables:
        """The tables for a model with ``vocab_size`` output rows. ``max_logprobs``: what requests may ask
        for."""
        table = TokenTable.from_tokenizer(tokenizer)
        most = max(MAX_NAMES, max_logprobs)
        full = TokenTable.from_tokenizer(tokenizer, skip_special_tokens=False)
        # Special tokens take the slow path, which sends no event without text.
        plain = [text or None for text in table.text[:vocab_size]]
        plain += [None] * (vocab_size - len(plain))
        return cls(table, full, plain, TokenNames(full, most), TokenIdNames(full, most))

    def names_for(self, plan: RequestPlan) -> TokenNames:
        """The spellings of tokens that a request wants."""
        return self.id_names if plan.tokens_as_ids else self.names

    def guarded(self, guard: str) -> list[bool] | None:
        """Per token, whether a parser with this :attr:`~penstock.generation.parsers.delta.OutputParser.guard`
        must see it; None without a guard."""
        if not guard:
            return None
        marks = tuple(guard)
        found = []
        for escaped in self.plain:
            text = "" if escaped is None else escaped.decode()
            if "\\" in text:
                text = json.loads(f'"{text}"')
            found.append(text[-1:].isspace() or any(mark in text for mark in marks))
        return found

    def table_for(self, plan: RequestPlan) -> TokenTable:
        """The table for one request, by its ``skip_special_tokens``."""
        return self.table if plan.skip_special_tokens else self.full


class Prompt(msgspec.Struct, gc=False):
    """One tokenized prompt."""

    ids: bytes
    """int32 little-endian."""
    length: int
    echo: str = ""
    """Text that precedes the output."""
    logprobs: PromptLogprobFormatter | None = None
    """Logprobs of its tokens, if the request asks for them."""
    known: KnownPrefix | None = None
    """What it has in common with the prompt of the turn before, until it is submitted."""
    media: tuple[MediaItem, ...] = ()
    """The pictures in it."""
    routed: bytes = b""
    """With pictures: ``ids`` by which an engine is chosen, with the pictures' keys in their spans."""

    @property
    def image_tokens(self) -> int:
        """How many of its tokens stand for pictures."""
        return sum(item.length for item in self.media)


@dataclass(slots=True)
class Choice:
    """One output: its stream, and its text and tokens that were not sent yet."""

    prompt: Prompt
    assembler: Assembler | None = None
    """Detokenizer with stop strings; None while every row was on the fast path."""
    stream: Stream | None = None
    """None once the stream has ended."""
    tokens: list[int] = field(default_factory=list)
    """Token ids: in a collected reply all, in a streamed reply (if requested) those not sent yet."""
    ids: bytearray = field(default_factory=bytearray)
    """In place of ``tokens``, as int32, if the reply takes arrays."""
    text: bytearray = field(default_factory=bytearray)
    """The text of the same tokens, as UTF-8."""
    logprobs: LogprobCollector | None = None
    parsed: ParsedOutput | None = None
    """The message with calls and reasoning, in place of ``text``; None if the output is text alone."""
    generated: int = 0
    """Number of output tokens, set at the end."""
    cached: int = 0
    """Tokens of its prompt that its engine found in the prefix cache."""
    cumulative_logprob: float = 0.0
    """Sum of the tokens' logprobs, for best_of."""
    begun: bool = False
    """Whether an event of this choice was sent."""
    finish_reason: bytes = b""
    stop_reason: int | str | None = None
    kv_transfer_params: KVTransferParams | None = None
    """Sent by the engine at the end."""
    routed_experts: RoutedExperts | None = None
    """Likewise, if the request asks for them."""
    weight_versions: Sequence[WeightSpan] | None = None
    """Set at the end, if the request asks for them."""

    @property
    def plain(self) -> TextKind | None:
        """As what token texts can be sent as they are: no text is held back that they could depend on. With a
        parser that is not idle, guarded tokens are still its own."""
        if self.assembler is not None and self.assembler.pending:
            return None
        parser = None if self.parsed is None else self.parsed.parser
        return TextKind.CONTENT if parser is None or parser.idle else parser.open

    @property
    def guarded(self) -> bool:
        """Whether a parser must see guarded tokens."""
        return self.parsed is not None and not self.parsed.parser.idle

    def id_column(self) -> I32:
        """``ids`` as an array."""
        return np.frombuffer(self.ids, np.int32)

    @property
    def holds_tokens(self) -> bool:
        """Whether there are tokens, without text, of which ids or logprobs were not sent."""
        return bool(self.tokens) or not (self.logprobs is None or self.logprobs.empty)

    def reasoning_tokens(self, total: int) -> int | None:
        """Reasoning tokens among its first ``total``; None if reasoning is not parsed."""
        return None if self.parsed is None else self.parsed.reasoning_tokens(total)

    def take_delta(self) -> Delta | None:
        """What was added to the message; None if the output is text."""
        return None if self.parsed is None else self.parsed.take_delta()

    def finish(self, reason: bytes) -> None:
        """The output has ended; an output that has called a tool has its own reason."""
        called = self.parsed is not None and self.parsed.parser.called
        self.finish_reason = b"tool_calls" if called and reason == b"stop" else reason


@dataclass(slots=True)
class RequestContext:
    """The parts of the process that replies use."""

    engine_client: EngineClient
    streams: OutputProcessor
    tables: TextTables
    on_end: Callable[[RequestReply | PooledReply, str], None]
    """Called once per reply with its outcome: stop, length, error, refused, abort or cut."""
    max_backlog: int
    """Maximum number of bytes that wait for one client."""
    turns: Turns = field(default_factory=Turns)


class RequestReply(ABC):
    """The choices of one request, as rows arrive for them (a :class:`Stream` calls the ``on_`` methods)."""

    arrays = False
    """See :class:`StreamReply`."""

    # -- at first
    first_rank = 0
    """The engine that the first choice was submitted to."""
    first_token_at: float | None = None
    """Monotonic seconds."""
    admitted: tuple[float, float] | None = None
    """How long the first stream waited for a slot, and when it got it; None: its engine has not said so."""
    last_token_at = 0.0
    """Kept if ``admitted`` is known."""
    resumptions: Sequence[tuple[float, int, int]] = ()
    """For each time that a stream lost its engine: time, rank of the next engine, tokens until then."""
    cached = 0
    """Prompt tokens found in the prefix cache."""
    state = ReplyState.WAITING
    """See :mod:`penstock.streaming.request_states`."""
    outcome = ""
    """Set at the end: stop, length, error, abort (the client disconnected, or an administrator ended a
    choice) or cut (the client was too slow)."""

    def __init__(
        self, context: RequestContext, plan: RequestPlan, format: ReplyFormat, arrival: float
    ) -> None:
        self.context = context
        self.plan = plan
        self.format = format
        self.arrival = arrival
        self.choices: list[Choice] = []
        self._textless = not (format.sends_text or plan.stop)
        """Whether tokens need not become text."""

    def add(self, prompt: Prompt, rank: int) -> Stream:
        """Create the next choice and its stream; the caller opens and submits the stream."""
        plan, tables = self.plan, self.context.tables
        index = len(self.choices)
        if plan.prompt_logprobs >= 0 and prompt.logprobs is None:
            prompt.logprobs = PromptLogprobFormatter(
                tables.names, prompt_token_ids(prompt), plan.prompt_logprobs
            )
        choice = Choice(prompt)
        if plan.logprobs >= 0:
            echo = prompt.logprobs if plan.echo else None
            choice.logprobs = LogprobCollector(
                tables.names_for(plan),
                echo,
                alternatives=plan.logprobs,
                places=_text_places(prompt if plan.echo else None, tables.table_for(plan), tables.full),
            )
        if plan.format is not None:
            choice.parsed = self._parsed_output(plan.format)
            choice.parsed.begin(prompt.echo)
        if not self.choices:
            self.first_rank = rank
        stream = self._make_stream(index, rank)
        if plan.return_weight_versions:
            stream.versions = []
        choice.stream = stream
        self.choices.append(choice)
        return stream

    # -- the reply's state

    @property
    def ended(self) -> bool:
        return self.state >= ReplyState.UNSENT

    @property
    def started(self) -> bool:
        """Whether an event was sent."""
        return self.state in _STARTED

    def _advance(self, event: ReplyEvent) -> None:
        self.state = next_reply_state(self.state, event)

    def refuse(self) -> None:
        """End the reply because not all its streams could be submitted; the caller sends the error."""
        if not self.ended:
            self.drop_streams()
            self._advance(ReplyEvent.END)

    # -- implemented by both kinds

    @abstractmethod
    def _make_stream(self, index: int, rank: int) -> Stream: ...

    @abstractmethod
    def _extend(
        self, choice: Choice, stream: Stream, text: str, tokens: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        """Add a row's text and tokens, those after a stop string excluded; the choice has ended if its
        ``stream`` is None."""

    @abstractmethod
    def on_failure(self, stream: Stream, error: StreamError) -> None:
        """The stream failed; no more rows follow."""

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
        self._on_slow_row(stream, cached, has_tokens=len(tokens) > 0)
        if self.plan.max_tokens == 0:  # one token is generated but not sent
            self.context.streams.discard_tokens(len(tokens))
            tokens, logprobs = (), None
            finish = finish if finish is FinishReason.ABORT else FinishReason.LENGTH
        piece = NO_TEXT if self._textless else self._text_of(choice, stream, tokens, finish)
        self._check_finished(choice, stream, piece, tokens, finish)
        counted = tokens[: piece.tokens_used] if piece.stop is not None else tokens
        self._extend(choice, stream, piece.text, counted, logprobs)

    def _text_of(
        self, choice: Choice, stream: Stream, tokens: Sequence[int], finish: FinishReason
    ) -> RowText:
        """The text that a row adds to the choice."""
        if choice.assembler is None:
            choice.assembler = self._assembler()
        text = self._finished_text(tokens, finish)
        if choice.parsed is None:
            return assemble(choice.assembler, text, finish)
        position = self.context.streams.num_delivered(stream) - len(tokens)
        return choice.parsed.add_tokens(choice.assembler, position, text, finish)

    def on_admitted(self, stream: Stream, queued: float, at: float) -> None:
        if self.admitted is None:
            self.admitted = queued, at

    def on_resumed(self, rank: int, position: int) -> None:
        self.resumptions = (*self.resumptions, (time.monotonic(), rank, position))

    def _on_slow_row(self, stream: Stream, cached: int, *, has_tokens: bool = True) -> None:
        """A first row, or one that is not on the fast path."""
        if has_tokens and self.first_token_at is None:
            self.first_token_at = time.monotonic()
        if cached:
            choice = self.choices[stream.index]
            choice.cached = min(cached, choice.prompt.length)
            if stream.index % self.plan.n == 0:  # the prompt's other choices hit the cache of this one
                self.cached += choice.cached

    def _assembler(self) -> Assembler:
        plan = self.plan
        table = self.context.tables.table_for(plan)
        if plan.format is not None:
            return Assembler(table)
        return Assembler(table, plan.stop, include_stop=plan.include_stop_str, exempt=plan.base.min_tokens)

    def _parsed_output(self, format: MessageFormat) -> ParsedOutput:
        plan = self.plan
        stops = StopMatcher(plan.stop, include=plan.include_stop_str) if plan.stop else None
        parser = MessageParser(format, stops=stops)
        table = self.context.tables.table_for(plan)
        return ParsedOutput(parser, table, searched=stops is not None, exempt=plan.base.min_tokens)

    def on_prompt(self, stream: Stream, logprobs: PromptLogprobs) -> None:
        prompt = self.choices[stream.index].prompt
        if prompt.logprobs is None or int(logprobs.position.max()) >= prompt.length:
            raise InvalidOutputError(
                INVALID_LOGPROBS, "logprobs of a prompt, or of a token in it, that it was not asked for"
            )
        prompt.logprobs.add(logprobs)

    def on_transfer(self, stream: Stream, params: KVTransferParams) -> None:
        try:
            params.decode()
            msgspec.json.decode(params, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidOutputError(INVALID_TRANSFER, f"kv_transfer_params: {error}") from None
        if b"\n" in params or b"\r" in params:
            raise InvalidOutputError(
                INVALID_TRANSFER, "kv_transfer_params with a line break, which would end an event"
            )
        self.choices[stream.index].kv_transfer_params = params

    def on_routes(self, stream: Stream, routes: RoutedExperts) -> None:
        choice = self.choices[stream.index]
        most = choice.prompt.length + self.plan.base.max_tokens if self.plan.base.routed_experts else 0
        check_routes(routes, most)
        choice.routed_experts = routes

    def on_vectors(self, stream: Stream, first: int, counts: I32, width: int, values: F32) -> None:
        raise InvalidOutputError(INVALID_VECTORS, "vectors of a stream of tokens")

    # -- the end of a choice

    def _check_finished(
        self, choice: Choice, stream: Stream, piece: RowText, tokens: Sequence[int], finish: FinishReason
    ) -> None:
        """End the choice if this row ends it. A stop string outranks the engine's reason."""
        if piece.stop is not None:
            choice.finish(b"stop")
            choice.stop_reason = piece.stop
            if choice.logprobs is not None and choice.assembler is not None:
                echo = len(choice.prompt.echo) if self.plan.echo else 0
                choice.logprobs.places.end = echo + choice.assembler.characters
            surplus = len(tokens) - piece.tokens_used
            self.context.streams.discard_tokens(surplus)
            self._end_choice(choice, stream, self.context.streams.num_delivered(stream) - surplus)
            if not finish:
                self._drop(stream, stopped=True)
        elif finish:
            is_stop_token = finish is FinishReason.STOP_TOKEN and len(tokens) > 0  # an engine may omit it
            choice.stop_reason = int(tokens[-1]) if is_stop_token else None
            self._finish_choice(choice, stream, finish)

    def _finish_choice(self, choice: Choice, stream: Stream, finish: FinishReason) -> None:
        """The engine has ended the choice's stream."""
        choice.finish(_REASON[finish])
        unsent = self.plan.max_tokens == 0
        self._end_choice(choice, stream, 0 if unsent else self.context.streams.num_delivered(stream))

    def _end_choice(self, choice: Choice, stream: Stream, generated: int) -> None:
        choice.generated, choice.stream = generated, None
        if self.admitted is not None:
            self.last_token_at = time.monotonic()
        if stream.versions is not None:
            adapter = None if self.plan.adapter is None else self.plan.adapter[1]
            choice.weight_versions = weight_spans(stream.versions, generated, adapter)

    def _all_choices_ended(self) -> bool:
        for choice in self.choices:  # noqa: SIM110 - all() over a generator takes three times as long
            if choice.stream is not None:
                return False
        return True

    # -- the end of the reply: see _end of both kinds

    def _record_end(self, outcome: str) -> None:
        """The part of every end that both kinds share."""
        self._advance(ReplyEvent.END)
        self.outcome = outcome
        self.context.on_end(self, outcome)

    def _with_field(self, error: StreamError) -> StreamError:
        """``error``, with the request field of the grammar that an engine has refused."""
        constraint = self.plan.constraint
        if constraint is None or error.status != 400 or not error.message.startswith(GRAMMAR):
            return error
        message = error.message.replace(f"{GRAMMAR}:", f"{GRAMMAR} ({constraint.field}):", 1)
        return replace(error, message=message, param=constraint.field)

    @staticmethod
    def _unsent_outcome(error: StreamError) -> str:
        """The outcome of a reply of which nothing was sent: ``refused`` if no engine took the request."""
        return "refused" if error.status < 500 else "error"

    def _complete_outcome(self) -> str:
        """The outcome of a reply whose choices have all ended."""
        outcome = "stop"
        for choice in self.choices:
            if choice.finish_reason == ABORT:
                return "abort"
            if choice.finish_reason == b"length":
                outcome = "length"
        return outcome

    def drop_streams(self, failed: Stream | None = None) -> None:
        """Abort the running streams; later rows are discarded. ``failed`` has ended by itself."""
        for choice in self.choices:
            stream, choice.stream = choice.stream, None
            if stream is not None:
                choice.generated = self.context.streams.num_delivered(stream)
                if stream is not failed:
                    self._drop(stream)

    def _drop(self, stream: Stream, *, stopped: bool = False) -> None:
        self.context.streams.discard(stream)
        self.context.engine_client.abort(stream, stopped=stopped)

    def usage(self) -> TokenUsage:
        """Token counts of all choices."""
        usage = count_usage(self.choices, self.cached)
        if self.admitted is None or self.first_token_at is None or len(self.choices) > 1:
            return usage
        return usage._replace(times=RequestTimes(*self.admitted, self.first_token_at, self.last_token_at))

    # -- text

    def _finished_text(self, tokens: Sequence[int], finish: FinishReason) -> Sequence[int]:
        """The tokens that are text: EOS and stop tokens are not, unless include_stop_str is set."""
        if finish in _NO_TEXT and not self.plan.include_stop_str:
            return tokens[:-1]
        return tokens


def assemble(assembler: Assembler, tokens: Sequence[int], finish: FinishReason) -> RowText:
    """Decode a row; the last row flushes. ``tokens_used`` of the result counts tokens of this row."""
    piece = assembler.push(tokens)
    if finish and piece.stop is None:
        rest = assembler.finish()
        piece = RowText(piece.text + rest.text, piece.tokens_used, rest.stop)
    return piece


def _text_places(echoed: Prompt | None, table: TokenTable, full: TokenTable) -> TextPlaces:
    """Places of a choice's tokens in its text. ``table``: for its output; ``full``: with the text of special
    tokens."""
    if echoed is None:
        return TextPlaces(table)
    first = memoryview(echoed.ids).cast("i")[0]
    begin = (full.text[first] or b"").decode() if table.text[first] == b"" else ""
    # The tokenizer may have added it.
    return TextPlaces(table, echoed.echo, begin if echoed.echo.startswith(begin) else "")


def prompt_token_ids(prompt: Prompt) -> list[int]:
    return memoryview(prompt.ids).cast("i").tolist()
