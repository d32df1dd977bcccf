"""What is said of models, by their names or by patterns of names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import translate
from typing import Generic, TypeVar

from penstock.gateway.requests.bounded_name import MAX_NAME

WILDCARDS = frozenset("*?[")
Said = TypeVar("Said")


class NameTable(Generic[Said]):
    """Finds what is said of a name: an exact name comes first, then the first pattern that fits."""

    def __init__(self, said: Mapping[str, Said]) -> None:
        self.all = said
        self.exact = {name: each for name, each in said.items() if WILDCARDS.isdisjoint(name)}
        self._patterns = [
            (re.compile(translate(name)), each)
            for name, each in said.items()
            if not WILDCARDS.isdisjoint(name)
        ]

    def find(self, name: str) -> Said | None:
        """What is said of this name; None: nothing."""
        found = self.exact.get(name)
        if found is not None or not self._patterns or len(name) > MAX_NAME:
            return found
        return next((each for pattern, each in self._patterns if pattern.match(name)), None)
