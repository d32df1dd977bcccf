"""What the engine process asks of an engine, and what a step gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.wire.arrays import I8, I32
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from penstock.wire.messages import EngineInfo, KVTransferParams, Submit


class RequestRejected(ValueError):
    """A request this engine cannot run; ``code`` is sent to the API server with the message."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, frozen=True)
class Load:
    """What an engine has to do, reported with every frame."""

    waiting: int = 0
    """Requests without a slot."""
    running: int = 0
    kv_used: float = 0.0
    """Share of the KV cache in use, 0 to 1."""


@dataclass(slots=True, frozen=True)
class StreamFailure:
    """The end of one stream by an error, after all its tokens have been given out."""

    server: int
    stream: int
    position: int
    code: str
    message: str


@dataclass(slots=True)
class StepRows:
    """A step's rows for all API servers: R rows, T tokens, columns as in :mod:`penstock.wire.frames`."""

    server: I32
    """int32[R]: index of the API server that owns the row's stream."""
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
    """Of streams that end here, by API server and stream."""


class Engine(Protocol):
    """One data-parallel rank. Only the engine process's loop calls it, from one thread.

    Every submitted stream gets exactly one end: a row whose finish is not NONE, or a StreamFailure.
    """

    can_sleep: bool
    """Whether it does the operations ``sleep`` and ``wake_up``."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, server: int, request: Submit) -> None:
        """Take a stream in. Raises RequestRejected when it can never run; then it owes no row."""
        ...

    def abort(self, server: int, streams: Sequence[int]) -> None:
        """Stop streams; the next step gives each a row with FinishReason.ABORT. Unknown ones are ignored:
        they ended before the abort arrived."""
        ...

    def drop_server(self, server: int) -> None:
        """Forget all streams of an API server that is gone; no rows are made for them."""
        ...

    def has_work(self) -> bool:
        """Whether step() has anything to compute or to report."""
        ...

    def step(self) -> StepRows:
        """One iteration: schedule, run, settle. An exception means the engine is broken and ends it."""
        ...

    def dummy_step(self) -> None:
        """A dummy step, without work: ranks in lock-step with this one make theirs."""
        ...

    def take_admitted(self) -> Sequence[tuple[int, int]]:
        """Streams, as (API server, handle), that have got a slot since the last call."""
        ...

    def fail_all(self, code: str, message: str) -> StepRows:
        """End every stream, running or waiting, by an error: rows of tokens that were held back (an
        interval not yet full), then a StreamFailure each. Also called after step() raised."""
        ...

    def load(self) -> Load: ...

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name, cumulative since start (counters end in ``_total``)."""
        ...

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        """Run a named operation between steps. Raises ValueError for an unknown one."""
        ...

    def close(self) -> None: ...
