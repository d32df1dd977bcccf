"""Adapters as the torch engine reads them, and which it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.adapters.adapter_files import WEIGHTS_FILE, describe_adapter
from penstock.adapters.errors import AdapterError
from penstock.engine.lora.adapter_table import LoadedAdapter
from penstock.engine.torch.lora.adapter_reader import AdapterReader
from penstock.engine.torch.lora.lora_layers import AdapterWeights
from penstock.wire.messages import Adapter, LoraInfo
from tests.adapters import MODULES, PREFIX, make_adapter, safetensors

LAYER = "model.layers.0.self_attn.q_proj"
INFO = LoraInfo(2, 16, 4, MODULES)
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read(path: Path, dtype: str = "float32", info: LoraInfo = INFO) -> AdapterWeights:
    reader = AdapterReader(info, TORCH[dtype], pinned=False, on_remove=lambda loaded: None)
    return reader.read_weights(Adapter("a", str(path), digest=describe_adapter(str(path)).digest))


def one_layer(path: Path, a: Any, b: Any, dtype: str = "F32", **config: Any) -> Path:
    """An adapter of one layer with these matrices, float32 or as raw bits of two bytes."""
    made = make_adapter(path, {LAYER: MODULES[LAYER]}, 1, **config)
    kind = "<f4" if dtype == "F32" else "<u2"
    tensors = {
        f"{PREFIX}{LAYER}.lora_{name}.weight": (dtype, (shape), np.full(shape, value, kind).tobytes())
        for name, shape, value in (("A", (1, 16), a), ("B", (16, 1), b))
    }
    (made / WEIGHTS_FILE).write_bytes(safetensors(tensors))
    return made


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("stored", ["F32", "BF16", "F16"])
def test_weights_are_in_the_dtype_of_the_model_with_their_scaling(
    tmp_path: Path, stored: str, dtype: str
) -> None:
    path = make_adapter(tmp_path / "a", ranks={LAYER: 3}, dtype=stored, lora_alpha=24)
    weights = read(path, dtype)
    reference = read(make_adapter(tmp_path / "b", ranks={LAYER: 3}, lora_alpha=8))
    assert weights.rank == 8
    assert weights.layers.keys() == MODULES.keys()
    for name, (outputs, inputs) in MODULES.items():
        rank = 3 if name == LAYER else 8
        for tensor, other, scale in zip(weights.layers[name], reference.layers[name], (1, 3), strict=True):
            assert tensor.dtype == TORCH[dtype]
            assert tensor.is_contiguous()
            torch.testing.assert_close(tensor.float(), scale * other, rtol=0.02, atol=1e-3)
        assert [tuple(tensor.shape) for tensor in weights.layers[name]] == [(rank, inputs), (rank, outputs)]


def test_weights_outlive_the_bytes_of_the_file(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a")
    before = read(path)
    size = (path / WEIGHTS_FILE).stat().st_size
    (path / WEIGHTS_FILE).write_bytes(bytes(size))
    a, _ = before.layers[LAYER]
    assert a.untyped_storage().nbytes() == a.numel() * 4
    assert a.abs().max() > 0


@pytest.mark.parametrize(
    ("a", "b", "stored", "dtype", "message"),
    [
        (np.nan, 1, "F32", "float32", rf"{LAYER}.lora_A: a value is NaN or infinite"),
        (1, np.inf, "F32", "float32", rf"{LAYER}.lora_B: a value is NaN or infinite"),
        (0x7F80, 0, "BF16", "float32", rf"{LAYER}.lora_A: a value is NaN or infinite"),
        (0, 0xFC00, "F16", "float32", rf"{LAYER}.lora_B: a value is NaN or infinite"),
        (1e5, 1, "F32", "float16", rf"{LAYER}.lora_A: a value is beyond float16"),
        (1, 4e4, "F32", "float16", rf"{LAYER}.lora_B multiplied by its scaling 2: a value is beyond float16"),
        (
            1,
            3e38,
            "F32",
            "float32",
            rf"{LAYER}.lora_B multiplied by its scaling 2: a value is beyond float32",
        ),
    ],
)
def test_values_that_are_not_finite_are_refused_by_layer(
    tmp_path: Path, a: float, b: float, stored: str, dtype: str, message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        read(one_layer(tmp_path / "a", a, b, stored), dtype)


def test_large_finite_values_are_taken(tmp_path: Path) -> None:
    weights = read(one_layer(tmp_path / "a", 1e38, 1e38))
    assert weights.layers[LAYER][1].isfinite().all()


def test_what_does_not_suit_the_model_is_refused(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a")
    with pytest.raises(AdapterError, match="its rank is 8; --max-lora-rank is 4"):
        read(path, info=LoraInfo(2, 4, 4, MODULES))
    with pytest.raises(AdapterError, match=r"the model has no such layer"):
        read(path, info=LoraInfo(2, 16, 4, {LAYER: MODULES[LAYER]}))


@pytest.mark.parametrize("layer", ["lm_head", "model.embed_tokens"])
def test_layers_outside_the_decoder_are_refused_by_name(tmp_path: Path, layer: str) -> None:
    path = make_adapter(tmp_path / "a", {layer: (320, 16)})
    with pytest.raises(AdapterError, match=layer):
        read(path)


def test_other_files_than_those_of_the_digest_are_refused(tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a")
    reader = AdapterReader(INFO, torch.float32, pinned=False, on_remove=lambda loaded: None)
    with pytest.raises(AdapterError, match="its files have changed"):
        reader.read_weights(Adapter("a", str(path), digest="0" * 64))


def test_a_removed_adapter_gives_its_memory_back(tmp_path: Path) -> None:
    removed = []
    reader = AdapterReader(INFO, torch.float32, pinned=False, on_remove=removed.append)
    loaded = LoadedAdapter(Adapter("a", "/a"), 1, read(make_adapter(tmp_path / "a")))
    reader.add_adapter(loaded)
    reader.remove(loaded)
    assert loaded.weights is None
    assert removed == [loaded]
