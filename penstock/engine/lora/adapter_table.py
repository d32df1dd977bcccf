"""The LoRA adapters that an engine has loaded, and how many of its streams use each.

    staged ──commit──► current ──unloaded or replaced──► retired ──no stream uses it──► removed

A retired adapter takes no new streams of new requests; those that run finish with its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.engine.base import RequestRejected
from penstock.wire.messages import NO_ADAPTER, Adapter, AdapterKey, Submit


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """One adapter in an engine's memory."""

    adapter: Adapter
    number: int
    """At least 1; no other adapter of the engine gets it, also not later."""
    weights: Any = None
    """What the engine's :meth:`AdapterLoader.read_weights` returned."""
    streams: int = 0
    """Streams that use it, waiting ones included."""

    @property
    def key(self) -> AdapterKey:
        return self.adapter.name, self.adapter.digest


class AdapterLoader(Protocol):
    """How an engine loads adapters."""

    def read_weights(self, adapter: Adapter) -> Any:
        """Read and check the files. Runs in a thread of its own, beside steps. Raises AdapterError."""
        ...

    def add_adapter(self, loaded: LoadedAdapter) -> None:
        """Make it ready for streams; called between steps. Raises AdapterError, and has then changed
        nothing."""
        ...

    def remove(self, loaded: LoadedAdapter) -> None:
        """Give its memory back; called between steps, when no stream uses it."""
        ...


class AdapterTable:
    """Loaded adapters by name and digest; ``loader`` is the engine's."""

    def __init__(self, loader: AdapterLoader, max_loaded: int) -> None:
        """``max_loaded``: adapters that may be current (``--max-cpu-loras``)."""
        self.loader = loader
        self.max_loaded = max_loaded
        self._loaded: dict[AdapterKey, LoadedAdapter] = {}
        self._current: dict[str, LoadedAdapter] = {}
        """Loaded adapters by name."""
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._loaded)

    def __contains__(self, key: AdapterKey) -> bool:
        return key in self._loaded

    def names(self) -> list[str]:
        """Names of the current adapters."""
        return list(self._current)

    def digests(self) -> dict[str, str]:
        """Digests of the current adapters, by name."""
        return {name: loaded.adapter.digest for name, loaded in self._current.items()}

    # -- streams

    def of_request(self, request: Submit) -> LoadedAdapter:
        """The adapter that a request names. Raises RequestRejected for one that is not loaded."""
        assert request.adapter is not None
        loaded = self._loaded.get((request.adapter, request.adapter_digest))
        if loaded is None and not request.resumed:  # an API server may not know yet that it was replaced
            loaded = self._current.get(request.adapter)
        if loaded is None:
            raise no_adapter(request.adapter)
        return loaded

    # -- adapters come and go

    def add_adapter(self, adapter: Adapter, weights: Any) -> None:
        """Load an adapter, which streams cannot use before :meth:`make_current`. Raises AdapterError."""
        self._numbers += 1
        loaded = LoadedAdapter(adapter, self._numbers, weights)
        self.loader.add_adapter(loaded)
        self._loaded[loaded.key] = loaded

    def make_current(self, adapters: Collection[Adapter]) -> None:
        """Let streams use those of ``adapters`` that are loaded, and no others."""
        wanted = {(adapter.name, adapter.digest): adapter for adapter in adapters}
        self._current = {
            name: self._loaded[name, digest] for name, digest in wanted if (name, digest) in self
        }
        for loaded in self._current.values():
            loaded.adapter = wanted[loaded.key]  # another path may have the same files

    def remove_unused(self) -> bool:
        """Remove the retired and staged adapters that no stream uses. Returns whether any are left."""
        retired = list(self._retired())
        for loaded in retired:
            if not loaded.streams:
                del self._loaded[loaded.key]
                self.loader.remove(loaded)
        return any(loaded.streams for loaded in retired)

    def in_use_beside(self, keys: Collection[AdapterKey]) -> int:
        """Adapters that streams use and that are not among ``keys``."""
        return sum(loaded.streams > 0 and key not in keys for key, loaded in self._loaded.items())

    def _retired(self) -> Iterator[LoadedAdapter]:
        return (
            loaded for loaded in self._loaded.values() if self._current.get(loaded.adapter.name) is not loaded
        )


def adapter_of(request: Submit, table: AdapterTable | None) -> LoadedAdapter | None:
    """The adapter of a request; None: the base model. ``table`` None: the engine runs no adapters. Raises
    RequestRejected for an adapter that is not loaded."""
    if request.adapter is None:
        return None
    if table is None:
        raise no_adapter(request.adapter)
    return table.of_request(request)


def no_adapter(name: str) -> RequestRejected:
    """The error for a request of an adapter that an engine does not have."""
    return RequestRejected(f"model: the adapter {name!r} is not loaded", NO_ADAPTER)
