"""How the torch engine loads adapters: from files to tensors in host memory, in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.adapters.adapter_files import ReadAdapter, read_adapter
from penstock.adapters.errors import AdapterError
from penstock.adapters.safetensors_header import TensorView
from penstock.engine.lora.adapter_table import LoadedAdapter
from penstock.engine.torch.lora.lora_layers import AdapterWeights
from penstock.wire.messages import Adapter, LoraInfo

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes by the names of safetensors."""


class AdapterReader:
    """The :class:`penstock.engine.lora.adapter_table.AdapterLoader` of the torch engine."""

    def __init__(
        self,
        info: LoraInfo,
        dtype: torch.dtype,
        *,
        pinned: bool,
        on_remove: Callable[[LoadedAdapter], None],
    ) -> None:
        """``dtype``: the model's. ``pinned``: weights are kept in memory that a device can copy from."""
        self._info = info
        self._dtype = dtype
        self._pinned = pinned
        self._on_remove = on_remove

    def read_weights(self, adapter: Adapter) -> AdapterWeights:
        """Read and check the files. Raises AdapterError."""
        return self.convert(read_adapter(adapter.path, adapter.digest, self._info))

    def convert(self, found: ReadAdapter) -> AdapterWeights:
        """The weights of checked files, as copies. Raises AdapterError for a layer whose values are not
        finite."""
        layers = {}
        for path, pair in found.files.modules.items():
            a, b = (
                _tensor(found, pair.a, f"{path}.lora_A"),
                _tensor(found, pair.b, f"{path}.lora_B"),
            )
            scaled = b.to(torch.promote_types(b.dtype, torch.float32)) * pair.scaling
            layers[path] = (
                self._kept(a, f"{path}.lora_A"),
                self._kept(scaled.T, f"{path}.lora_B multiplied by its scaling {pair.scaling:g}"),
            )
        return AdapterWeights(max((len(a) for a, _ in layers.values()), default=0), layers)

    def _kept(self, tensor: Tensor, name: str) -> Tensor:
        """A contiguous copy in the model's dtype."""
        kept = torch.empty(tensor.shape, dtype=self._dtype, pin_memory=self._pinned).copy_(tensor)
        if not kept.isfinite().all():
            dtype = str(self._dtype).removeprefix("torch.")
            raise AdapterError(f"{name}: a value is beyond {dtype}, the dtype of the model")
        return kept

    def add_adapter(self, loaded: LoadedAdapter) -> None:
        """Nothing: weights are brought to the device for the first stream that runs."""

    def remove(self, loaded: LoadedAdapter) -> None:
        loaded.weights = None
        self._on_remove(loaded)


def _tensor(found: ReadAdapter, view: TensorView, name: str) -> Tensor:
    """A view of the file's bytes."""
    dtype = DTYPES[view.dtype]
    raw = torch.frombuffer(found.data, dtype=torch.uint8, count=view.end - view.start, offset=view.start)
    if view.start % dtype.itemsize:
        raw = raw.clone()  # a header may have any length
    tensor = raw.view(dtype).view(view.shape)
    if not tensor.isfinite().all():
        raise AdapterError(f"{name}: a value is NaN or infinite; all must be finite")
    return tensor
