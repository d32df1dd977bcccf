"""Triton compiles the kernels for GPUs that are not there, within their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHAPES = [
    ["bfloat16", 32, 8, 128, None, None],
    ["float16", 12, 12, 64, None, None],
    ["bfloat16", 28, 4, 80, 4096, None],
    ["bfloat16", 16, 8, 256, 4096, 50.0],
    ["bfloat16", 48, 1, 128, None, None],
    ["float32", 16, 8, 256, None, None],
]
"""dtype, query heads, KV heads, head size, window, softcap."""
SHARED = 99 << 10
"""Bytes of shared memory that a program may have on GPUs of compute capability 8.6 and 8.9; others have more,
from 8.0 on."""


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability: int) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.torch.compile_kernels", str(capability)],
        input=json.dumps(SHAPES),
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    compiled = [json.loads(line) for line in child.stdout.splitlines()]
    assert {each["kernel"] for each in compiled} == {"_write", "_attend", "_add_up"}
    variants = {(each["kernel"], each["shape"], each["programs"]) for each in compiled}
    assert len(variants) == len(SHAPES) * (
        3 + 2
    )  # histories are shared by programs where there are few tiles
    assert all(each["shared"] <= SHARED for each in compiled)
    products = {each["product"] for each in compiled if each["kernel"] == "_attend" and each["tiled"]}
    assert ("wgmma" in products) == (capability == 90)  # prompts are computed by Hopper's own instructions
