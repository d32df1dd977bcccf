"""The events of one reply, counted, and the text of its text events, collected."""

from __future__ import annotations

NUMBERED_TAIL = b'","sequence_number":%d%b'
"""What follows the text of a text event: its number, and its tail."""


class EventRecord:
    """For APIs that number their events, and repeat the text at the end. Whoever writes an event counts it
    here: the reply itself, its stream, or the row writer."""

    __slots__ = ("number", "text")

    def __init__(self) -> None:
        self.number = 0
        """Number of the next event."""
        self.text = bytearray()
        """The text of all text events since it was last cleared, JSON-escaped UTF-8."""

    def event(self, head: bytes, text: bytes, tail: bytes) -> bytes:
        """Make a text event, and count it."""
        event = b"".join((head, text, NUMBERED_TAIL % (self.number, tail)))
        self.number += 1
        self.text += text
        return event
