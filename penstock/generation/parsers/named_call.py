"""Parses outputs that are the arguments of one call, whose function the request names."""

from __future__ import annotations

from penstock.generation.parsers.delta import CallDelta, Delta


class NamedCallParser:
    """All text is arguments of the call."""

    idle = False
    open = None
    guard = ""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> Delta:
        if self._name is not None:
            text = text.lstrip()  # after the reasoning
        if not text:
            return Delta()
        name, self._name = self._name, None
        return Delta(calls=[CallDelta(0, name, text)])

    def finish(self, *, cut: bool) -> Delta:
        return Delta()
