"""The Triton kernels compile for GPUs, which their interpreter says nothing about, and fit them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
SHARED = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes of shared memory that a program may have, by compute capability: A100; L4 and GeForce 40; H100."""


def compiled(directory: Path, *arguments: str) -> list[dict[str, Any]]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["TRITON_CACHE_DIR"] = str(directory)
    command = [sys.executable, "-m", "tests.engine.torch.compilation", *arguments]
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize(
    ("capability", "dtype", "sizes"),
    [
        (90, "bfloat16", "128"),
        pytest.param(89, "float16", "256", marks=pytest.mark.slow),
        pytest.param(80, "float32", "96", marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_and_fit(tmp_path: Path, capability: int, dtype: str, sizes: str) -> None:
    found = compiled(tmp_path, f"--capability={capability}", f"--dtype={dtype}", f"--sizes={sizes}")
    assert {kernel["kernel"] for kernel in found} == {"_write", "_attend", "_add_up"}
    assert {bool(kernel["window"]) for kernel in found} == {True, False}
    attending = [kernel for kernel in found if kernel["kernel"] == "_attend"]
    assert {bool(kernel["splits"]) for kernel in attending} == {True, False}
    assert max(kernel["shared"] for kernel in found) <= SHARED[capability]
    if (capability, dtype) == (90, "bfloat16"):
        assert {kernel["spilled"] for kernel in found} == {0}
        assert {kernel["product"] for kernel in attending if kernel["tokens"] > 1} == {"wgmma"}
