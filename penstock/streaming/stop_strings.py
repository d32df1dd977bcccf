"""Stop strings: find them in text that arrives in pieces, holding back as little as possible."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Looks for any of ``stops`` in a stream's text.

    The match that ends first wins, among those the one that starts first: the result does not depend on how
    the text was cut into pieces. Text is held back only while it could still become a stop string.
    """

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """``include``: the stop string itself is part of the text. ``stops`` must not hold an empty one."""
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Takes the next piece; returns the text that is certain, and the stop string if one is complete."""
        text = self._held + piece
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            end, start, stop = best
            self._held = ""
            return text[: end if self._include else start], stop
        keep = max([held_back(text, stop) for stop in self._stops])
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """The text still held back, when the stream ends otherwise."""
        held, self._held = self._held, ""
        return held


def held_back(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may be the start of ``tag``."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
