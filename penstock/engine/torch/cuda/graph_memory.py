"""How much of a device's memory the CUDA graphs of a model will take, before its KV cache is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.torch.cuda.decode_graphs import Capture, DecodeGraphs, Replay
from penstock.engine.torch.memory import DeviceMemory

Record = Callable[[Capture, list[int]], DecodeGraphs | None]


@dataclass(slots=True, frozen=True)
class _Usage:
    """Bytes at one time: of the device, of PyTorch's allocator, and of its tensors."""

    device: int
    reserved: int
    allocated: int


def measure_graphs(record: Record, capture: Capture, sizes: list[int], memory: DeviceMemory) -> int | None:
    """Bytes of graphs of ``sizes``, by recording the two largest and dropping them; None: they cannot be
    recorded.

    The largest takes the memory that all compute in. Each further one takes what the driver keeps of a
    recording, which does not depend on its size, and the tensors that stay, such as its output, which do.
    """
    marks: list[_Usage] = []

    def mark() -> None:
        memory.release()
        marks.append(_Usage(memory.in_use(), memory.reserved(), memory.allocated()))

    def capture_and_mark(call: Replay) -> Replay:
        replay = capture(call)
        mark()
        return replay

    mark()
    graphs = record(capture_and_mark, sizes[-2:])
    if graphs is None:
        return None
    total = marks[1].device - marks[0].device
    if len(sizes) > 1:
        first, second = marks[1:]
        kept = max(0, second.allocated - first.allocated)
        driver = max(0, (second.device - first.device) - (second.reserved - first.reserved))
        total += driver * (len(sizes) - 1) + kept * sum(sizes[:-1]) // sizes[-2]
    return max(0, total)
