"""The agreed list of adapters, as an API server routes by it."""

from __future__ import annotations

import msgspec

from penstock.dispatch.adapter_registry import AdapterRegistry
from penstock.wire.adapter_list import ADAPTERS, AdapterList
from penstock.wire.control import AgreedState, AgreedStates
from penstock.wire.messages import Adapter

ONE, OTHER = Adapter("a", "/1", digest="1"), Adapter("a", "/2", digest="2")
THIRD = Adapter("a", "/3", digest="3")


def take(registry: AdapterRegistry, version: int, *adapters: Adapter) -> None:
    arguments = msgspec.to_builtins(AdapterList(list(adapters), [("k", "load")]))
    state = AgreedState(name=ADAPTERS, key="k", version=version, arguments=arguments)
    registry.take(AgreedStates(revision=version, adopted=0, states=[state]))


def test_the_list_and_its_keys() -> None:
    registry = AdapterRegistry()
    take(registry, 2, ONE)
    registry.assume_confirmed()
    assert (registry.version, registry.get("a"), registry.get("b")) == (2, ONE, None)
    assert registry.keys == {"k": "load"}
    assert "a" in registry
    assert registry.has("a", "1")
    assert not registry.has("a", "2")


def test_an_earlier_list_changes_nothing() -> None:
    registry = AdapterRegistry()
    take(registry, 3, ONE)
    registry.on_confirmed(3, {"a": "1"})
    take(registry, 2)
    assert registry.get("a") == ONE


def test_a_new_adapter_serves_once_an_engine_has_confirmed_the_list() -> None:
    registry = AdapterRegistry()
    take(registry, 1, ONE)
    assert registry.get("a") is None
    assert "a" not in registry
    assert not registry.served()
    changes = registry.changes
    registry.on_confirmed(0, {})
    assert registry.get("a") is None
    registry.on_confirmed(1, {})  # this engine could not load it; it exists all the same
    assert registry.get("a") == ONE
    assert registry.served() == [ONE]
    assert registry.changes > changes
    assert registry.has("a", "1")


def test_a_replaced_adapter_serves_until_an_engine_has_the_other() -> None:
    registry = AdapterRegistry()
    take(registry, 1, ONE)
    registry.on_confirmed(1, {"a": "1"})
    take(registry, 2, OTHER)
    assert registry.get("a") == ONE
    take(registry, 3, THIRD)
    assert registry.get("a") == ONE, "no engine has had the second one"
    registry.on_confirmed(2, {"a": "2"})
    assert registry.get("a") == ONE
    registry.on_confirmed(3, {"a": "3"})
    assert registry.get("a") == THIRD


def test_an_unloaded_adapter_is_gone_at_once() -> None:
    registry = AdapterRegistry()
    take(registry, 1, ONE)
    take(registry, 2, OTHER)
    take(registry, 3)
    assert registry.get("a") is None
    take(registry, 4, OTHER)
    assert registry.get("a") is None, "no engine has loaded it again"
    registry.on_confirmed(4, {"a": "2"})
    assert registry.get("a") == OTHER


def test_another_path_with_the_same_files_is_the_same_adapter() -> None:
    registry = AdapterRegistry()
    take(registry, 1, ONE)
    registry.on_confirmed(1, {"a": "1"})
    moved = msgspec.structs.replace(ONE, path="/moved")
    take(registry, 2, moved)
    assert registry.get("a") == moved
