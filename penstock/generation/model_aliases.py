"""Other names of served models (--model-alias), for clients that ask for fixed ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fnmatch import translate

MAX_NAME = 256
"""Maximum characters of a name that is compared with patterns."""


class ModelAliases:
    """Names and patterns with the models that they stand for. The first pattern that fits a name counts."""

    def __init__(self, aliases: Sequence[str]) -> None:
        """``aliases``: each PATTERN=NAME."""
        self.exact: dict[str, str] = {}
        """Aliases without wildcards, and their models."""
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        for alias in aliases:
            pattern, _, name = alias.partition("=")
            if set(pattern).isdisjoint("*?["):
                self.exact.setdefault(pattern, name)
            else:
                self._patterns.append((re.compile(translate(pattern)), name))

    def __bool__(self) -> bool:
        return bool(self.exact or self._patterns)

    def model_of(self, name: str) -> str | None:
        """The model that ``name`` stands for; None: it is no alias."""
        model = self.exact.get(name)
        if model is not None or len(name) > MAX_NAME:
            return model
        return next((model for pattern, model in self._patterns if pattern.match(name)), None)


def check_aliases(aliases: Sequence[str], served: Collection[str], *, loads: bool = False) -> list[str]:
    """Raises ValueError for an alias of a model that is not ``served``, and for one that is a served name.
    ``loads``: others may be loaded later; returns the aliases of such."""
    later = []
    for alias in aliases:
        pattern, _, name = alias.partition("=")
        if name not in served and loads:
            later.append(alias)
        elif name not in served:
            raise ValueError(f"--model-alias {alias}: {name} is not served; served are {', '.join(served)}")
        if pattern in served:
            raise ValueError(f"--model-alias {alias}: {pattern} is the name of a served model")
    return later
