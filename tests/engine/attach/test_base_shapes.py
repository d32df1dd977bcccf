"""What a checkpoint tells of the layers that an adapter changes. Needs no vLLM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.adapters.adapter_files import describe_adapter
from penstock.adapters.errors import AdapterError
from penstock.engine.attach.base_shapes import BaseShapes
from tests.adapters import MODULES, make_adapter, pack, safetensors


def checkpoint(directory: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> BaseShapes:
    size = {"F32": 4, "U8": 1}[dtype]
    tensors = {name: (dtype, shape, bytes(size * int(np.prod(shape)))) for name, shape in shapes.items()}
    (directory / "model.safetensors").write_bytes(safetensors(tensors))
    return BaseShapes(str(directory))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((16, 16), "F32"),
        ((16, 8), "U8"),  # two weights per element
        ((16,), "F32"),
    ],
)
def test_layers_that_fit_or_cannot_be_compared_pass(
    tmp_path: Path, shape: tuple[int, ...], dtype: str
) -> None:
    files = describe_adapter(str(make_adapter(tmp_path / "adapter")))
    checkpoint(tmp_path, {"model.layers.0.self_attn.q_proj.weight": shape}, dtype).check_shapes(files)
    BaseShapes(str(tmp_path / "nothing")).check_shapes(files)
    assert "model.layers.0.self_attn.q_proj" in files.modules


def test_a_layer_of_other_features_is_refused(tmp_path: Path) -> None:
    files = describe_adapter(str(make_adapter(tmp_path / "adapter")))
    shapes = {f"{layer}.weight": shape for layer, shape in MODULES.items()}
    checkpoint(tmp_path, {name: shape[::-1] for name, shape in shapes.items()}).check_shapes(files)
    wider = shapes | {"model.layers.0.self_attn.v_proj.weight": (8, 32)}
    with pytest.raises(AdapterError, match=r"v_proj: its lora_B and lora_A have 8 output and 16 input"):
        checkpoint(tmp_path, wider).check_shapes(files)


def test_a_layer_of_a_deeper_model_is_refused(tmp_path: Path) -> None:
    files = describe_adapter(str(make_adapter(tmp_path / "adapter")))
    shapes = {"model.layers.0.mlp.down_proj.weight": (16, 32), "model.layers.0.mlp.up_proj.weight": (32, 16)}
    with pytest.raises(AdapterError, match=r"layer model.layers.1.mlp.down_proj: the model has such layers"):
        checkpoint(tmp_path, shapes).check_shapes(files)
    checkpoint(tmp_path, shapes | {"model.layers.1.mlp.down_proj.qweight": (4, 4)}).check_shapes(files)


def test_files_that_are_no_checkpoint_tell_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(pack(b"{}"))
    (tmp_path / "pointer.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    (tmp_path / "list.safetensors").write_bytes(pack(b"[]"))
    (tmp_path / "empty.safetensors").touch()
    files = describe_adapter(str(make_adapter(tmp_path / "adapter")))
    BaseShapes(str(tmp_path)).check_shapes(files)
    assert files.rank == 8
