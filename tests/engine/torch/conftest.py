"""These tests need the torch extra. ``--device cuda`` runs them on a GPU, with kernels that are compiled."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    os.environ["TEST_DEVICE"] = device  # read by the harness, also in child processes
    if device == "cpu":
        return
    import torch

    from penstock.engine.torch.device import no_cuda

    if not torch.cuda.is_available():
        raise pytest.UsageError(f"--device {device}: {no_cuda()}")


@pytest.fixture(scope="session")
def device() -> torch.device:
    from tests.engine.torch.harness import DEVICE

    return DEVICE


@pytest.fixture(scope="session", autouse=True)
def interpreted_kernels(device: torch.device) -> None:
    if device.type == "cpu":
        from tests.engine.torch.interpreter import multiply_bfloat16, read_scalars

        read_scalars()
        multiply_bfloat16()
