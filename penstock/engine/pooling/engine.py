"""The engine of a model that makes vectors, scores or labels: batches of inputs of all requests.

A stream is some inputs of one request. A step computes the next inputs, those of streams in the order of the
queue, within ``--max-num-batched-tokens`` and ``--max-num-seqs``; a stream has a row for its part of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.config.serve import ServeConfig
from penstock.engine.base import Hold, Load, RequestRejected, StepRows, StreamFailure
from penstock.engine.batch.rows import aborted_rows, concat_rows, empty_rows
from penstock.engine.lora.adapter_table import AdapterTable
from penstock.engine.pooling.input_checks import check_inputs
from penstock.engine.pooling.model import PoolingBatch, PoolingGroup, PoolingModel
from penstock.engine.schedule.waiting_queue import StreamKey, WaitingQueue
from penstock.engine.weights.weight_loader import WeightLoader
from penstock.logging_setup import RateLimitedLog
from penstock.wire.arrays import F32, I32
from penstock.wire.frames import FinishReason
from penstock.wire.kv_events import KVCacheEvent
from penstock.wire.messages import EngineInfo, Submit, WireError
from penstock.wire.pooling import PER_TOKEN, PoolingParams, PoolingTask
from penstock.wire.sockets import Wakeup
from penstock.wire.vectors import Vectors

CANNOT_COMPUTE = "The model cannot compute this request:"
MAX_STEP_VALUES = 1 << 20
"""Values of the vectors of one step, a frame of 4 MiB: an API server copies it in a millisecond. Those of one
input are not divided."""
MAX_RUNNING_TOKENS = 16 << 20
"""Tokens of the streams that have begun, 64 MiB; others wait in the queue, which has its own bound."""

_log_fault = RateLimitedLog(logging.getLogger(__name__), logging.ERROR)


@dataclass(slots=True, eq=False)
class _Stream:
    """A stream that has begun."""

    server: int
    stream: int
    params: PoolingParams
    ids: I32
    """int32[tokens]: of its inputs, one after another."""
    lengths: I32
    seconds: I32
    ends: I32
    """int32[inputs]: where each input ends in ``ids``."""
    position: int
    """Index, within the whole stream, of the first input here."""
    done: int = 0
    """Inputs here that have been computed."""

    @property
    def key(self) -> StreamKey:
        return self.server, self.stream

    @classmethod
    def of(cls, server: int, request: Submit) -> _Stream:
        assert request.pooling is not None
        lengths, seconds = request.pooling.columns()
        ids = np.frombuffer(request.prompt, "<i4")
        ends = np.cumsum(lengths, dtype=np.int32)
        return cls(
            server, request.stream, request.pooling, ids, lengths, seconds, ends, position=request.resumed
        )

    def fitting(self, skipped: int, tokens: int, inputs: int) -> int:
        """How many of its next inputs, after ``skipped`` ones, have at most so many tokens together."""
        first = self.done + skipped
        before = int(self.ends[first - 1]) if first else 0
        count = int(np.searchsorted(self.ends[first:], before + tokens, side="right"))
        return min(count, inputs)


@dataclass(slots=True)
class _Part:
    """The inputs of one stream in a step."""

    of: _Stream
    count: int

    def add(self, count: int) -> int:
        """Take further inputs. Returns the tokens that they have."""
        before = self.tokens.stop if self.count else self.tokens.start
        self.count += count
        return self.tokens.stop - before if count else 0

    @property
    def tokens(self) -> slice:
        """Where they are in the stream's ids."""
        ends, first, last = self.of.ends, self.of.done, self.of.done + self.count
        return slice(int(ends[first - 1]) if first else 0, int(ends[last - 1]) if last else 0)


