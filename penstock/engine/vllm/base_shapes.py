"""Shapes of the base model's layers, as far as its checkpoint tells.

vLLM takes an adapter of a smaller model: it writes the matrices into the first rows and columns of its
buffers, and the rest stays zero.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec

from penstock.engine.lora.adapter_files import AdapterFiles
from penstock.engine.lora.errors import AdapterError
from penstock.engine.lora.safetensors_header import LENGTH_BYTES

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Dtypes whose tensors have one element per weight. Others may hold several weights in one element."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]


class BaseShapes:
    """The shapes of the weights in a model's directory, which its operator trusts."""

    def __init__(self, model_dir: str) -> None:
        self._directory = Path(model_dir)

    def check(self, files: AdapterFiles) -> None:
        """Raises AdapterError if a layer of the adapter has the name of a layer of other features. Layers of
        which the checkpoint does not tell are left to vLLM."""
        for layer, pair in files.modules.items():
            features = self._by_layer.get(layer)
            given = pair.b.shape[0], pair.a.shape[1]
            if features is not None and given not in (features, features[::-1]):
                raise AdapterError(
                    f"layer {layer}: its lora_B and lora_A have {given[0]} output and {given[1]} input "
                    f"features; the model's layer has {features[0]} and {features[1]}"
                )

    @cached_property
    def _by_layer(self) -> dict[str, tuple[int, int]]:
        """Output and input features by layer; some architectures store weights the other way round."""
        found = {}
        for path in sorted(self._directory.glob("*.safetensors")):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(LENGTH_BYTES), "little")
                entries = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            entries.pop("__metadata__", None)
            for name, raw in entries.items():
                layer, _, last = name.rpartition(".")
                entry = msgspec.json.decode(raw, type=_Entry)
                if last == "weight" and len(entry.shape) == 2 and entry.dtype in PLAIN_DTYPES:
                    found[layer] = entry.shape[0], entry.shape[1]
        return found
