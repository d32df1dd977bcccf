"""``pytest --device``: where there is no GPU, no test passes as if there were one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("processes", ["0", "2"])
def test_without_a_gpu_one_line_says_so(processes: str) -> None:
    command = [sys.executable, "-m", "pytest", "--device", "cuda", "-n", processes, "tests/engine/torch"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert run.stdout.strip() == ""
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith(f"ERROR: --device cuda: PyTorch {torch.__version__} ")
