"""Names of wire types: one class each, and a row in the index of messages at the top of their module."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

import penstock
from penstock import wire
from penstock.wire import media
from penstock.wire import messages as messages_module
from penstock.wire.media import items

MODULES = [
    importlib.import_module(f"{place.__name__}.{found.name}")
    for place in (wire, media)
    for found in pkgutil.iter_modules(place.__path__)
]
TYPES = [
    each
    for module in MODULES
    for each in vars(module).values()
    if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
]


def messages(module: ModuleType) -> set[str]:
    """Names of the tagged structs that the module defines: each of them is sent by itself. Those of ``items``
    are messages between API servers and engines."""
    return {
        each.__name__
        for each in TYPES
        if each.__struct_config__.tag is not None and not each.__name__.startswith("_")
        if module is (messages_module if each.__module__ == items.__name__ else sys.modules[each.__module__])
    }


def index(docstring: str) -> set[str]:
    """First column of the table whose first heading is "message"."""
    rules = [line for line in docstring.splitlines() if line.startswith("===")]
    if len(rules) != 3:
        return set()
    heading, rows = docstring.split(rules[0] + "\n")[1:3]
    assert heading.split() == ["message", "sender", "receiver", "answer"]
    return {row.split()[0] for row in rows.splitlines() if row[:1].strip()}


def test_wire_types_have_names_of_their_own() -> None:
    package = Path(penstock.__file__).parent
    defined = Counter(
        node.name
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    names = [each.__name__ for each in TYPES if not each.__name__.startswith("_")]
    assert len(names) > 40
    assert [name for name in names if defined[name] != 1] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_message_is_in_the_index_of_its_module(module: ModuleType) -> None:
    if found := messages(module):
        assert index(module.__doc__ or "") == found


def test_protocol_versions_have_one_name_each() -> None:
    versions = [
        name
        for module in MODULES
        for name, value in vars(module).items()
        if name.endswith("PROTOCOL_VERSION") and isinstance(value, int)
    ]
    assert sorted(versions) == ["COORDINATOR_PROTOCOL_VERSION", "ENGINE_PROTOCOL_VERSION"]
