"""Steps on a CUDA device without values: nothing in them makes the host wait for the device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_loader import read_shape
from penstock.engine.torch.supported_models import WITH_EXPERTS
from tests.engine.torch.fake_cuda import CUDA, FakeCuda, fake_config, fake_cuda, make_real_model
from tests.engine.torch.harness import FAMILIES
from tests.engine.torch.test_host_reads import ROPES

__all__ = ["fake_cuda"]

BLOCK_SIZE = 16


def mixed_batch() -> Batch:
    """Two decodes and two chunks of prompts."""
    return Batch(
        slots=np.arange(4),
        start=np.array([3, 9, 0, 4], np.int32),
        count=np.array([1, 1, 5, 7], np.int32),
        singles=2,
        decodes=2,
        samples=np.arange(4),
        generations=np.zeros(4, np.int64),
    )


@torch.inference_mode()
def run_model(directory: Path, fake_cuda: FakeCuda, dtype: torch.dtype) -> None:
    shape = read_shape(str(directory))
    model = PagedModel(str(directory), fake_config(), shape, dtype=dtype, device=CUDA)
    model.make_cache(40, BLOCK_SIZE)
    batch, blocks = mixed_batch(), BlockTables(4, 39, BLOCK_SIZE, 64)
    blocks.allocate(batch.slots, blocks.missing(batch.slots, batch.start + batch.count))
    tokens = torch.zeros(14, dtype=torch.int64, device=CUDA)
    with fake_cuda.step():
        hidden = model.run(batch, tokens, blocks, np.arange(4))
    assert hidden.device == CUDA
    assert hidden.dtype == dtype


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_forward_pass_waits(kind: str, tmp_path: Path, fake_cuda: FakeCuda) -> None:
    make_real_model(kind, tmp_path)
    run_model(tmp_path, fake_cuda, torch.bfloat16)


@pytest.mark.parametrize("name", ROPES)
def test_no_rotary_embedding_waits(name: str, tmp_path: Path, fake_cuda: FakeCuda) -> None:
    kind, changes = ROPES[name]
    make_real_model(kind, tmp_path, **changes)
    run_model(tmp_path, fake_cuda, torch.bfloat16)


@pytest.mark.parametrize("kind", sorted(WITH_EXPERTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("capability", [(8, 0), (12, 0)])
def test_no_experts_wait(
    kind: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    tmp_path: Path,
    fake_cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    make_real_model(kind, tmp_path)
    run_model(tmp_path, fake_cuda, dtype)
