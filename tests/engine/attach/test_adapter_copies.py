"""Copies of adapters. Needs no vLLM."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import numpy as np
import pytest

from penstock.adapters.adapter_files import LoraPair, ReadAdapter, describe_adapter, read_adapter
from penstock.adapters.errors import AdapterError
from penstock.engine.attach.adapter_copies import AdapterCopies
from tests.adapters import make_adapter


def read(path: str | Path) -> ReadAdapter:
    return read_adapter(str(path), describe_adapter(str(path)).digest)


def product(adapter: ReadAdapter, pair: LoraPair) -> np.ndarray:
    """What a layer gains, in float64."""
    matrices = []
    for view in (pair.b, pair.a):
        part = bytes(adapter.data[view.start : view.end])
        if view.dtype == "BF16":
            values = (np.frombuffer(part, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(part, {"F32": "<f4", "F16": "<f2"}[view.dtype])
        matrices.append(values.reshape(view.shape).astype(np.float64))
    return pair.scaling * (matrices[0] @ matrices[1])


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_copy_of_one_scaling_has_the_same_bytes(tmp_path: Path, dtype: str) -> None:
    given = read(make_adapter(tmp_path / "given", dtype=dtype, lora_alpha=3))
    copy = AdapterCopies(str(tmp_path), 0).write(given)
    found = read(copy.path)
    assert found.data == given.data
    assert found.files.modules == given.files.modules


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_scalings_that_differ_become_weights(tmp_path: Path, dtype: str) -> None:
    patterns = {"q_proj": 5.0, "down_proj": 8.0}
    ranks = {"model.layers.0.self_attn.v_proj": 3}
    path = make_adapter(tmp_path / "given", dtype=dtype, ranks=ranks, alpha_pattern=patterns)
    given = read(path)
    kept = AdapterCopies(str(tmp_path), 0).write(given)
    copy = Path(kept.path)
    config = json.loads((copy / "adapter_config.json").read_text())
    assert set(config) == {"peft_type", "r", "lora_alpha", "target_modules", "bias"}
    assert config["lora_alpha"] / config["r"] == 1
    # vLLM takes the ranks from the weights; what reads adapters here wants to be told.
    config["rank_pattern"] = {layer: pair.rank for layer, pair in given.files.modules.items()}
    config["alpha_pattern"] = config["rank_pattern"]
    (copy / "adapter_config.json").write_text(json.dumps(config))
    found = read(copy)
    for layer, pair in given.files.modules.items():
        copied = found.files.modules[layer]
        assert copied.scaling == 1
        assert (copied.a.dtype, copied.b.dtype) == (dtype, dtype if pair.scaling == 1 else "F32")
        assert np.allclose(product(found, copied), product(given, pair), rtol=1e-6, atol=1e-9)
    assert {pair.scaling for pair in given.files.modules.values()} > {1.0}


def test_a_copy_is_private_and_ends_with_its_object(tmp_path: Path) -> None:
    parent = tmp_path / "run"
    parent.mkdir()
    given = read(make_adapter(tmp_path / "given"))
    copies = AdapterCopies(str(parent), 0)
    copy, other = copies.write(given), copies.write(given)
    assert Path(copy.path).stat().st_mode & 0o077 == 0
    copy.remove()
    assert [str(left) for left in parent.iterdir()] == [other.path]
    del other
    gc.collect()
    assert list(parent.iterdir()) == []


def test_copies_that_a_killed_engine_has_left_are_removed(tmp_path: Path) -> None:
    for rank in (1, 10):
        (tmp_path / f"adapters-{rank}-left").mkdir()
    AdapterCopies(str(tmp_path), 1)
    assert [left.name for left in tmp_path.iterdir()] == ["adapters-10-left"]


def test_a_copy_that_cannot_be_written_is_an_error_of_the_adapter(tmp_path: Path) -> None:
    given = read(make_adapter(tmp_path / "given"))
    copies = AdapterCopies(str(tmp_path / "gone"), 0)
    with pytest.raises(AdapterError, match=r"its copy cannot be written to .*/gone: No such file"):
        copies.write(given)
