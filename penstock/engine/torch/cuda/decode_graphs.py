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
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import NULL_BLOCK, BlockTables
from penstock.engine.torch.attention_metadata import (
    AttentionMetadata,
    CacheGeometry,
    DecodeMetadata,
    cache_writes,
    decode_rows,
)
from penstock.engine.torch.transfer import to_device

log = logging.getLogger(__name__)

Replay = Callable[[], Tensor]
Capture = Callable[[Replay], Replay]
"""Records the kernels of a call. The result launches them again, and returns the same tensor each time."""
Forward = Callable[[Tensor, Tensor, AttentionMetadata], Tensor]
"""Tokens int64[S], positions int64[S] and their metadata → hidden states [S, H]."""

MAX_SIZE = 512
"""Larger batches are not padded: their kernels take so long that launching them matters little (estimated,
not measured)."""


def padded_sizes(max_num_seqs: int) -> list[int]:
    """Sizes that batches are padded to: 1, 2, 4, then steps of 8 up to 256 and of 16 up to :data:`MAX_SIZE`;
    at most 51."""
    most = min(max_num_seqs, MAX_SIZE)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, MAX_SIZE + 1, 16)]
    return [size for size in sizes if size < most] + [most]


class DecodeBuffers:
    """The inputs of a decode step on the device, for up to M rows, in tensors that keep their addresses.

    They take M * (24 + 8 * KV heads + 4 * blocks per stream) bytes: 17 MB for 512 rows with 8 KV heads, and
    131,072 tokens per stream in blocks of 16.
    """

    def __init__(
        self, rows: int, blocks_per_stream: int, geometry: CacheGeometry, device: torch.device
    ) -> None:
        self._geometry = geometry
        self._device = device
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        # positions, lengths and writes of a size are next to each other, so that one copy fills them
        self._integers = torch.zeros(rows * (2 + geometry.kv_heads), dtype=torch.int64, device=device)
        self._table = torch.full((rows, blocks_per_stream), NULL_BLOCK, dtype=torch.int32, device=device)

    def views(self, size: int) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """The first ``size`` rows: tokens, positions and metadata, which every :meth:`fill` changes."""
        integers = self._integers[: size * (2 + self._geometry.kv_heads)]
        positions, length, writes = integers[:size], integers[size : 2 * size], integers[2 * size :]
        decodes = DecodeMetadata(self._table[:size], length)
        return self._tokens[:size], positions, AttentionMetadata(writes, [], decodes)

    def fill(
        self,
        size: int,
        tokens: Tensor,
        slots: NDArray[np.intp],
        positions: NDArray[np.int64],
        blocks: BlockTables,
    ) -> None:
        """Enqueue copies of N tokens and their addresses to the first ``size`` rows; the rest is padding.

        tokens: int64[N] on the device; slots, positions: of each token.
        """
        table, length = decode_rows(blocks, slots, positions)
        writes = cache_writes(blocks, self._geometry, slots, positions)
        self._tokens[: len(tokens)].copy_(tokens)
        self._copy(size, positions, length, writes, blocks.block_size)
        padded = np.full((size, table.shape[1]), NULL_BLOCK, np.int32)
        padded[: len(table)] = table
        # blocks behind a row's length are those of another step, and are not read
        self._table[:size, : table.shape[1]].copy_(to_device(padded, self._device), non_blocking=True)

    def fill_padding(self, size: int, block_size: int) -> None:
        """Make the first ``size`` rows padding."""
        none = np.zeros(0, np.int64)
        self._copy(size, none, none, none, block_size)
        self._table[:size] = NULL_BLOCK

    def _copy(
        self,
        size: int,
        positions: NDArray[np.int64],
        length: NDArray[np.int64],
        writes: NDArray[np.int64],
        block_size: int,
    ) -> None:
        heads = self._geometry.kv_heads
        integers = np.zeros(size * (2 + heads), np.int64)
        integers[: len(positions)] = positions
        integers[size : 2 * size] = 1
        integers[size : size + len(length)] = length
        null_rows = (NULL_BLOCK * heads + np.arange(heads)) * block_size
        integers[2 * size :].reshape(size, heads)[:] = null_rows
        integers[2 * size : 2 * size + len(writes)] = writes
        self._integers[: len(integers)].copy_(to_device(integers, self._device), non_blocking=True)


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
        block_size: int,
    ) -> None:
        """``sizes`` in ascending order; the last one is that of the buffers. Raises what ``capture`` does."""
        self._buffers = buffers
        self._sizes = sizes
        self._replays: dict[int, Replay] = {}
        for size in reversed(sizes):  # the memory of the largest holds what the others compute
            buffers.fill_padding(size, block_size)
            inputs = buffers.views(size)
            self._replays[size] = capture(partial(forward, *inputs))

    def takes(self, batch: Batch) -> bool:
        """Whether a batch has single tokens only, and not too many."""
        return batch.singles == len(batch) <= self._sizes[-1]

    def run(
        self, tokens: Tensor, slots: NDArray[np.intp], positions: NDArray[np.int64], blocks: BlockTables
    ) -> Tensor:
        """[N, H]: hidden states of the N tokens of a batch, until the next run. Writes their keys and values
        to the cache."""
        size = self._sizes[bisect_left(self._sizes, len(tokens))]
        self._buffers.fill(size, tokens, slots, positions, blocks)
        return self._replays[size]()[: len(tokens)]


class CudaCapture:
    """Records CUDA graphs that share their memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Replay) -> Replay:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # libraries are initialised and kernels compiled before the recording
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may use the device meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
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
    geometry: CacheGeometry,
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    device: torch.device,
) -> DecodeGraphs | None:
    """The graphs of a model; None without ``capture`` or a kernel that reads the cache in place, and for
    models whose forward pass cannot be recorded."""
    if capture is None or not geometry.in_place:
        return None
    sizes = padded_sizes(max_num_seqs)
    buffers = DecodeBuffers(sizes[-1], -(-max_model_len // block_size), geometry, device)
    try:
        return DecodeGraphs(forward, capture, buffers, sizes, block_size)
    except (RuntimeError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        log.warning("decode steps run without CUDA graphs, as the model cannot be recorded: %s", reason)
        return None
