"""Matches stop strings in text that arrives in pieces, holding back as little text as possible."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Searches a stream's text for any of ``stops``.

    The match that ends first wins; among several, the one that starts first. So the result does not depend on
    how the text is cut into pieces. Text is held back only while it may be the start of a stop string.
    """

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """``include``: the returned text includes the stop string. ``stops`` has no empty string."""
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, piece: str) -> tuple[str, str | None]:
        """Take the next piece. Returns the final text, and the stop string if one is complete."""
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
        """The held-back text, if the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held


def held_back(text: str, tag: str, start: int = 0) -> int:
    """Number of characters at the end of ``text``, from ``start`` on, that may be the start of ``tag``."""
    place = text.find(tag[0], max(start, len(text) - len(tag) + 1))
    while place >= 0 and not tag.startswith(text[place:]):
        place = text.find(tag[0], place + 1)
    return 0 if place < 0 else len(text) - place
