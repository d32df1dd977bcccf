"""The Engine interface that the engine process drives, and the rows that a step returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from penstock.wire.arrays import I8, I32
from penstock.wire.kv_events import KVCacheEvent
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import EngineInfo, KVTransferParams, RoutedExperts, Submit
from penstock.wire.sockets import Wakeup
from penstock.wire.vectors import Vectors

if TYPE_CHECKING:
    from penstock.engine.lora.adapter_table import AdapterTable
    from penstock.engine.media.page_supply import PageSupply
    from penstock.engine.weights.weight_loader import WeightLoader


ACCEPTED_PER_POSITION = "spec_decode_accepted_tokens_per_pos_total/"
"""Prefix of names in :meth:`Engine.metrics`: a position in drafts, from 0, follows."""


class Hold(IntEnum):
    """What an engine holds back of its streams; each holds back what those before it do."""

    NOTHING = 0
    NEWCOMERS = 1
    """Streams that wait do not begin."""
    ALL = 2
    """No stream is computed. Those that are aborted end."""


class RequestRejected(ValueError):
    """A request that this engine cannot run; ``code`` is sent to the API server with the message.

    A message about one field of the request starts with its name and a colon: the error then names it."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, frozen=True)
class Load:
    """An engine's load, reported with every frame, and its progress."""

    waiting: int = 0
    """Streams without a slot."""
    running: int = 0
    """Streams with a slot."""
    kv_used: float = 0.0
    """Fraction of the KV cache in use, 0 to 1."""
    deferred: int = 0
    """Streams among the waiting ones that could not begin even if there were room: their grammar is being
    compiled, or another stream computes their prefix."""
    generated: int = 0
    """Tokens generated since the start, those included that no row has had yet."""


@dataclass(slots=True, frozen=True)
class StreamFailure:
    """The end of one stream by an error, after all its tokens have been sent."""

    server: int
    stream: int
    position: int
    code: str
    message: str


@dataclass(slots=True)
class StepRows:
    """A step's rows for all API servers: R rows, T tokens; fields as in :mod:`penstock.wire.frames`."""

    server: I32
    """int32[R]: index of the API server that the row is for."""
    stream: I32
    position: I32
    tokens: I32
    count: I32 | None = None
    finish: I8 | None = None
    cached: I32 | None = None
    logprobs: Logprobs | None = None
    failed: Sequence[StreamFailure] = field(default=())
    prompt: PromptLogprobs | None = None
    kv_transfer_params: dict[int, dict[int, KVTransferParams]] | None = None
    """Parameters by API server and stream, for streams that end here."""
    routed: Sequence[tuple[int, RoutedExperts]] = field(default=())
    """API server and message, for streams that end here."""
    vectors: Vectors | None = None
    """Of rows whose streams are inputs; then all rows are such, or have no tokens."""


class Engine(Protocol):
    """One data-parallel rank. Only the engine loop calls it, from one thread.

    ``Submit.stream`` and the streams of rows are small numbers that the loop gives to open streams.

    Every submitted stream finishes exactly once: with a row whose finish is not NONE, or a StreamFailure.
    """

    adapters: AdapterTable | None
    """The engine's LoRA adapters; None: it runs none."""
    can_sleep: bool
    """Whether it supports the operations ``sleep`` and ``wake_up``."""
    info: EngineInfo
    wakeups: Sequence[Wakeup]
    """What becomes readable when there is something to step; empty for an engine that computes here."""

    @property
    def weights(self) -> WeightLoader | None:
        """Replaces the model's weights; None: the engine cannot."""
        ...

    @property
    def pages(self) -> PageSupply | None:
        """Where pages of pictures come from; None: it takes no pictures."""
        ...

    def submit(self, server: int, request: Submit) -> None:
        """Queue a stream. Raises RequestRejected when it can never run. A stream for which it raises is not
        queued, and gets no row."""
        ...

    def abort(self, server: int, streams: Sequence[int]) -> None:
        """Stop streams; the next step returns a row with FinishReason.ABORT for each. Unknown ones are
        ignored: they ended before the abort arrived."""
        ...

    def drop_server(self, server: int) -> None:
        """Forget all streams of an API server that is gone; they get no rows."""
        ...

    def has_work(self) -> bool:
        """Whether step() has anything to compute or to return."""
        ...

    def can_step(self) -> bool:
        """Whether step() would do something now. An engine that computes elsewhere has work and nothing to
        step until one of :attr:`wakeups` is readable; for others it is :meth:`has_work`, but for what they
        hold."""
        ...

    def hold(self, hold: Hold) -> None:
        """Hold streams back from the next step on. What a device computes already is finished by further
        steps, while :meth:`can_step`. Raises ValueError if it cannot."""
        ...

    def flush(self) -> StepRows:
        """Rows of all tokens that were held back by an output interval. Nothing is being computed."""
        ...

    def step(self) -> StepRows:
        """One iteration: schedule, launch, settle. A stream that cannot be computed fails by itself where it
        can be told. If it raises, the engine is broken and is ended."""
        ...

    def dummy_step(self) -> None:
        """A step without work, which ranks that share a model's layers with this one need for theirs."""
        ...

    def take_admitted(self) -> Sequence[tuple[int, int]]:
        """Streams, as (API server, handle), that were given a slot since the last call."""
        ...

    def take_preempted(self) -> Sequence[tuple[int, int]]:
        """Streams, as (API server, handle), that were preempted since the last call, once for each time."""
        ...

    def take_kv_events(self) -> Sequence[KVCacheEvent]:
        """What its prefix cache has gained and lost since the last call; empty if ``--kv-events-config`` does
        not ask for events, or the engine publishes them itself."""
        ...

    def on_resubmitted_start(self, notify: Callable[[int, int], None]) -> None:
        """Have ``notify`` called with the API server and handle of each resubmitted stream that is given a
        slot, before anything of it is computed."""
        ...

    def fail_all(self, code: str, message: str) -> StepRows:
        """End every stream, running or waiting, with an error: rows of the tokens that were held back by an
        output interval, then a StreamFailure each. Also called after step() raised."""
        ...

    def load(self) -> Load: ...

    def metrics(self) -> dict[str, float]:
        """Counters since the start, by name: preemptions_total, prefix_cache_{queries,hits}_total,
        external_prefix_cache_{queries,hits}_total, external_prompt_tokens_total,
        spec_decode_{drafts,draft_tokens,accepted_tokens}_total, and those of
        :meth:`penstock.engine.media.engine_media.EngineMedia.metrics`; absent ones are 0. Engines that
        speculate have spec_decode_accepted_tokens_per_pos_total/0, …/1 and so on, for every position of a
        draft."""
        ...

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """Run a named operation between steps. Raises ValueError for an unknown one."""
        ...

    def close(self) -> None: ...
