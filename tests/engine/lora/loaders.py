"""An adapter loader for tests: it reads nothing, and records what it is asked for."""

from __future__ import annotations

from penstock.adapters.errors import AdapterError
from penstock.engine.lora.adapter_table import LoadedAdapter
from penstock.wire.messages import Adapter


class FakeLoader:
    """Weights are ``weights of NAME DIGEST``."""

    def __init__(self) -> None:
        self.unreadable: dict[str, Exception] = {}
        """What reading raises, by path."""
        self.refused: set[str] = set()
        """Names of adapters that cannot be made ready."""
        self.loaded: dict[int, LoadedAdapter] = {}
        """Adapters that are ready, by number."""
        self.reads: list[str] = []
        """Paths, in the order of the reads."""

    def read_weights(self, adapter: Adapter) -> str:
        self.reads.append(adapter.path)
        if adapter.path in self.unreadable:
            raise self.unreadable[adapter.path]
        return f"weights of {adapter.name} {adapter.digest}"

    def add_adapter(self, loaded: LoadedAdapter) -> None:
        if loaded.adapter.name in self.refused:
            raise AdapterError("there is no room")
        assert loaded.number not in self.loaded
        self.loaded[loaded.number] = loaded

    def remove(self, loaded: LoadedAdapter) -> None:
        assert self.loaded.pop(loaded.number) is loaded
        assert loaded.streams == 0

    @property
    def keys(self) -> list[str]:
        """Name and digest of the adapters that are ready."""
        return [f"{loaded.adapter.name} {loaded.adapter.digest}" for loaded in self.loaded.values()]