class PoolingEngine:
    """Computes here, in the loop's thread. Streams are not preempted: they hold no memory of a device."""

    wakeups: Sequence[Wakeup] = ()
    can_sleep = False
    adapters: AdapterTable | None = None
    pages = None
    weights: WeightLoader | None = None

    def __init__(self, config: ServeConfig, model: PoolingModel, info: EngineInfo) -> None:
        """``config``: with this rank's part of the queue's limits. ``info``: with ``pooling``, which is the
        model's."""
        self.info = info
        self._model = model
        self.longest = model.info.max_tokens or info.max_model_len
        """Tokens of the longest input."""
        self.max_tokens = max(config.max_num_batched_tokens, self.longest)
        """Tokens of the next steps, unless a single input has more."""
        self.computed_tokens = 0
        """Tokens of all steps."""
        self._max_inputs = config.max_num_seqs
        self._waiting = WaitingQueue(config)
        self._running: dict[StreamKey, _Stream] = {}
        """In the order in which they began."""
        self._aborted: set[tuple[int, int]] = set()
        self._admitted: list[tuple[int, int]] = []
        self._hold = Hold.NOTHING
        self._on_start: Callable[[int, int], None] = lambda server, stream: None

    def close(self) -> None:
        """Memory is freed with the process."""

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        if (server, request.stream) in self._running:
            raise WireError(f"Submit.stream {request.stream} is running already")
        check_inputs(request, self._model.info, longest=self.longest, vocab_size=self.info.vocab_size)
        if request.adapter is not None:
            raise RequestRejected("model: LoRA adapters are for text")
        self._waiting.push(server, request, max(0, self._max_inputs - len(self._running)))

    def abort(self, server: int, streams: Sequence[int]) -> None:
        for stream in streams:
            if not self._waiting.abort(server, stream):
                self._aborted.add((server, stream))
        self._aborted &= self._running.keys()

    def drop_server(self, server: int) -> None:
        self._waiting.drop_server(server)
        self._running = {key: each for key, each in self._running.items() if key[0] != server}
        self._aborted = {each for each in self._aborted if each[0] != server}

    def take_admitted(self) -> Sequence[tuple[int, int]]:
        taken, self._admitted = self._admitted, []
        return taken

    def take_preempted(self) -> Sequence[tuple[int, int]]:
        return ()

    def take_kv_events(self) -> Sequence[KVCacheEvent]:
        return ()

    def on_resubmitted_start(self, notify: Callable[[int, int], None]) -> None:
        self._on_start = notify

    def fail_all(self, code: str, message: str) -> StepRows:
        rows = empty_rows()
        failed = [_failure(each, code, message) for each in self._running.values()]
        rows.failed = [*failed, *self._waiting.fail_all(code, message)]
        self._running.clear()
        self._aborted.clear()
        return rows

    # -- the step

    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._waiting.has_finished())

    def can_step(self) -> bool:
        if self._aborted or self._waiting.has_finished():
            return True
        if self._hold is Hold.NOTHING:
            return self.has_work()
        return self._hold is Hold.NEWCOMERS and bool(self._running)

    def hold(self, hold: Hold) -> None:
        self._hold = hold

    def flush(self) -> StepRows:
        return empty_rows()

    def step(self) -> StepRows:
        rows = [self._take_aborted(), self._waiting.take_finished()]
        if self._hold is not Hold.ALL:
            parts = self._schedule()
            if parts:
                self.computed_tokens += sum(part.tokens.stop - part.tokens.start for part in parts)
                rows.append(self._compute(parts))
                if rows[-1].failed and rows[-1].vectors is None:
                    self._check_model()
        return concat_rows(rows)

    def dummy_step(self) -> None:
        """No other rank shares the model's layers."""

    def _take_aborted(self) -> StepRows:
        ended = [self._running.pop(key) for key in self._aborted]
        self._aborted.clear()
        return aborted_rows([(each.server, each.stream, each.position + each.done) for each in ended])

    def _schedule(self) -> list[_Part]:
        """The next inputs: of each stream as many as have its share of the step's tokens, so that a request
        with few inputs does not wait for one with many; then in the order of the streams as many as fit."""
        if self._hold is Hold.NOTHING:
            self._admit()
        if not self._running:
            return []
        parts = [_Part(stream, 0) for stream in self._running.values()]
        tokens, inputs, values = self.max_tokens, self._max_inputs, MAX_STEP_VALUES
        for limit in (tokens // len(parts), tokens):
            for part in parts:
                per_input = self._values_of(part.of)
                most = min(inputs, values // per_input)
                count = part.of.fitting(part.count, min(limit, tokens), most) if most > 0 else 0
                tokens -= part.add(count)
                inputs, values = inputs - count, values - count * per_input
        if not any(part.count for part in parts):
            parts[0].count = 1  # it has more tokens or values than a step is to have
        return [part for part in parts if part.count]

    def _values_of(self, stream: _Stream) -> int:
        """Values of the longest of its inputs' results."""
        info, task = self._model.info, stream.params.task
        width = info.width if task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED) else info.labels
        return max(1, width) * (int(stream.lengths.max()) if task in PER_TOKEN else 1)

    def _admit(self) -> None:
        tokens = sum(len(each.ids) for each in self._running.values())
        while self._waiting and len(self._running) < self._max_inputs and tokens < MAX_RUNNING_TOKENS:
            waiting = self._waiting.pop()
            stream = _Stream.of(waiting.server, waiting.request)
            self._running[stream.key] = stream
            tokens += len(stream.ids)
            self._admitted.append((stream.server, stream.stream))
            if waiting.request.resubmitted:
                self._on_start(stream.server, stream.stream)

    def _compute(self, parts: list[_Part]) -> StepRows:
        """Rows of ``parts``; streams that cannot be computed fail by themselves."""
        try:
            return self._rows(parts, self._model.compute(_batch(parts)))
        except Exception as error:  # noqa: BLE001 - the streams that cause it end
            _log_fault("batch", "a batch of %d streams has failed", len(parts), exc_info=True)
            fault = error
        if len(parts) == 1 and parts[0].count == 1:
            return self._fail(parts[0].of, f"{CANNOT_COMPUTE} {type(fault).__name__}: {str(fault)[:200]}")
        if len(parts) == 1:
            part = parts[0]
            halves = [[_Part(part.of, part.count // 2)], [_Part(part.of, part.count - part.count // 2)]]
        else:
            halves = [parts[: len(parts) // 2], parts[len(parts) // 2 :]]
        rows = []
        for half in halves:
            if half[0].of.key in self._running:  # its first inputs may have ended it
                rows.append(self._compute(half))
        return concat_rows(rows) if len(parts) > 1 else _one_row(rows)

    def _check_model(self) -> None:
        """Raises what the model raises for an input of one token: it then computes nothing, so that no
        stream is the cause, and the engine is to be started again."""
        one = np.ones(1, np.int32)
        params = PoolingParams(task=self._model.info.tasks[0], lengths=one.tobytes())
        self._model.compute(PoolingBatch(one, one, np.zeros(1, np.int32), [PoolingGroup(params, 1)]))

    def _fail(self, stream: _Stream, message: str) -> StepRows:
        del self._running[stream.key]
        rows = empty_rows()
        rows.failed = [_failure(stream, "engine_error", message)]
        return rows

    def _rows(self, parts: list[_Part], made: Sequence[F32]) -> StepRows:
        tokens, positions, finish = [], [], []
        for part, values in zip(parts, made, strict=True):
            stream = part.of
            lengths = stream.lengths[stream.done : stream.done + part.count]
            per_token = stream.params.task in PER_TOKEN
            if len(values) != (int(lengths.sum()) if per_token else part.count):
                raise ValueError(f"{len(values)} vectors of {part.count} inputs")
            tokens.append(lengths if per_token else np.ones(part.count, np.int32))
        for part in parts:
            stream = part.of
            positions.append(stream.position + stream.done)
            stream.done += part.count
            finish.append(FinishReason.EOS if stream.done == len(stream.lengths) else FinishReason.NONE)
            if finish[-1]:
                del self._running[stream.key]
        return StepRows(
            server=np.array([part.of.server for part in parts], np.int32),
            stream=np.array([part.of.stream for part in parts], np.int32),
            position=np.array(positions, np.int32),
            tokens=np.concatenate(tokens),
            count=np.array([part.count for part in parts], np.int32),
            finish=np.array(finish, np.int8) if any(finish) else None,
            vectors=Vectors(
                np.array([values.shape[1] for values in made], np.int32),
                np.concatenate([values.reshape(-1) for values in made]),
            ),
        )

    # -- reporting

    def load(self) -> Load:
        return Load(len(self._waiting), len(self._running))

    def metrics(self) -> dict[str, float]:
        return {}

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        if method == "reset_prefix_cache":
            return None  # there is none
        raise ValueError(f"an engine of vectors has no operation {method!r}")


def _one_row(parts: Sequence[StepRows]) -> StepRows:
    """The rows of one stream as one: a step has at most one of each."""
    rows = concat_rows(parts)
    if len(rows.stream) > 1:
        assert rows.vectors is not None
        rows.server, rows.stream, rows.position = rows.server[:1], rows.stream[:1], rows.position[:1]
        rows.count = np.array([len(rows.tokens)], np.int32)
        rows.finish = None if rows.finish is None else rows.finish[-1:]
        rows.vectors = Vectors(rows.vectors.width[:1], rows.vectors.values)
    return rows


def _batch(parts: list[_Part]) -> PoolingBatch:
    spans = [(part.of, slice(part.of.done, part.of.done + part.count)) for part in parts]
    return PoolingBatch(
        ids=np.concatenate([part.of.ids[part.tokens] for part in parts]),
        lengths=np.concatenate([stream.lengths[span] for stream, span in spans]),
        seconds=np.concatenate([stream.seconds[span] for stream, span in spans]),
        groups=[PoolingGroup(part.of.params, part.count) for part in parts],
    )


def _failure(stream: _Stream, code: str, message: str) -> StreamFailure:
    position = stream.position + stream.done
    return StreamFailure(stream.server, stream.stream, position, code, message)
