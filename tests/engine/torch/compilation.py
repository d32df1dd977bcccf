"""Compiles the Triton kernels for GPUs that are not here, and tells what each would take of a multiprocessor.

    python -m tests.engine.torch.compilation [--capability 90] [--dtype bfloat16] [--sizes 64,128]

Triton brings the assembler; what it lacks without a GPU is a driver. A line of JSON for each kernel.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
PRODUCTS = "wgmma", "mma.sync"
"""Instructions of matrix products, of Hopper and of all; None: sums of single products."""
SHAPES = {64: (8, 2), 80: (4, 2), 96: (6, 6), 128: (4, 1), 192: (4, 2), 256: (2, 1)}
"""Heads and KV heads by head size."""
OPTIONS: list[tuple[int | None, float | None, bool]] = [
    (None, None, False),
    (300, 30.0, False),
    (None, None, True),
]
"""Window, soft cap, and whether there is ALiBi."""


class NoDriver:
    """What Triton asks its driver until a kernel is launched."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(capability: int, tell: Callable[[dict[str, Any]], None]) -> None:
    """From here on launches compile, and run nothing."""
    driver.set_active(NoDriver(capability))

    def launch(kernel: JITFunction[Any], grid: object) -> Callable[..., None]:
        def compile_(*arguments: Any, **options: Any) -> None:
            began = time.monotonic()
            compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
            tell(
                {
                    "kernel": kernel.__name__,
                    "tokens": options.get("TOKENS"),
                    "splits": options.get("SPLIT"),
                    "product": next((name for name in PRODUCTS if name in compiled.asm["ptx"]), None),
                    "seconds": round(time.monotonic() - began, 2),
                    "shared": compiled.metadata.shared,
                    "warps": compiled.metadata.num_warps,
                    **resources(compiled.asm["cubin"]),
                }
            )

        return compile_

    JITFunction.__getitem__ = launch


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and the bytes that it spills for want of more."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = USAGE.search(run.stdout + run.stderr)
    assert found is not None, run.stdout + run.stderr
    return {"registers": int(found[1]), "spilled": int(found[2])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--dtype", default="bfloat16,float16,float32")
    parser.add_argument("--sizes", default=",".join(map(str, SHAPES)))
    chosen = parser.parse_args()
    from penstock.engine.torch.cuda import kernels
    from penstock.engine.torch.cuda.paged_layout import FILLING
    from tests.engine.torch.test_kernels import Step

    context: dict[str, Any] = {}
    compile_only(chosen.capability, lambda found: print(json.dumps(context | found), flush=True))
    for dtype in chosen.dtype.split(","):
        for size in map(int, chosen.sizes.split(",")):
            heads, kv_heads = SHAPES[size]
            for window, softcap, alibi in OPTIONS:
                context |= {"dtype": dtype, "size": size}
                context |= {"window": window, "softcap": softcap, "alibi": alibi}
                step = Step([(600, 1), (60, 40)], heads, kv_heads, size, dtype=getattr(torch, dtype))
                slopes = torch.rand(kv_heads, heads // kv_heads) if alibi else None
                for filling in (0, FILLING):  # a program for each history, and several
                    kernels.FILLING = filling
                    step.run(kernels.paged_attention, window, softcap, slopes)


if __name__ == "__main__":
    main()
