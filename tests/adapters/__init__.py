"""Makes LoRA adapters in PEFT's format, without PEFT or torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

PREFIX = "base_model.model."

MODULES = {
    "model.layers.0.self_attn.q_proj": (16, 16),
    "model.layers.0.self_attn.v_proj": (8, 16),
    "model.layers.1.mlp.down_proj": (16, 32),
}
"""Output and input features of some layers, for tests that need no model."""


def make_adapter(
    directory: str | Path,
    modules: Mapping[str, tuple[int, int]] = MODULES,
    rank: int = 8,
    seed: int = 0,
    *,
    ranks: Mapping[str, int] | None = None,
    dtype: str = "F32",
    scale: float = 0.1,
    base_model: str | None = "base",
    **config: Any,
) -> Path:
    """Write an adapter into ``directory``, which is made, and return its resolved path.

    ``modules``: output and input features by a layer's path in the model. ``ranks``: ranks of layers that
    differ from ``rank``, also written as ``rank_pattern``. ``dtype``: F32, F16 or BF16. ``scale``: standard
    deviation of all weights. ``config``: further fields of ``adapter_config.json``.
    """
    generator = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name, (outputs, inputs) in modules.items():
        own = (ranks or {}).get(name, rank)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = generator.normal(0, scale, (own, inputs))
        tensors[f"{PREFIX}{name}.lora_B.weight"] = generator.normal(0, scale, (outputs, own))
    fields = {
        "peft_type": "LORA",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
        "rank_pattern": dict(ranks or {}),
        **config,
    }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    (directory / "adapter_model.safetensors").write_bytes(
        safetensors({name: (dtype, array.shape, _encode(array, dtype)) for name, array in tensors.items()})
    )
    return directory.resolve()


def safetensors(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A safetensors file. ``tensors``: dtype, shape and bytes by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    return pack(json.dumps(header).encode(), b"".join(data for _, _, data in tensors.values()))


def pack(header: bytes, data: bytes = b"") -> bytes:
    """A safetensors file of any header, which is padded to 8 bytes."""
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def _encode(array: np.ndarray[Any, Any], dtype: str) -> bytes:
    if dtype == "F16":
        return array.astype("<f2").tobytes()
    single = array.astype("<f4")
    if dtype == "F32":
        return single.tobytes()
    return (single.view("<u4") >> 16).astype("<u2").tobytes()  # BF16, rounded towards zero
