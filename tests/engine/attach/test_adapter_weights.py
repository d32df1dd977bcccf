"""Weights that vLLM cannot run with. Needs no vLLM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.adapters.adapter_files import describe_adapter, read_adapter
from penstock.adapters.errors import AdapterError
from penstock.adapters.safetensors_header import ITEM_BYTES
from penstock.engine.attach.adapter_weights import check_weights
from tests.adapters import make_adapter


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    ("value", "scaling", "largest"),
    [(np.nan, 1.0, 1e38), (np.inf, 1.0, 1e38), (-np.inf, 1.0, 1e38), (-1.5, 1.0, 1.25), (-1.5, -4.0, 5.0)],
)
def test_weights_that_become_no_numbers_are_refused(
    tmp_path: Path, dtype: str, value: float, scaling: float, largest: float
) -> None:
    path = make_adapter(tmp_path / "given", dtype=dtype, lora_alpha=8 * scaling, scale=0.01)
    given = read_adapter(str(path), describe_adapter(str(path)).digest)
    check_weights(given, largest)
    view = given.files.modules["model.layers.1.mlp.down_proj"].b
    size = ITEM_BYTES[dtype]
    single = np.array([value], "<f4")
    encoded = single.view("<u4") >> 16 if dtype == "BF16" else single
    kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[dtype]
    given.data[view.end - size : view.end] = encoded.astype(kind).tobytes()
    with pytest.raises(AdapterError, match=r"layer model.layers.1.mlp.down_proj: lora_B has the value "):
        check_weights(given, largest)


@pytest.mark.parametrize(("scale", "scaling", "matrix"), [(1e30, 1.0, "A"), (500.0, 100.0, "B")])
def test_weights_that_let_hidden_states_overflow_are_refused(
    tmp_path: Path, scale: float, scaling: float, matrix: str
) -> None:
    path = make_adapter(tmp_path / "given", lora_alpha=8 * scaling, scale=scale)
    given = read_adapter(str(path), describe_adapter(str(path)).digest)
    with pytest.raises(AdapterError, match=f"lora_{matrix} has the norm .*; at most 10000 is run"):
        check_weights(given, 3e38)
