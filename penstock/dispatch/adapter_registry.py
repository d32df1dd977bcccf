"""The LoRA adapters of the agreed list, as an API server routes by them."""

from __future__ import annotations

import msgspec

from penstock.wire.adapter_list import ADAPTERS, AdapterList
from penstock.wire.control import AgreedStates
from penstock.wire.messages import Adapter


class AdapterRegistry:
    """The agreed list; :class:`.two_phase_commit.TwoPhaseCommit` keeps it up to date.

    Requests get a change once an engine has confirmed it: a new adapter does not exist before, and one that
    replaces another is the other one.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}
        """By name, in the order in which they were loaded."""
        self.version = 0
        """Of the list; 0: it is the empty one of the start."""
        self.changes = 0
        """How often :meth:`served` has changed."""
        self.keys: dict[str, str] = {}
        """Idempotency keys of the latest changes, and what each asked for."""
        self._replaced: dict[str, Adapter | None] = {}
        """What requests get by names whose adapters no engine has confirmed yet; None: nothing."""

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

    def take(self, agreed: AgreedStates) -> None:
        """The agreed states have changed."""
        for state in agreed.states:
            if state.name == ADAPTERS and state.version > self.version:
                told = msgspec.convert(state.arguments, AdapterList)
                served = {name: self.get(name) for name in self.adapters}
                earlier, self.adapters = self.adapters, {adapter.name: adapter for adapter in told.adapters}
                self._replaced = {
                    name: served.get(name)
                    for name, adapter in self.adapters.items()
                    if name in self._replaced or not _is_same(adapter, earlier.get(name))
                }
                self.version = state.version
                self.keys = dict(told.keys)
                self.changes += 1

    def assume_confirmed(self) -> None:
        """Requests get the list as it is: it was agreed on before this API server started."""
        self._replaced.clear()
        self.changes += 1

    def on_confirmed(self, version: int, digests: dict[str, str]) -> None:
        """An engine has confirmed a version of the list, and the adapters that it could load: ``digests`` by
        name. A new adapter that it could not load exists, too, and is missing."""
        for name, earlier in list(self._replaced.items()):
            if version >= self.version and (
                earlier is None or self.adapters[name].digest == digests.get(name)
            ):
                del self._replaced[name]
                self.changes += 1


def _is_same(adapter: Adapter, earlier: Adapter | None) -> bool:
    return earlier is not None and adapter.key == earlier.key
