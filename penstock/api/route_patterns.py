"""Routes with a name in their path, as ``/v1beta/models/{model}:generateContent``."""

from __future__ import annotations

import re
from collections.abc import Iterable

_OTHER_VERSIONS = {"/v1beta/": "/v1/"}
"""Google's clients call its routes by either; without a verb ``/v1/models`` is OpenAI's."""

_verb = re.compile(r"/v1(?:beta)?/models/.+:[A-Za-z]+", re.DOTALL).fullmatch


def asks_verb(path: str) -> bool:
    """Whether a path that is posted to is of Google's API, with a verb after the name of the model."""
    return _verb(path) is not None


class RoutePatterns:
    """Finds the route of a path. A name may have any characters, slashes and colons included."""

    def __init__(self, routes: Iterable[str]) -> None:
        """Routes without a name are passed over."""
        named: list[tuple[str, str, str]] = []
        for route in routes:
            start, _, rest = route.partition("{")
            end = rest.partition("}")[2]
            starts = [start] if rest else []
            if end:
                starts += [
                    start.replace(version, other, 1)
                    for version, other in _OTHER_VERSIONS.items()
                    if start.startswith(version)
                ]
            named += [(route, each, end) for each in starts]
        self._named = sorted(named, key=lambda each: -len(each[2]))

    def route_of(self, path: str) -> str:
        """The route, or ``path`` itself if it is none with a name."""
        for route, start, end in self._named:
            if path.startswith(start) and path.endswith(end) and len(path) > len(start) + len(end):
                return route
        return path
