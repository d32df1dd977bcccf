"""Copies of adapters' files that nobody else changes, from which vLLM loads.

vLLM maps an adapter's file, and may read it again at any later step: after a dummy step of a group it has
forgotten all adapters. The files that a user names may have changed by then, or be cut off, by which a mapped
file ends the process. So vLLM gets a copy of what was read and checked, for as long as the adapter is loaded.

A copy holds no more than what an adapter is made of: the pairs of matrices by layer, and one scaling. Where
PEFT's configuration gives layers different scalings, these become part of the weights. vLLM would match
every layer against the regular expressions of the configuration, between two steps and for as long as that
takes.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.adapters.adapter_files import PREFIX, WEIGHTS_FILE, LoraPair, ReadAdapter
from penstock.adapters.errors import AdapterError
from penstock.adapters.peft_config import CONFIG_FILE
from penstock.adapters.safetensors_header import ITEM_BYTES, LENGTH_BYTES, TensorView
from penstock.engine.attach.adapter_weights import values

WIDE = "F32"
"""Dtype of weights that were multiplied."""


class AdapterCopy:
    """One copy, whose directory is removed with this object, and when the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.request: Any = None
        """What names the adapter to vLLM; None: vLLM has not loaded it."""
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def remove(self) -> None:
        """Remove the directory."""
        self._finalizer()


class AdapterCopies:
    """The copies of one engine."""

    def __init__(self, parent: str, rank: int) -> None:
        """``parent``: an existing directory. What an earlier process of the engine with this ``rank`` has
        left there is removed."""
        self._parent = parent
        self._prefix = f"adapters-{rank}-"
        for left in Path(parent).glob(f"{self._prefix}*"):
            shutil.rmtree(left, ignore_errors=True)

    def write(self, adapter: ReadAdapter) -> AdapterCopy:
        """Copy an adapter. Raises AdapterError when it cannot be written."""
        try:
            copy = AdapterCopy(Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._parent)))
            _write(Path(copy.path), adapter)
        except OSError as error:
            raise AdapterError(f"its copy cannot be written to {self._parent}: {error.strerror}") from None
        return copy


def _write(directory: Path, adapter: ReadAdapter) -> None:
    pairs = adapter.files.modules
    scalings = {pair.scaling for pair in pairs.values()}
    common = scalings.pop() if len(scalings) == 1 else 1.0
    rank = adapter.files.rank
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": common * rank,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in pairs}),
        "bias": "none",
    }
    (directory / CONFIG_FILE).write_bytes(msgspec.json.encode(config))
    header = msgspec.json.encode(_header(pairs, common))
    header += b" " * (-len(header) % LENGTH_BYTES)
    data = memoryview(adapter.data)
    with (directory / WEIGHTS_FILE).open("wb") as file:
        file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        for pair in pairs.values():
            file.write(data[pair.a.start : pair.a.end])
            if pair.scaling == common:
                file.write(data[pair.b.start : pair.b.end])
            else:
                file.write(_scaled(adapter.data, pair.b, pair.scaling))


def _header(pairs: Mapping[str, LoraPair], common: float) -> dict[str, Any]:
    """The header of a safetensors file whose tensors lie in the order of ``pairs``, A before B. A B whose
    scaling is not the ``common`` one is F32."""
    header: dict[str, Any] = {}
    end = 0
    for layer, pair in pairs.items():
        for matrix, view in (("A", pair.a), ("B", pair.b)):
            widened = matrix == "B" and pair.scaling != common
            dtype = WIDE if widened else view.dtype
            start, end = end, end + math.prod(view.shape) * ITEM_BYTES[dtype]
            header[f"{PREFIX}{layer}.lora_{matrix}.weight"] = {
                "dtype": dtype,
                "shape": view.shape,
                "data_offsets": (start, end),
            }
    return header


def _scaled(data: bytearray, view: TensorView, scaling: float) -> bytes:
    """The bytes of a tensor, multiplied, in F32."""
    return (values(data, view) * np.float32(scaling)).astype("<f4").tobytes()
