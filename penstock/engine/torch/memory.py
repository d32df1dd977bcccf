"""Memory of the torch engine: the size of the KV cache, and how the C library handles freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc

import numpy as np
import psutil
import torch
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.torch.model_loader import ModelShape

CPU_CACHE_BYTES = 4 << 30
CPU_CACHE_SHARE = 0.4
"""Default KV cache on a CPU: the smaller of these bytes and this share of the available memory."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc's upper limit."""


def keep_freed_memory() -> None:
    """Make the C library keep the memory that a step frees, for the next step.

    By default glibc returns tensors of some megabytes to the kernel, which zeroes their pages again at each
    page fault: 1,700 faults a step at 1,024 rows of a small model, up to half of the engine's CPU time. Does
    nothing with another C library.
    """
    library = ctypes.CDLL(None)
    try:
        mallopt = library.mallopt
    except AttributeError:
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def release_memory(device: torch.device) -> None:
    """Return free memory to the system and the device."""
    gc.collect()  # a model's modules form reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def num_cache_blocks(
    config: ServeConfig, shape: ModelShape, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Number of KV cache blocks that can be allocated; the cache has one more, the null block.

    Call it when the weights are in memory. Raises ConfigError when there is no room for a block.
    """
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_size * dtype.itemsize
    budget = config.kv_cache_memory or _default_budget(config, device)
    blocks = budget // (per_token * config.block_size) - 1
    if blocks < 1:
        raise ConfigError(
            f"--kv-cache-memory: {budget} bytes hold no block of {config.block_size} tokens "
            f"({per_token} bytes a token); at least {2 * per_token * config.block_size} are needed"
        )
    return min(blocks, config.max_num_seqs * -(-max_model_len // config.block_size))


def _default_budget(config: ServeConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - config.gpu_memory_utilization) * total))
    return int(min(CPU_CACHE_BYTES, CPU_CACHE_SHARE * psutil.virtual_memory().available))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU the operating system commits their pages only when they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
