"""The streams of an attached engine that makes vectors: those that wait, and those whose inputs vLLM has.

Every input is a request of vLLM's, in a slot of its own. A free slot goes to the most important stream; among
equals by turns to a stream that has begun and to the next one that waits, so that a list of thousands of
inputs delays nobody by more than its neighbours' inputs. Results leave in the order of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from penstock.config.serve import ServeConfig
from penstock.engine.attach.arrays import UnreadableArray, read_array
from penstock.engine.attach.connection import MAX_OUTPUT_BYTES
from penstock.engine.attach.output_decoder import DecodedOutputs
from penstock.engine.attach.pooling.inputs import (
    InputTable,
    PooledStream,
    begin_stream,
    sizes_of,
    width_of,
)
from penstock.engine.attach.step_output import FAILED, VllmCounters, error_of
from penstock.engine.base import Hold, RequestRejected, StepRows, StreamFailure
from penstock.engine.batch.rows import aborted_rows
from penstock.engine.lora.adapter_table import AdapterTable, adapter_of
from penstock.engine.pooling.input_checks import check_inputs
from penstock.engine.schedule.waiting_queue import WaitingQueue, WaitingStream
from penstock.wire.arrays import F32
from penstock.wire.frames import FinishReason
from penstock.wire.messages import EngineInfo, Submit, WireError
from penstock.wire.pooling import PER_TOKEN
from penstock.wire.vectors import Vectors
from penstock.wire.vllm.messages import PREEMPTED, EngineCoreOutput, EngineLost, VllmFinishReason

MAX_VALUES = (128 << 20) // 4
"""Values of results that are to come from vLLM, or wait here for those before them: 128 MiB. One result may
be larger when there is no other."""


class PooledStreams:
    """Waiting streams, and those that have begun. Every slot that :meth:`begin_next` gives is given back by
    :meth:`release` or :meth:`fail_all`."""

    def __init__(
        self, config: ServeConfig, info: EngineInfo, slots: int, adapters: AdapterTable | None
    ) -> None:
        """``slots``: requests that vLLM has at the same time; ``info.pooling``: not None."""
        assert info.pooling is not None
        self.table = InputTable(slots)
        self.queue = WaitingQueue(config)
        self.aborted: dict[PooledStream, None] = {}
        """Aborted streams, and failed ones of which vLLM still has inputs, for :meth:`take_aborted`."""
        self._info = info
        self._pooling = info.pooling
        self._adapters = adapters
        self._begun: list[tuple[int, int, PooledStream]] = []
        """A heap of streams with inputs that vLLM has not been given: priority, turn, stream."""
        self._turn = 0
        self._values = 0
        """Values of results that are to come or wait."""

    # -- streams come and go

    def submit(self, server: int, request: Submit) -> None:
        """Queue a stream. Raises RequestRejected, WireError."""
        if (server, request.stream) in self.table.streams:
            raise WireError(f"Submit.stream {request.stream} is running already")
        self._check(request)
        self.queue.push(server, request, self.table.free_count(), adapter_of(request, self._adapters))

    def _check(self, request: Submit) -> None:
        """Raises RequestRejected."""
        longest, vocab_size = self._info.max_model_len, self._info.vocab_size
        params = check_inputs(request, self._pooling, longest=longest, vocab_size=vocab_size)
        most = 4 * int(sizes_of(params, self._pooling).max())
        if most > MAX_OUTPUT_BYTES:
            raise RequestRejected(
                f"input: the vectors of one take {most} bytes, but at most {MAX_OUTPUT_BYTES} come from vLLM"
            )

    def begin_at_once(self, server: int, request: Submit) -> int | None:
        """None: every stream takes its turn by :meth:`submit`."""
        return None

    def abort(self, server: int, streams: Sequence[int]) -> None:
        """Stop streams: waiting ones at once, others by :meth:`take_aborted`."""
        for stream in streams:
            if not self.queue.abort(server, stream):
                begun = self.table.streams.get((server, stream))
                if begun is not None:
                    self.aborted[begun] = None

    def take_aborted(self) -> tuple[list[int], StepRows]:
        """Slots of inputs of aborted streams, to be released, and the streams' ends."""
        slots = [slot for stream in self.aborted for slot in self.table.slots_of(stream)]
        ends = [(*each.waited.key, each.position) for each in self.aborted if not each.is_over]
        for stream in self.aborted:
            if not stream.is_over:
                self._end(stream)
        self.aborted.clear()
        return slots, aborted_rows(ends)

    def drop_server(self, server: int) -> list[int]:
        """Forget the streams of an API server. Returns the slots of their inputs, to be released."""
        self.queue.drop_server(server)
        streams = [each for each in self.table.streams.values() if each.waited.server == server]
        for stream in streams:
            self._end(stream)
            self.aborted.pop(stream, None)
        return [slot for stream in streams for slot in self.table.slots_of(stream)]

    def release(self, slots: Sequence[int]) -> None:
        """vLLM runs the inputs of these slots no longer."""
        for slot in slots:
            self.table.release(slot)

    def flush(self) -> StepRows:
        """No row: results leave as soon as those before them have left."""
        return aborted_rows([])

    def fail_all(self, code: str, message: str) -> StepRows:
        """End every stream with an error, and free all slots."""
        streams = list(self.table.streams.values())
        rows = aborted_rows([])
        rows.failed = [StreamFailure(*each.waited.key, each.position, code, message) for each in streams]
        rows.failed += self.queue.fail_all(code, message)
        for stream in streams:
            self._end(stream)
        self.aborted.clear()
        self.release(self.table.running_slots())
        return rows

    def _end(self, stream: PooledStream) -> None:
        self._values -= stream.held
        self.table.end(stream)

    # -- vLLM is given inputs

    def can_begin(self, hold: Hold) -> bool:
        """Whether :meth:`begin_next` would give a slot."""
        return self._next(hold) is not None

    def begin_next(self, hold: Hold) -> tuple[int, WaitingStream] | None:
        """Give the next input a slot. Returns the slot, and a stream of this input alone; None: there is no
        input, slot or room."""
        chosen = self._next(hold)
        if chosen is None:
            return None
        if isinstance(chosen, PooledStream):
            stream, has_begun = chosen, True
        else:
            self.queue.remove(chosen)
            stream, has_begun = begin_stream(chosen, self._pooling), False
            self.table.begin(stream)
        self._turn += 1
        one, size = stream.next_request(), stream.next_size()
        slot = self.table.allocate(stream)
        self._values += size
        self._wait_for_turn(stream, has_begun)
        return slot, replace(stream.waited, request=one)

    def _wait_for_turn(self, stream: PooledStream, is_first: bool) -> None:
        """Put a stream behind others that have begun. ``is_first``: it is the first of them."""
        entry = stream.waited.priority, self._turn, stream
        if stream.sent == len(stream.sizes):
            if is_first:
                heappop(self._begun)
        elif is_first:
            heapreplace(self._begun, entry)
        else:
            heappush(self._begun, entry)

    def _next(self, hold: Hold) -> PooledStream | WaitingStream | None:
        """The stream whose input is next; None: there is none, or no slot or room."""
        if hold is Hold.ALL or not self.table.free_count():
            return None
        while self._begun and self._begun[0][2].is_over:
            heappop(self._begun)
        begun = self._begun[0][2] if self._begun else None
        waiting = next(iter(self.queue), None) if hold is Hold.NOTHING else None
        if begun is None and waiting is None:
            return None
        chosen: PooledStream | WaitingStream
        if begun is None or (waiting is not None and self._comes_first(waiting, begun)):
            assert waiting is not None
            chosen, size = waiting, self._first_size(waiting)
        else:
            chosen, size = begun, begun.next_size()
        has_room = not self._values or self._values + size <= MAX_VALUES
        return chosen if has_room else None

    def _comes_first(self, waiting: WaitingStream, begun: PooledStream) -> bool:
        if waiting.priority != begun.waited.priority:
            return waiting.priority < begun.waited.priority
        return self._turn % 2 == 0

    def _first_size(self, waiting: WaitingStream) -> int:
        params = waiting.request.pooling
        assert params is not None
        width = width_of(params, self._pooling)
        return width * int.from_bytes(params.lengths[:4], "little") if params.task in PER_TOKEN else width

    # -- vLLM's results

    def settle(
        self, decoded: DecodedOutputs, frames: list[memoryview], counts: VllmCounters
    ) -> tuple[list[StepRows], list[int]]:
        """The rows of results that can leave, and the slots whose inputs vLLM has done with. Raises
        EngineLost."""
        touched: dict[PooledStream, None] = {}
        failed: list[StreamFailure] = []
        ended: list[int] = []
        for entry, output in decoded.rare:
            slot = int(decoded.slots[entry])
            stream, index = self.table.input_of(slot)
            preemptions = sum(event.type == PREEMPTED for event in output.events or ())
            counts.preemptions += preemptions
            if not stream.is_over:
                for _ in range(preemptions):
                    self.table.note_preemption(stream)
            if output.finish_reason is None:
                continue
            ended.append(slot)
            if stream.is_over:
                continue
            try:
                stream.results[index] = _read(output, frames, int(stream.sizes[index]))
                touched[stream] = None
            except _InputFailed as error:
                failed.append(StreamFailure(*stream.waited.key, stream.position, error.code, str(error)))
                touched.pop(stream, None)
                self._end(stream)
                self.aborted[stream] = None
        rows = self._rows([stream for stream in touched if stream.done in stream.results])
        rows.failed = failed
        return [rows], ended

    def _rows(self, streams: list[PooledStream]) -> StepRows:
        """One row for each of the streams: the results that follow those that have left."""
        if not streams:
            return aborted_rows([])
        position = [stream.position for stream in streams]
        before = [stream.done for stream in streams]
        values: list[F32] = []
        width, finish, vectors = [], [], []
        for stream, start in zip(streams, before, strict=True):
            params = stream.request.pooling
            assert params is not None
            values += stream.take_results()
            lengths, _ = params.columns()
            sent = lengths[start : stream.done]
            vectors.append(sent if params.task in PER_TOKEN else np.ones_like(sent))
            width.append(width_of(params, self._pooling))
            self._values -= int(stream.sizes[start : stream.done].sum())
            is_complete = stream.done == len(stream.sizes)
            finish.append(FinishReason.EOS if is_complete else FinishReason.NONE)
            if is_complete:
                self._end(stream)
                self.aborted.pop(stream, None)
        return StepRows(
            server=_column([stream.waited.server for stream in streams]),
            stream=_column([stream.request.stream for stream in streams]),
            position=_column(position),
            tokens=np.concatenate(vectors),
            count=_column([stream.done - start for stream, start in zip(streams, before, strict=True)]),
            finish=np.array(finish, np.int8),
            vectors=Vectors(_column(width), np.concatenate(values)),
        )


def _column(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)


class _InputFailed(ValueError):
    """An input without a result; ``code`` as of StreamFailed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _read(output: EngineCoreOutput, frames: list[memoryview], size: int) -> F32:
    """The result of an input, float32[size]. Raises _InputFailed, EngineLost."""
    if output.finish_reason == VllmFinishReason.ABORT:
        raise EngineLost("it has ended requests by itself: it is shutting down, or was paused")
    if output.finish_reason == VllmFinishReason.ERROR:
        error = error_of(output.error) if isinstance(output.error, dict) else ("engine_error", FAILED)
        raise _InputFailed(*error)
    try:
        found = read_array(output.pooling_output, frames)
    except UnreadableArray as error:
        raise _InputFailed("engine_error", f"vLLM's vector cannot be read: {error}") from None
    if found.size != size:
        raise _InputFailed(
            "engine_error", f"vLLM returned {found.size} values of the shape {list(found.shape)}, not {size}"
        )
    return found.astype(np.float32).reshape(-1)
