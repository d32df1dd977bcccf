"""Shapes of the base model's layers, as far as its checkpoint tells.

vLLM takes an adapter of a smaller model: it writes the matrices into the first rows and columns of its
buffers, and the rest stays zero. It ignores layers that the model does not have.
"""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path

import msgspec

from penstock.adapters.adapter_files import AdapterFiles
from penstock.adapters.errors import AdapterError
from penstock.adapters.safetensors_header import LENGTH_BYTES

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Dtypes whose tensors have one element per weight. Others may hold several weights in one element."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]


_NUMBER = re.compile(r"\.\d+(?=\.)")
"""The number of a block or an expert in a layer's path."""


class BaseShapes:
    """The shapes of the weights in a model's directory, which its operator trusts."""

    def __init__(self, model_dir: str) -> None:
        self._directory = Path(model_dir)

    def check_shapes(self, files: AdapterFiles) -> None:
        """Raises AdapterError if a layer of the adapter has other features than the model's, or a number that
        no layer of the model has. Layers of which the checkpoint does not tell are left to vLLM."""
        layers, alike = self._layers
        for layer, pair in files.modules.items():
            if layer not in layers and _NUMBER.sub(".#", layer) in alike:
                raise AdapterError(f"layer {layer}: the model has such layers, but none of this number")
            features = layers.get(layer)
            given = pair.b.shape[0], pair.a.shape[1]
            if features is not None and given not in (features, features[::-1]):
                raise AdapterError(
                    f"layer {layer}: its lora_B and lora_A have {given[0]} output and {given[1]} input "
                    f"features; the model's layer has {features[0]} and {features[1]}"
                )

    @cached_property
    def _layers(self) -> tuple[dict[str, tuple[int, int] | None], set[str]]:
        """Output and input features by layer, None where they cannot be told, and the layers' paths without
        numbers. Some architectures store weights the other way round."""
        layers: dict[str, tuple[int, int] | None] = {}
        for path in sorted(self._directory.glob("*.safetensors")):
            for name, entry in _entries(path).items():
                layer, _, last = name.rpartition(".")
                plain = last == "weight" and len(entry.shape) == 2 and entry.dtype in PLAIN_DTYPES
                features = (entry.shape[0], entry.shape[1]) if plain else layers.get(layer)
                layers[layer] = features
        return layers, {_NUMBER.sub(".#", layer) for layer in layers}


def _entries(path: Path) -> dict[str, _Entry]:
    """The header of a safetensors file; empty for what is none, such as a pointer to a file that was not
    downloaded."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header = file.read(length) if length <= path.stat().st_size else b""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        return {name: msgspec.json.decode(raw, type=_Entry) for name, raw in entries.items()}
    except msgspec.MsgspecError:
        return {}
