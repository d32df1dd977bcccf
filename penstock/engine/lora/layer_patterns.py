"""``rank_pattern`` and ``alpha_pattern`` of PEFT: values of some layers, by patterns of their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Generic, TypeVar

from penstock.engine.lora.bounded_regex import BoundedRegex, PatternError, StepBudget
from penstock.engine.lora.errors import AdapterError

V = TypeVar("V")

PLAIN = re.compile(r"(\^?)([A-Za-z0-9_.-]+)\$?")
"""A layer's name or its end, as PEFT's own methods write them. A dot means a dot here."""
MAX_EXPRESSIONS = 256
"""Patterns that are not :data:`PLAIN`."""
MAX_STEPS = 20_000_000
"""Steps of matching, some seconds. A pattern takes 3 million for the 46000 layers of a large mixture of
experts."""


class LayerPatterns(Generic[V]):
    """Values by pattern. The first pattern that matches a layer's name, or what follows one of its dots,
    gives the layer its value, as in PEFT."""

    def __init__(self, field: str, values: Mapping[str, V]) -> None:
        """``field`` is named in errors. Raises AdapterError for a pattern that is not supported."""
        self._field = field
        self._whole: dict[str, tuple[int, V]] = {}
        """Place in the file and value, by whole name."""
        self._ends: dict[str, tuple[int, V]] = {}
        """The same by a name's end."""
        self._expressions: list[tuple[int, V, str, BoundedRegex]] = []
        budget = StepBudget(MAX_STEPS)
        for place, (pattern, value) in enumerate(values.items()):
            plain = PLAIN.fullmatch(pattern)
            if plain is not None:
                names = self._whole if plain[1] else self._ends
                names.setdefault(plain[2], (place, value))
                continue
            if len(self._expressions) == MAX_EXPRESSIONS:
                raise AdapterError(f"{field}: it has more than {MAX_EXPRESSIONS} regular expressions")
            try:
                BoundedRegex(pattern, budget)  # alone: its groups must not end or begin outside it
                expression = BoundedRegex(rf"(.*\.)?({pattern})", budget)
            except PatternError as error:
                raise self._refused(pattern, error) from None
            self._expressions.append((place, value, pattern, expression))

    def find(self, layer: str, default: V) -> V:
        """The value of ``layer``. Raises AdapterError when patterns take too long."""
        found = [self._whole[layer]] if layer in self._whole else []
        ends = _ends(layer) if self._ends or self._expressions else []
        found += [self._ends[end] for end in ends if end in self._ends]
        first = min(found, key=lambda placed: placed[0], default=None)
        for place, value, pattern, expression in self._expressions:
            if first is not None and first[0] < place:
                break
            try:
                if expression.fullmatch(layer):
                    return value
            except PatternError as error:
                raise self._refused(pattern, error) from None
        return default if first is None else first[1]

    def _refused(self, pattern: str, error: PatternError) -> AdapterError:
        return AdapterError(f"{self._field}: the regular expression {pattern[:100]!r} is refused: {error}")


def _ends(layer: str) -> list[str]:
    """The name, and what follows each of its dots."""
    parts = layer.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
