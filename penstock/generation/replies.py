"""What a request makes of its streams: what streamed and collected replies have in common.

Both kinds, :mod:`penstock.generation.streamed` and :mod:`penstock.generation.collected`, end every request
exactly once and free its streams when the client disconnects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import tokenizers

from penstock.dispatch.engine_client import EngineClient
from penstock.generation.dialect import ReplyFormat, TokenUsage
from penstock.generation.logprobs import LogprobCollector, PromptLogprobFormatter
from penstock.generation.parsers.delta import Delta
from penstock.generation.parsers.message import MessageParser
from penstock.generation.plan import RequestPlan
from penstock.streaming.assembler import Assembler, TextDelta
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.request_states import ReplyEvent, ReplyState, next_reply_state
from penstock.streaming.stream import Stream, StreamError
from penstock.streaming.token_table import TokenTable
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import KVTransferParams

_REASON = {
    FinishReason.EOS: b"stop",
    FinishReason.STOP_TOKEN: b"stop",
    FinishReason.LENGTH: b"length",
    FinishReason.GRAMMAR: b"stop",
}
_ABORT = FinishReason.ABORT
_STARTED = (ReplyState.STREAMING, ReplyState.PAUSED, ReplyState.ENDED)
_NO_TEXT = (FinishReason.EOS, FinishReason.STOP_TOKEN)
"""Ends whose last token is no part of the text."""
_ABORTED = StreamError(500, "engine_error", "The engine stopped this request.")


@dataclass(slots=True)
class TextTables:
    """Token texts, made once per process."""

    table: TokenTable
    """With special tokens skipped."""
    full: TokenTable
    """With special tokens as text."""
    plain: list[bytes | None]
    """One entry per output of the model: None for tokens that need care, special ones included."""

    @classmethod
    def make(cls, tokenizer: tokenizers.Tokenizer, vocab_size: int) -> TextTables:
        """The tables for a model with ``vocab_size`` outputs."""
        table = TokenTable.from_tokenizer(tokenizer)
        full = TokenTable.from_tokenizer(tokenizer, skip_special_tokens=False)
        # Special tokens (no text) take the slow path: an event without text is not sent.
        plain = [text or None for text in table.text[:vocab_size]]
        plain += [None] * (vocab_size - len(plain))
        return cls(table, full, plain)

    def table_for(self, plan: RequestPlan) -> TokenTable:
        """The table for one request: special tokens are text if it asks for them."""
        return self.table if plan.skip_special_tokens else self.full


class Prompt(msgspec.Struct, gc=False):
    """One tokenized prompt."""

    ids: bytes
    """int32 little-endian."""
    length: int
    echo: str = ""
    """Text to put before the output."""
    logprobs: PromptLogprobFormatter | None = None
    """The logprobs of its tokens, if the client wants them."""


@dataclass(slots=True)
class Choice:
    """One stream's state beyond the fast path."""

    prompt: Prompt
    assembler: Assembler | None = None
    """None until a row needs more than its tokens' own texts."""
    stream: Stream | None = None
    """None once the stream has ended."""
    tokens: list[int] = field(default_factory=list)
    """Collected reply: the output so far. Streamed reply, if the client wants them: those of no event yet."""
    text: bytearray = field(default_factory=bytearray)
    """The same of the output's text, as UTF-8."""
    logprobs: LogprobCollector | None = None
    parser: MessageParser | None = None
    """Takes tool calls and reasoning out of the text, where they may occur."""
    generated: int = 0
    """Tokens of the output, known at its end."""
    cumulative_logprob: float = 0.0
    """The log of the output's probability; of candidates of which the likeliest are sent."""
    begun: bool = False
    finish_reason: bytes = b""
    stop_reason: int | str | None = None
    kv_transfer_params: KVTransferParams | None = None
    """What the engine says at its end."""

    @property
    def plain(self) -> bool:
        """Whether a token's text can go out as it is: nothing is held back that it could depend on."""
        if self.assembler is not None and self.assembler.pending:
            return False
        return self.parser is None or self.parser.idle

    def parse(self, text: str) -> Delta:
        """What the next piece of text adds to the message; the last piece once the stream has ended.

        Only for choices with a parser. An output that stopped with a tool call was stopped by it.
        """
        assert self.parser is not None
        delta = self.parser.push(text, last=self.stream is None)
        if self.parser.called and self.finish_reason == b"stop":
            self.finish_reason = b"tool_calls"
        return delta


