"""Memory of the torch engine: the size of the KV cache, and how the C library handles freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import psutil
import torch
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.torch.device import DevicePlace
from penstock.engine.torch.model_loader import ModelShape
from penstock.engine.torch.out_of_memory import in_units

log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 4 << 30
CPU_CACHE_SHARE = 0.4
"""Default KV cache on a CPU: the smaller of these bytes and this share of the available memory."""


def empty_cache(device: torch.device) -> None:
    """Return what PyTorch's allocator keeps for later tensors to the device, for CUDA's own libraries."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def release_memory(device: torch.device) -> None:
    """Return free memory to the system and the device."""
    gc.collect()  # a model's modules form reference cycles
    empty_cache(device)
    with contextlib.suppress(AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def bytes_per_token(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values in all layers of a model."""
    own = (shape.cached(layer) for layer in range(shape.layers) if layer not in shape.reused)
    return sum(kv_heads * (size + value_size) for kv_heads, size, value_size in own) * dtype.itemsize


def num_cache_blocks(config: ServeConfig, per_token: Sequence[int], max_model_len: int, budget: int) -> int:
    """Number of KV cache blocks that fit into ``budget`` bytes; the cache has one more, the null block.

    ``per_token``: bytes per token of each model that has a cache of these blocks. Raises ConfigError when
    there is no room for a block.
    """
    per_block = sum(per_token) * config.block_size
    blocks = budget // per_block - 1
    if blocks < 1:
        option = "--kv-cache-memory" if config.kv_cache_memory else "what is left for the KV cache"
        raise ConfigError(
            f"{option}: {budget} bytes hold no block of {config.block_size} tokens "
            f"({sum(per_token)} bytes a token); at least {2 * per_block} are needed"
        )
    return min(blocks, config.max_num_seqs * -(-max_model_len // config.block_size))


class DeviceMemory(Protocol):
    """What is known of a device's memory; all numbers are bytes."""

    def total(self) -> int:
        """Bytes of the device."""

    def free(self) -> int:
        """What no process has."""

    def in_use(self) -> int:
        """What has been taken, the driver's part included; where other engines start on the same device,
        only what this process's allocator has."""

    def reserved(self) -> int:
        """What this process's allocator has: tensors, and what it keeps for later ones."""

    def allocated(self) -> int:
        """This process's tensors."""

    def release(self) -> None:
        """Give back what the allocator keeps for later tensors."""

    def watch_peak(self) -> None:
        """Forget the peak, after :meth:`release`."""

    def peak(self) -> int:
        """The most that was :meth:`reserved` since :meth:`watch_peak`."""


class CudaMemory:
    """:class:`DeviceMemory` of a CUDA device."""

    def __init__(self, place: DevicePlace) -> None:
        self._device = place.device
        self._shared = place.sharers > 1

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def in_use(self) -> int:
        if self._shared:
            return self.reserved()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        release_memory(self._device)

    def watch_peak(self) -> None:
        self.release()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device))


def cache_budget(
    config: ServeConfig,
    place: DevicePlace,
    run_largest_steps: Callable[[], None],
    graph_bytes: Callable[[DeviceMemory], int],
    later: int,
    memory: DeviceMemory | None = None,
) -> int:
    """Bytes for the KV cache of an engine whose weights are in memory: ``--kv-cache-memory``, or what is left
    of its part of the device's memory.

    On a CUDA device that is ``--gpu-memory-utilization`` of the total, divided evenly among the engines that
    share it, minus the peak of ``run_largest_steps`` (weights, activations and logits), ``graph_bytes`` of
    CUDA graphs, and the ``later`` bytes of tensors that come with the requests that need them. It is never
    more than what is free beside these. An engine alone also leaves out what is in use by anything else.
    Engines that share a device start at the same time, so each would count the other's weights; their CUDA
    contexts, and what the driver keeps of their graphs, must fit into the rest, 1 - utilization.

    The peak is that of the memory that PyTorch's allocator has, not of the tensors in it. Steps of other
    shapes find pieces of other sizes; two steps of unlike shapes after each other show what that takes, and
    what lies between tensors is not the cache's. The difference is some percent of the activations.

    On a CPU nothing is run: free memory is a moving number that all processes of the host share, the cache
    takes pages only as it fills, and a share below a half leaves room for activations. Ranks divide it.
    """
    if config.kv_cache_memory:
        return config.kv_cache_memory
    if place.device.type != "cuda":
        share = CPU_CACHE_SHARE * psutil.virtual_memory().available / place.sharers
        return int(min(CPU_CACHE_BYTES, share))
    memory = CudaMemory(place) if memory is None else memory
    memory.watch_peak()
    run_largest_steps()
    steps = memory.peak()
    graphs = graph_bytes(memory)
    memory.release()
    free, held, total = memory.free(), memory.reserved(), memory.total()
    used = steps + graphs + later
    part = int(config.gpu_memory_utilization * total / place.sharers)
    others = max(0, total - free - held)
    granted, there = part - used - (others if place.sharers == 1 else 0), free - (used - held)
    budget = min(granted, there)
    parts = {"weights and largest step": steps, "CUDA graphs": graphs, "penalties": later, "others": others}
    log.info(
        "of %s on %s: %s, KV cache %s",
        in_units(total),
        place.device,
        ", ".join(f"{name} {in_units(size)}" for name, size in parts.items()),
        in_units(max(0, budget)),
    )
    if budget <= 0:
        raised = "Raise it, lower" if there > 0 else "Lower"
        shared = "" if place.sharers == 1 else f" divided among {place.sharers} engines"
        raise ConfigError(
            f"--gpu-memory-utilization {config.gpu_memory_utilization}{shared}: nothing is left for the KV "
            f"cache. Of {in_units(total)} on {place.device} this engine may take {in_units(part)}; its "
            f"weights and largest step take {in_units(steps)}, CUDA graphs {in_units(graphs)}, penalties up "
            f"to {in_units(later)}. CUDA contexts and other processes (nvidia-smi lists them) have "
            f"{in_units(others)}, which leaves {in_units(free + held)}. "
            f"{raised} --max-num-batched-tokens or --max-num-seqs, or end other processes"
        )
    return budget


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the operating system commits their pages only when they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
