"""Compiles the attention kernels for a compute capability, without its GPU: python -m … 90 < shapes.

Writes a JSON object per compilation. Nothing is launched.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from penstock.engine.torch.cuda import kernels
from penstock.engine.torch.cuda.paged_layout import FILLING, DeviceTables

CPU = torch.device("cpu")


class AbsentGPU:
    """What Triton asks its driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_shape(number: int, dtype: str, heads: int, kv_heads: int, size: int, *options: Any) -> None:
    for programs, count in (("few", 1), ("many", FILLING + 1)):
        layout = DeviceTables(1, 128, CPU).null_layout(count, count, 4096)
        query, key, value = (
            torch.zeros(2 * count, each, size, dtype=getattr(torch, dtype))
            for each in (heads, kv_heads, kv_heads)
        )
        cache = torch.zeros(2, 1, kv_heads, 16, size, dtype=query.dtype)
        SEEN.update(shape=number, programs=programs)
        kernels.paged_attention(query, key, value, *cache, layout, 1.0, *options, None)


SEEN: dict[str, Any] = {}


def main() -> None:
    driver.set_active(AbsentGPU(int(sys.argv[1])))
    run = JITFunction.run

    def compile_only(function: Any, *arguments: Any, **options: Any) -> Any:
        kernel = run(function, *arguments, **options | {"warmup": True})
        product = next((name for name in ("wgmma", "mma.sync") if name in kernel.asm["ptx"]), "fma")
        described = {
            "kernel": function.__name__,
            "tiled": bool(options.get("TILED")),
            "shared": kernel.metadata.shared,
            "product": product,
        }
        print(json.dumps(SEEN | described), flush=True)
        return kernel

    JITFunction.run = compile_only
    for number, shape in enumerate(json.load(sys.stdin)):
        compile_shape(number, *shape)


if __name__ == "__main__":
    main()
