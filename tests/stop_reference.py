"""Stop strings as one finds them in a whole text, without any streaming."""

from __future__ import annotations

from collections.abc import Sequence


def until_stop(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """The text up to the match that ends first, and the stop string that it is of; ``include`` keeps it."""
    matches = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    if not matches:
        return text, None
    end, start, stop = min(matches)
    return text[: end if include else start], stop
