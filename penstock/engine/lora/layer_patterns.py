"""``rank_pattern`` and ``alpha_pattern`` of PEFT: values of some layers, by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, TypeVar

from penstock.engine.lora.errors import AdapterError

V = TypeVar("V")

PLAIN = re.compile(r"(\^?)([A-Za-z0-9_.-]+)\$?")
"""A layer's name or its end, as PEFT's own methods write them. A dot means a dot here."""


class LayerPatterns(Generic[V]):
    """Values by pattern. The first pattern that matches a layer's name, or what follows one of its dots,
    gives the layer its value, as in PEFT."""

    def __init__(self, field: str, values: Mapping[str, V]) -> None:
        """``field`` is named in errors. Raises AdapterError for a pattern that is not supported."""
        self._whole: dict[str, tuple[int, V]] = {}
        """Place in the file and value, by whole name."""
        self._ends: dict[str, tuple[int, V]] = {}
        """The same by a name's end."""
        for place, (pattern, value) in enumerate(values.items()):
            plain = PLAIN.fullmatch(pattern)
            if plain is None:
                raise AdapterError(
                    f"{field}: {pattern[:100]!r} is not supported; it must be the name of a layer or its end"
                )
            names = self._whole if plain[1] else self._ends
            names.setdefault(plain[2], (place, value))

    def find(self, layer: str, default: V) -> V:
        """The value of ``layer``."""
        found = [self._whole[layer]] if layer in self._whole else []
        if self._ends:
            parts = layer.split(".")
            ends = (".".join(parts[start:]) for start in range(len(parts)))
            found += [self._ends[end] for end in ends if end in self._ends]
        return min(found, key=lambda placed: placed[0])[1] if found else default
