"""The engine process's memory: what the KV cache gets, and what the C library does with freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc

import psutil
import torch

from penstock.config.errors import ConfigError
from penstock.config.options import ServeConfig
from penstock.engine.torch.model_loader import ModelShape

CPU_CACHE_BYTES = 4 << 30
CPU_CACHE_SHARE = 0.4
"""The default KV cache on a CPU: at most these bytes, and this share of the memory that is available."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""glibc refuses more."""


def keep_freed_memory() -> None:
    """Let the C library keep what a step frees for the next step, which needs as much.

    By default it gives tensors of some megabytes back to the kernel, which zeroes their pages again one page
    fault at a time: 1,700 faults a step at 1,024 rows of a small model, up to half of the engine's CPU time.
    Does nothing with a C library other than glibc.
    """
    library = ctypes.CDLL(None)
    try:
        mallopt = library.mallopt
    except AttributeError:
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def release_memory(device: torch.device) -> None:
    """Give what is free back to the system."""
    gc.collect()  # a model's modules refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)


def num_cache_blocks(
    config: ServeConfig, shape: ModelShape, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> int:
    """How many blocks the KV cache can give out; it holds one more, the null block.

    To be asked once the weights are in memory. Raises ConfigError when it could hold nothing.
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
