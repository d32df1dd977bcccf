"""The streams whose inputs vLLM has or is to get: one request of vLLM's for each input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.engine.lora.adapter_table import LoadedAdapter
from penstock.engine.schedule.waiting_queue import StreamKey, WaitingStream
from penstock.wire.arrays import F32
from penstock.wire.messages import Submit
from penstock.wire.pooling import PER_TOKEN, PoolingInfo, PoolingParams, PoolingTask


@dataclass(slots=True, eq=False)
class PooledStream:
    """A stream that has begun. Indices of inputs are those of its request, which begins with the input
    ``request.resumed`` of the stream."""

    waited: WaitingStream
    starts: NDArray[np.int64]
    """int64[inputs + 1]: index of the first token of each input in the prompt, and of what follows."""
    sizes: NDArray[np.int64]
    """int64[inputs]: values of each input's result."""
    sent: int = 0
    """Inputs that vLLM has been given."""
    done: int = 0
    """Inputs whose results have left in rows."""
    results: dict[int, F32] = field(default_factory=dict)
    """By index, float32[values]: results that wait for those of inputs before."""
    is_over: bool = False
    """Whether it has ended: what vLLM still makes of it is ignored."""

    @property
    def request(self) -> Submit:
        return self.waited.request

    @property
    def position(self) -> int:
        return self.request.resumed + self.done

    @property
    def held(self) -> int:
        """Values of results that are to come or wait here."""
        return int(self.sizes[self.done : self.sent].sum())

    def next_size(self) -> int:
        """Values of the next input's result."""
        return int(self.sizes[self.sent])

    def next_request(self) -> Submit:
        """The request of the next input alone."""
        request, index = self.request, self.sent
        pooling = request.pooling
        assert pooling is not None
        start, end = self.starts[index : index + 2].tolist()
        places = slice(4 * index, 4 * index + 4)
        one = msgspec.structs.replace(
            pooling, lengths=pooling.lengths[places], seconds=pooling.seconds[places]
        )
        return msgspec.structs.replace(request, prompt=request.prompt[4 * start : 4 * end], pooling=one)

    def take_results(self) -> list[F32]:
        """The results that follow those that have left."""
        found = []
        while (values := self.results.pop(self.done, None)) is not None:
            found.append(values)
            self.done += 1
        return found


def width_of(params: PoolingParams, info: PoolingInfo) -> int:
    """Values of each vector that is asked for."""
    if params.task in (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY):
        return info.labels
    return params.dimensions or info.width


def sizes_of(params: PoolingParams, info: PoolingInfo) -> NDArray[np.int64]:
    """int64[inputs]: values of each input's result."""
    lengths, _ = params.columns()
    vectors = lengths if params.task in PER_TOKEN else np.ones_like(lengths)
    return vectors.astype(np.int64) * width_of(params, info)


def begin_stream(waited: WaitingStream, info: PoolingInfo) -> PooledStream:
    pooling = waited.request.pooling
    assert pooling is not None
    lengths, _ = pooling.columns()
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
    return PooledStream(waited, starts, sizes_of(pooling, info))


class InputTable:
    """The streams that have begun, and the slots of their inputs that vLLM has."""

    generated = 0
    """Tokens: none."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))[::-1]
        self._inputs: dict[int, tuple[PooledStream, int]] = {}
        """By slot: the stream, and the index of the input."""
        self.streams: dict[StreamKey, PooledStream] = {}
        """Those that have not ended."""
        self.adapters: dict[int, LoadedAdapter] = {}
        """By slot."""
        self.notify_start: Callable[[int, int], None] = lambda server, stream: None
        self._admitted: list[StreamKey] = []
        self._preempted: list[StreamKey] = []

    # -- streams

    def begin(self, stream: PooledStream) -> None:
        key = stream.waited.key
        self.streams[key] = stream
        if stream.waited.adapter is not None:
            stream.waited.adapter.streams += 1
        self._admitted.append(key)
        if stream.request.resubmitted:
            self.notify_start(*key)

    def end(self, stream: PooledStream) -> None:
        stream.is_over = True
        stream.results.clear()
        del self.streams[stream.waited.key]
        if stream.waited.adapter is not None:
            stream.waited.adapter.streams -= 1

    def running(self) -> int:
        return len(self.streams)

    def take_admitted(self) -> Sequence[StreamKey]:
        """Streams that have begun since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def note_preemption(self, stream: PooledStream) -> None:
        self._preempted.append(stream.waited.key)

    def take_preempted(self) -> Sequence[StreamKey]:
        """Streams that an input of which was preempted since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    # -- slots

    def free_count(self) -> int:
        return len(self._free)

    def allocate(self, stream: PooledStream) -> int:
        """Give a free slot to the stream's next input. Returns the slot."""
        slot = self._free.pop()
        self._inputs[slot] = stream, stream.sent
        if stream.waited.adapter is not None:
            self.adapters[slot] = stream.waited.adapter
        stream.sent += 1
        return slot

    def input_of(self, slot: int) -> tuple[PooledStream, int]:
        """The stream of a slot, and the index of the input."""
        return self._inputs[slot]

    def slots_of(self, stream: PooledStream) -> list[int]:
        return [slot for slot, (owner, _) in self._inputs.items() if owner is stream]

    def running_slots(self) -> list[int]:
        return list(self._inputs)

    def release(self, slot: int) -> None:
        del self._inputs[slot]
        self.adapters.pop(slot, None)
        self._free.append(slot)
