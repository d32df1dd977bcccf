"""Adapters of the synthetic engine: it has no model, so an adapter is its digest, which tokens depend on."""

from __future__ import annotations

import zlib

from penstock.adapters.adapter_files import AdapterFiles, read_adapter
from penstock.config.serve import ServeConfig
from penstock.engine.lora.adapter_table import LoadedAdapter
from penstock.wire.messages import Adapter, LoraInfo


def lora_info(config: ServeConfig) -> LoraInfo | None:
    """What adapters the engine can load: those of any layers. None: it runs none."""
    if not config.enable_lora:
        return None
    return LoraInfo(config.max_loras, config.max_lora_rank, config.max_cpu_loras)


def seed_of(adapter: LoadedAdapter | None) -> int:
    """What a stream's seed is mixed with, by XOR: 32 bits."""
    return 0 if adapter is None else zlib.crc32(adapter.adapter.digest.encode())


class SyntheticAdapterLoader:
    """Reads an adapter's files, as an engine with a model would, and keeps none of their weights."""

    def __init__(self, info: LoraInfo) -> None:
        self._info = info

    def read_weights(self, adapter: Adapter) -> AdapterFiles:
        """See :class:`penstock.engine.lora.adapter_table.AdapterLoader`. Raises AdapterError."""
        return read_adapter(adapter.path, adapter.digest, self._info).files

    def add_adapter(self, loaded: LoadedAdapter) -> None:
        """There is nothing to make ready."""

    def remove(self, loaded: LoadedAdapter) -> None:
        """There is no memory to give back."""
