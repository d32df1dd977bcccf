"""The text events of one reply, counted and collected by whoever writes them."""

from __future__ import annotations


class EventRecord:
    """For APIs that number their events, and repeat the text at the end. The row writer keeps both for rows
    that it writes by columns."""

    __slots__ = ("number", "text")

    def __init__(self) -> None:
        self.number = 0
        """Number of the next event."""
        self.text = bytearray()
        """The text of all text events so far, JSON-escaped UTF-8."""
