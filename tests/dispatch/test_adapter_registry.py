"""The desired list of adapters, as an API server routes by it."""

from __future__ import annotations

import msgspec

from penstock.dispatch.adapter_registry import AdapterRegistry
from penstock.wire.adapter_list import ADAPTERS, AdapterList
from penstock.wire.messages import Adapter, DesiredState

ONE, OTHER = Adapter("a", "/1", digest="1"), Adapter("a", "/2", digest="2")
THIRD = Adapter("a", "/3", digest="3")


def desire(registry: AdapterRegistry, generation: int, *adapters: Adapter) -> None:
    registry.desire(DesiredState(ADAPTERS, generation, msgspec.to_builtins(AdapterList(list(adapters)))))


def test_the_list() -> None:
    registry = AdapterRegistry()
    desire(registry, 2, ONE)
    registry.assume_observed()
    assert (registry.generation, registry.get("a"), registry.get("b")) == (2, ONE, None)
    assert "a" in registry
    assert registry.has("a", "1")
    assert not registry.has("a", "2")


def test_an_earlier_list_changes_nothing() -> None:
    registry = AdapterRegistry()
    desire(registry, 3, ONE)
    registry.on_observed(3, {"a": "1"})
    desire(registry, 2)
    assert registry.get("a") == ONE


def test_a_new_adapter_serves_once_an_engine_has_observed_the_list() -> None:
    registry = AdapterRegistry()
    desire(registry, 1, ONE)
    assert registry.get("a") is None
    assert "a" not in registry
    assert not registry.served()
    changes = registry.changes
    registry.on_observed(0, {})
    assert registry.get("a") is None
    registry.on_observed(1, {})  # this engine could not load it; it exists all the same
    assert registry.get("a") == ONE
    assert registry.served() == [ONE]
    assert registry.changes > changes
    assert registry.has("a", "1")


def test_a_replaced_adapter_serves_until_an_engine_has_the_other() -> None:
    registry = AdapterRegistry()
    desire(registry, 1, ONE)
    registry.on_observed(1, {"a": "1"})
    desire(registry, 2, OTHER)
    assert registry.get("a") == ONE
    desire(registry, 3, THIRD)
    assert registry.get("a") == ONE, "no engine has had the second one"
    registry.on_observed(2, {"a": "2"})
    assert registry.get("a") == ONE
    registry.on_observed(3, {"a": "3"})
    assert registry.get("a") == THIRD


def test_an_unloaded_adapter_is_gone_at_once() -> None:
    registry = AdapterRegistry()
    desire(registry, 1, ONE)
    desire(registry, 2, OTHER)
    desire(registry, 3)
    assert registry.get("a") is None
    desire(registry, 4, OTHER)
    assert registry.get("a") is None, "no engine has loaded it again"
    registry.on_observed(4, {"a": "2"})
    assert registry.get("a") == OTHER


def test_another_path_with_the_same_files_is_the_same_adapter() -> None:
    registry = AdapterRegistry()
    desire(registry, 1, ONE)
    registry.on_observed(1, {"a": "1"})
    moved = msgspec.structs.replace(ONE, path="/moved")
    desire(registry, 2, moved)
    assert registry.get("a") == moved
