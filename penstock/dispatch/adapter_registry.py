"""The LoRA adapters of the desired list, as an API server routes by them."""

from __future__ import annotations

import msgspec

from penstock.wire.adapter_list import AdapterList
from penstock.wire.messages import Adapter, DesiredState


class AdapterRegistry:
    """The desired list; :class:`.desired_states.EngineStates` keeps it up to date.

    Requests get a change once an engine has observed it: a new adapter does not exist before, and one that
    replaces another is the other one.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}
        """Adapters by name, in the order in which they were loaded."""
        self.generation = 0
        """Generation of the list; 0: it is the empty one of the start."""
        self.changes = 0
        """How often :meth:`served` has changed."""
        self._replaced: dict[str, Adapter | None] = {}
        """What requests get by names whose adapters no engine has observed yet; None: nothing."""

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def get(self, name: str) -> Adapter | None:
        """The adapter that requests get by ``name``; None: there is none."""
        return self._replaced[name] if name in self._replaced else self.adapters.get(name)

    def served(self) -> list[Adapter]:
        """The adapters that requests get."""
        found = (self.get(name) for name in self.adapters)
        return [adapter for adapter in found if adapter is not None]

    def has(self, name: str, digest: str) -> bool:
        """Whether an adapter is of the list."""
        adapter = self.adapters.get(name)
        return adapter is not None and adapter.digest == digest

    def desire(self, state: DesiredState) -> None:
        """The list may have changed."""
        if state.generation <= self.generation:
            return
        served = {name: self.get(name) for name in self.adapters}
        earlier, listed = self.adapters, msgspec.convert(state.value, AdapterList).adapters
        self.adapters = {adapter.name: adapter for adapter in listed}
        self._replaced = {
            name: served.get(name)
            for name, adapter in self.adapters.items()
            if name in self._replaced or not _is_same(adapter, earlier.get(name))
        }
        self.generation = state.generation
        self.changes += 1

    def assume_observed(self) -> None:
        """Requests get the list as it is: it was settled before this API server started."""
        self._replaced.clear()
        self.changes += 1

    def on_observed(self, generation: int, digests: dict[str, str]) -> None:
        """An engine has observed a generation of the list, and has loaded the adapters that it could:
        ``digests`` by name. A new adapter that it could not load exists, too, and is missing."""
        for name, earlier in list(self._replaced.items()):
            if generation >= self.generation and (
                earlier is None or self.adapters[name].digest == digests.get(name)
            ):
                del self._replaced[name]
                self.changes += 1


def _is_same(adapter: Adapter, earlier: Adapter | None) -> bool:
    return earlier is not None and adapter.key == earlier.key
