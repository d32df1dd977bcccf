"""``rank_pattern`` and ``alpha_pattern`` of PEFT: values of some layers, by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from penstock.adapters.errors import AdapterError

V = TypeVar("V")

MAX_SUFFIXES = 256
"""Names after ``.*``, each of which every layer is compared with."""
_GROUP = re.compile(r"([^()|]*)\(([^()]*)\)\$?")
"""Alternatives after a common beginning."""
_NAME = re.compile(r"(\^?)(\.\*)?((?:[A-Za-z0-9_.-]|\\\.)+)\$?")
"""A layer's name or its end, as PEFT's own methods write them. A dot means a dot, with a backslash or not."""
FORMS = (
    "a pattern is the end of a layer's name, such as q_proj or 0.self_attn.q_proj, which may follow ^ for "
    "the whole name or .* for any beginning; several stand with | between them, as in .*(q_proj|v_proj)"
)


class LayerPatterns(Generic[V]):
    """Values by pattern. The first pattern that matches a layer's name, or what follows one of its dots,
    gives the layer its value, as in PEFT. Patterns are names with ``|``, ``^`` and ``.*``; other regular
    expressions are refused."""

    def __init__(self, field: str, values: Mapping[str, V]) -> None:
        """``field`` is named in errors. Raises AdapterError for a pattern that is not supported."""
        self._whole: dict[str, tuple[int, V]] = {}
        """Place in the file and value, by whole name."""
        self._ends: dict[str, tuple[int, V]] = {}
        """Place in the file and value, by the end of a name that begins it or follows one of its dots."""
        self._suffixes: dict[str, tuple[int, V]] = {}
        """Place in the file and value, by the end of a name that begins anywhere."""
        for place, (pattern, value) in enumerate(values.items()):
            for alternative in _alternatives(pattern):
                found = _NAME.fullmatch(alternative)
                if found is None:
                    raise AdapterError(f"{field}: {pattern[:100]!r} is not supported: {FORMS}")
                names = self._suffixes if found[2] else self._whole if found[1] else self._ends
                names.setdefault(found[3].replace("\\", ""), (place, value))
        if len(self._suffixes) > MAX_SUFFIXES:
            raise AdapterError(f"{field}: it has more than {MAX_SUFFIXES} names after .*")

    def find(self, layer: str, default: V) -> V:
        """The value of ``layer``."""
        found = [self._whole[layer]] if layer in self._whole else []
        if self._ends:
            found += [self._ends[end] for end in _ends(layer) if end in self._ends]
        found += [placed for suffix, placed in self._suffixes.items() if layer.endswith(suffix)]
        return min(found, key=lambda placed: placed[0])[1] if found else default


def _alternatives(pattern: str) -> Iterator[str]:
    group = _GROUP.fullmatch(pattern)
    for alternative in (pattern if group is None else group[2]).split("|"):
        yield alternative if group is None else group[1] + alternative


def _ends(layer: str) -> list[str]:
    """The name, and what follows each of its dots."""
    parts = layer.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
