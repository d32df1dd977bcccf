"""Loads LoRA adapters into vLLM."""

from __future__ import annotations

from typing import Any

from penstock.adapters.adapter_files import read_adapter
from penstock.adapters.errors import AdapterError
from penstock.engine.attach.adapter_copies import AdapterCopies, AdapterCopy
from penstock.engine.attach.adapter_weights import check_weights
from penstock.engine.attach.attached_core import AttachedCore
from penstock.engine.attach.base_shapes import BaseShapes
from penstock.engine.lora.adapter_table import LoadedAdapter
from penstock.wire.messages import Adapter, LoraInfo


class AttachedAdapterLoader:
    """Reads adapters, keeps a copy of each while it is loaded, and has vLLM load the copy."""

    def __init__(self, core: AttachedCore, info: LoraInfo, copies: AdapterCopies, shapes: BaseShapes) -> None:
        self._core = core
        self._info = info
        self._copies = copies
        self._shapes = shapes
        self._loaded: dict[int, LoadedAdapter] = {}
        """Loaded adapters by number."""

    def read_weights(self, adapter: Adapter) -> AdapterCopy:
        """See :class:`penstock.engine.lora.adapter_table.AdapterLoader`."""
        read = read_adapter(adapter.path, adapter.digest, self._info)
        self._shapes.check_shapes(read.files)
        check_weights(read, self._core.largest_weight)
        return self._copies.write(read)

    def add_adapter(self, loaded: LoadedAdapter) -> None:
        """See :class:`penstock.engine.lora.adapter_table.AdapterLoader`. An engine that sleeps refuses: the
        memory that vLLM writes to is not there."""
        try:
            if self._core.is_asleep:
                raise AdapterError("the engine sleeps; wake it up first")
            self._load(loaded)
        except AdapterError:
            loaded.weights.remove()
            raise
        self._loaded[loaded.number] = loaded

    def remove(self, loaded: LoadedAdapter) -> None:
        """See :class:`penstock.engine.lora.adapter_table.AdapterLoader`."""
        del self._loaded[loaded.number]
        self._core.remove_adapter(loaded.number)
        loaded.weights.remove()

    def restore(self) -> None:
        """Load all adapters again: vLLM has lost them. Raises AdapterError."""
        for loaded in self._loaded.values():
            self._core.remove_adapter(loaded.number)
            self._load(loaded)

    def _load(self, loaded: LoadedAdapter) -> None:
        copy: AdapterCopy = loaded.weights
        try:
            copy.request = self._core.add_adapter(loaded.adapter.name, loaded.number, copy.path)
        except AdapterError as error:
            raise AdapterError(str(error).replace(copy.path, loaded.adapter.path)) from None


def request_of(loaded: LoadedAdapter | None) -> Any:
    """What names an adapter to vLLM in a request; None: the base model."""
    return None if loaded is None else loaded.weights.request
