"""Asynchronous copies between host and device.

A copy is enqueued behind the device's other work. The result of :func:`to_host` may be read once the device
has finished everything that was enqueued up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes of which tensors that are copied together begin at a multiple: Triton compiles a kernel once more for
addresses that are not multiples of it."""


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor with the array's values; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def to_device_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """:func:`to_device` of each array, by one copy: the host needs some 10 us for each, however small."""
    if device.type == "cpu":
        return [to_device(array, device) for array in arrays]
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    starts = [end - size for size, end in zip(sizes, accumulate(sizes), strict=True)]
    packed = np.empty(max(sum(sizes), ALIGNMENT), np.uint8)  # PyTorch gives an empty tensor no stride
    for array, start in zip(arrays, starts, strict=True):
        packed[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    sent = to_device(packed, device)
    return [
        sent[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned host memory; the tensor itself if it is on the host."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class HostCopy:
    """A copy of a tensor on the host that nothing waits for but :meth:`wait`."""

    def __init__(self, tensor: Tensor) -> None:
        """``tensor`` must not change: on a CPU it is the copy."""
        self._copy = to_host(tensor)
        self._done: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def has_arrived(self) -> bool:
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until it has arrived."""
        if self._done is not None:
            self._done.synchronize()

    def read(self) -> NDArray[Any]:
        """The values, once they have arrived."""
        values: NDArray[Any] = self._copy.numpy()
        return values
