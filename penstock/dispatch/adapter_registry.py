"""The LoRA adapters of the agreed list, as an API server routes by them."""

from __future__ import annotations

import msgspec

from penstock.wire.adapter_list import ADAPTERS, AdapterList
from penstock.wire.control import AgreedStates
from penstock.wire.messages import Adapter


class AdapterRegistry:
    """The agreed list; :class:`.two_phase_commit.TwoPhaseCommit` keeps it up to date."""

    def __init__(self) -> None:
        self.adapters: dict[str, Adapter] = {}
        """By name, in the order in which they were loaded."""
        self.version = 0
        """Of the list; 0: it is the empty one of the start."""
        self.keys: dict[str, str] = {}
        """Idempotency keys of the latest changes, and what each asked for."""
        self._replaced: dict[str, Adapter] = {}
        """Adapters that others have replaced which no engine has confirmed yet, by name."""

    def __bool__(self) -> bool:
        return bool(self.adapters)

    def __contains__(self, name: str) -> bool:
        return name in self.adapters

    def get(self, name: str) -> Adapter | None:
        """The adapter that requests get by ``name``; None: there is none."""
        return self._replaced.get(name) or self.adapters.get(name)

    def has(self, name: str, digest: str) -> bool:
        """Whether an adapter is of the list."""
        adapter = self.adapters.get(name)
        return adapter is not None and adapter.digest == digest

    def take(self, agreed: AgreedStates) -> None:
        """The agreed states have changed."""
        for state in agreed.states:
            if state.name == ADAPTERS and state.version > self.version:
                told = msgspec.convert(state.arguments, AdapterList)
                earlier, self.adapters = self.adapters, {adapter.name: adapter for adapter in told.adapters}
                self.version = state.version
                self.keys = dict(told.keys)
                self._replaced = {
                    name: self._replaced.get(name, earlier[name])
                    for name, adapter in self.adapters.items()
                    if name in earlier and (name in self._replaced or earlier[name].key != adapter.key)
                }

    def on_loaded(self, digests: dict[str, str]) -> None:
        """An engine has confirmed adapters: ``digests`` by name."""
        for name in list(self._replaced):
            if self.adapters[name].digest == digests.get(name):
                del self._replaced[name]
