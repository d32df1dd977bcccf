"""CUDA graphs of decode steps: the forward pass over a padded batch in fixed buffers, recorded once per size.

The time of a small model's decode step is what the host needs to launch its kernels. A graph launches them
all at once, with the addresses and shapes of its recording. So a batch of single tokens is padded to one of a
few sizes and copied into buffers that stay where they are. Rows of padding write to the null block and read
one position of it; their outputs are dropped.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.torch.cuda.paged_layout import DeviceTables, PagedLayout
from penstock.engine.torch.out_of_memory import is_out_of_memory
from penstock.engine.torch.transfer import to_device

log = logging.getLogger(__name__)

Replay = Callable[[], Tensor]
Capture = Callable[[Replay], Replay]
"""Records the kernels of a call. The result launches them again, and returns the same tensor each time."""
Forward = Callable[[Tensor, Tensor, PagedLayout], Tensor]
"""Tokens int64[S], their positions for a rotary embedding int64[S], and their layout → hidden states [S,
H]."""

MAX_SIZE = 1024
"""Larger batches are not recorded: their kernels take longer than launching these (estimated, not
measured)."""


def padded_sizes(max_num_seqs: int) -> list[int]:
    """Sizes that batches are padded to: 1, 2, 4, then steps of 8 up to 256, of 16 up to 512 and of 32 up to
    :data:`MAX_SIZE`; at most 67."""
    most = min(max_num_seqs, MAX_SIZE)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, MAX_SIZE + 1, 32)]
    return [size for size in sizes if size < most] + [most]


class DecodeBuffers:
    """The inputs of a decode step on the device, for up to M rows, in tensors that keep their addresses: 32
    bytes a row."""

    def __init__(self, rows: int, tables: DeviceTables, longest: int, device: torch.device) -> None:
        """``longest``: positions of the longest history that a recording may read."""
        self._device = device
        self._longest = longest
        self.tables = tables
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        # the columns of a size are next to each other, so that one copy fills them
        self._places = torch.zeros(3 * rows, dtype=torch.int64, device=device)

    def views(self, size: int) -> tuple[Tensor, Tensor, PagedLayout]:
        """The first ``size`` rows: tokens, positions for a rotary embedding, and layout, which every
        :meth:`fill` changes."""
        positions, owners, rotary = self._places[: 3 * size].view(3, size).unbind()
        layout = PagedLayout(self.tables.table, owners, positions, size, None, self._longest)
        return self._tokens[:size], rotary, layout

    def fill(
        self,
        size: int,
        tokens: Tensor,
        slots: NDArray[np.intp],
        positions: NDArray[np.int64],
        rotary: NDArray[np.int64] | None = None,
    ) -> None:
        """Enqueue copies of N tokens and their places to the first ``size`` rows; the rest is padding.

        tokens: int64[N] on the device; slots, positions, rotary: of each token; without ``rotary``, the
        rotary embedding takes the positions.
        """
        count = len(slots)
        places = np.zeros((3, size), np.int64)
        places[0, :count] = positions
        places[1, :count], places[1, count:] = slots, self.tables.null_row
        places[2, :count] = positions if rotary is None else rotary
        self._tokens[:count].copy_(tokens)
        self._places[: 3 * size].copy_(to_device(places.reshape(-1), self._device), non_blocking=True)


class DecodeGraphs:
    """A graph for each size, recorded when it is made; graphs share the memory of what they compute.

    They refer to the weights and the KV cache by address: make new ones when these move.
    """

    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        buffers: DecodeBuffers,
        sizes: list[int],
    ) -> None:
        """``sizes`` in ascending order; the last one is that of the buffers. Raises what ``capture`` does."""
        self._buffers = buffers
        self._sizes = sizes
        self._replays: dict[int, Replay] = {}
        for size in reversed(sizes):  # the memory of the largest holds what the others compute
            inputs = buffers.views(size)
            buffers.fill(size, inputs[0][:0], np.zeros(0, np.intp), np.zeros(0, np.int64))
            self._replays[size] = capture(partial(forward, *inputs))

    def takes(self, batch: Batch) -> bool:
        """Whether a batch has single tokens only, and not too many."""
        return batch.singles == len(batch) <= self._sizes[-1]

    def run(
        self,
        tokens: Tensor,
        slots: NDArray[np.intp],
        positions: NDArray[np.int64],
        blocks: BlockTables,
        rotary: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """[N, H]: hidden states of the N tokens of a batch, until the next run. Writes their keys and values
        to the cache. ``rotary``: see :meth:`DecodeBuffers.fill`."""
        size = self._sizes[bisect_left(self._sizes, len(tokens))]
        self._buffers.tables.copy_new(blocks, slots)
        self._buffers.fill(size, tokens, slots, positions, rotary)
        return self._replays[size]()[: len(tokens)]


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all recordings and the calls before them. PyTorch keeps cuBLAS's workspace of each stream, 32
    MiB on an H100, and deals out 32 streams in turn; one that is allocated by a recording would keep the
    memory of its graph (pytorch #175276)."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class CudaCapture:
    """Records CUDA graphs that share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Replay) -> Replay:
        stream = _capture_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # libraries are initialised and kernels compiled before the recording
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            output = call()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def find_capture(device: torch.device) -> Capture | None:
    """None: the device has no graphs."""
    return CudaCapture() if device.type == "cuda" else None


@torch.inference_mode()
def record_graphs(
    forward: Forward,
    capture: Capture | None,
    tables: DeviceTables,
    *,
    sizes: list[int],
    longest: int,
    device: torch.device,
) -> DecodeGraphs | None:
    """The graphs of a model for ``sizes``; None without ``capture``, and for models whose forward pass cannot
    be recorded. ``longest``: positions of the longest history. Raises what a lack of memory raises."""
    if capture is None:
        return None
    buffers = DecodeBuffers(sizes[-1], tables, longest, device)
    try:
        return DecodeGraphs(forward, capture, buffers, sizes)
    except (RuntimeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        log.warning("decode steps run without CUDA graphs, as the model cannot be recorded: %s", reason)
        return None