@dataclass(slots=True)
class RequestContext:
    """What a reply needs from its process."""

    engine_client: EngineClient
    streams: OutputProcessor
    tables: TextTables
    on_end: Callable[[RequestReply, str], None]
    """Called once per reply with its outcome: stop, length, error, abort."""
    max_backlog: int
    """Bytes that may wait for a client."""


class RequestReply(ABC):
    """What streamed and collected replies share: their choices, and how streams end."""

    def __init__(
        self, context: RequestContext, plan: RequestPlan, format: ReplyFormat, arrival: float
    ) -> None:
        self.context = context
        self.plan = plan
        self.format = format
        self.arrival = arrival
        self.choices: list[Choice] = []
        self.cached = 0
        self.state = ReplyState.WAITING
        """See :mod:`penstock.streaming.request_states`."""
        self.outcome = ""
        """At the end: stop, length, error, abort (the client left) or cut (it read too slowly)."""

    def add(self, prompt: Prompt, rank: int) -> Stream:
        """A stream for the next choice; the caller opens and submits it."""
        plan, tables = self.plan, self.context.tables
        index = len(self.choices)
        if plan.prompt_logprobs >= 0 and prompt.logprobs is None:
            prompt.logprobs = PromptLogprobFormatter(
                tables.full, prompt_token_ids(prompt), plan.prompt_logprobs
            )
        choice = Choice(prompt)
        if plan.logprobs >= 0:
            echo = prompt.logprobs if plan.echo else None
            choice.logprobs = LogprobCollector(tables.full, echo, alternatives=plan.logprobs)
        if plan.format is not None:
            choice.parser = MessageParser(plan.format)
        stream = self._make_stream(index, rank)
        choice.stream = stream
        self.choices.append(choice)
        return stream

    # -- the reply's state

    @property
    def ended(self) -> bool:
        return self.state >= ReplyState.UNSENT

    @property
    def started(self) -> bool:
        """Whether any byte of it was sent as an event."""
        return self.state in _STARTED

    def _advance(self, event: ReplyEvent) -> None:
        self.state = next_reply_state(self.state, event)

    def refuse(self) -> None:
        """End the reply before any of its streams runs; the caller sends the error."""
        self.drop_streams()
        self._advance(ReplyEvent.END)

    # -- what the two kinds do differently

    @abstractmethod
    def _make_stream(self, index: int, rank: int) -> Stream: ...

    @abstractmethod
    def _extend(
        self, choice: Choice, stream: Stream, text: str, tokens: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        """A row's text and tokens that count; the choice has ended when its ``stream`` is None."""

    @abstractmethod
    def on_failure(self, stream: Stream, error: StreamError) -> None:
        """The stream ended by an error, after its last row."""

    # -- rows

    def on_row(
        self,
        stream: Stream,
        tokens: Sequence[int],
        finish: FinishReason,
        cached: int,
        logprobs: Logprobs | None,
    ) -> None:
        if finish is _ABORT:
            self.on_failure(stream, _ABORTED)
            return
        choice = self.choices[stream.index]
        self._add_cached(stream, cached)
        if self.plan.max_tokens == 0:  # the one token that is generated is not shown
            self.context.streams.discard_tokens(len(tokens))
            tokens, finish, logprobs = (), FinishReason.LENGTH, None
        if choice.assembler is None:
            choice.assembler = self._assembler()
        piece = assemble(choice.assembler, self._finished_text(tokens, finish), finish)
        self._settle(choice, stream, piece, tokens, finish)
        counted = tokens[: piece.tokens_used] if piece.stop is not None else tokens
        self._extend(choice, stream, piece.text, counted, logprobs)

    def _add_cached(self, stream: Stream, cached: int) -> None:
        if stream.index % self.plan.n == 0:  # the other choices found what this one computed
            self.cached += cached

    def _assembler(self) -> Assembler:
        plan = self.plan
        table = self.context.tables.table_for(plan)
        return Assembler(table, plan.stop, include_stop=plan.include_stop_str, exempt=plan.base.min_tokens)

    def on_prompt(self, stream: Stream, logprobs: PromptLogprobs) -> None:
        prompt_logprobs = self.choices[stream.index].prompt.logprobs
        assert prompt_logprobs is not None  # its engine was asked
        prompt_logprobs.add(logprobs)

    def on_transfer(self, stream: Stream, params: KVTransferParams) -> None:
        self.choices[stream.index].kv_transfer_params = params

    # -- ends

    def usage(self) -> TokenUsage:
        """Prompt tokens count once per prompt, whatever n is."""
        prompts = {id(choice.prompt): choice.prompt.length for choice in self.choices}
        generated = sum(choice.generated for choice in self.choices)
        return TokenUsage(sum(prompts.values()), generated, self.cached)

    def drop_streams(self, failed: Stream | None = None) -> None:
        """Stop the streams that still run; what they send is discarded. ``failed`` has ended by itself."""
        for choice in self.choices:
            stream, choice.stream = choice.stream, None
            if stream is not None:
                choice.generated = self.context.streams.num_delivered(stream)
                if stream is not failed:
                    self._drop(stream)

    def _drop(self, stream: Stream, *, stopped: bool = False) -> None:
        self.context.engine_client.abort(stream, stopped=stopped)
        self.context.streams.discard(stream)

    def _settle(
        self, choice: Choice, stream: Stream, piece: TextDelta, tokens: Sequence[int], finish: FinishReason
    ) -> None:
        """Note why the choice ended, if this row ended it. ``piece.stop`` outranks the engine's reason."""
        if piece.stop is not None:
            choice.finish_reason, choice.stop_reason = b"stop", piece.stop
            surplus = len(tokens) - piece.tokens_used
            self.context.streams.discard_tokens(surplus)
            choice.generated = self.context.streams.num_delivered(stream) - surplus
            choice.stream = None
            if not finish:
                self._drop(stream, stopped=True)
        elif finish:
            choice.stop_reason = tokens[-1] if finish is FinishReason.STOP_TOKEN else None
            self._close(choice, stream, finish)

    def _close(self, choice: Choice, stream: Stream, finish: FinishReason) -> None:
        """The engine has ended the choice's stream."""
        choice.finish_reason = _REASON[finish]
        choice.generated = self.context.streams.num_delivered(stream) if self.plan.max_tokens != 0 else 0
        choice.stream = None

    def _end(self, outcome: str) -> None:
        self._advance(ReplyEvent.END)
        self.outcome = outcome
        self.context.on_end(self, outcome)

    def _all_ended(self) -> bool:
        for choice in self.choices:  # noqa: SIM110 - all() over a generator takes three times as long
            if choice.stream is not None:
                return False
        return True

    def _outcome(self) -> str:
        for choice in self.choices:
            if choice.finish_reason == b"length":
                return "length"
        return "stop"

    def _finished_text(self, tokens: Sequence[int], finish: FinishReason) -> Sequence[int]:
        """The tokens whose text counts: EOS and stop tokens end a text, they are no part of it.

        Unless special tokens are wanted as text, or the stop itself is (vLLM's include_stop_str).
        """
        if finish in _NO_TEXT and not self.plan.include_stop_str:
            return tokens[:-1]
        return tokens


def assemble(assembler: Assembler, tokens: Sequence[int], finish: FinishReason) -> TextDelta:
    """Push a row; at its stream's end, flush. ``used`` counts the row's tokens."""
    piece = assembler.push(tokens)
    if finish and piece.stop is None:
        rest = assembler.finish()
        piece = TextDelta(piece.text + rest.text, piece.tokens_used, rest.stop)
    return piece


def prompt_token_ids(prompt: Prompt) -> list[int]:
    return memoryview(prompt.ids).cast("i").tolist()
