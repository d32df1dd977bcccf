"""The text events of one reply, counted and collected by whoever writes them."""

from __future__ import annotations

from typing import Protocol


class Rows(Protocol):
    """Where the text of rows is before its record has it: see ``recorded_rows`` beside this."""

    def collect(self, handle: int) -> None: ...

    def add(self, handle: int, text: bytes) -> None: ...


class EventRecord:
    """For APIs that number their events, and repeat the text at the end. The row writer keeps both for rows
    that it writes by columns; it brings the number up to date before it calls the reply."""

    __slots__ = ("_handle", "_rows", "_text", "number")

    def __init__(self) -> None:
        self.number = 0
        """Number of the next event."""
        self._text = bytearray()
        self._rows: Rows | None = None
        self._handle = -1

    @property
    def text(self) -> bytearray:
        """The text of all text events since it was last cleared, JSON-escaped UTF-8."""
        if self._rows is not None:
            self._rows.collect(self._handle)
        return self._text

    def add(self, text: bytes) -> None:
        """A text event was written by other means."""
        if self._rows is None:
            self._text += text
        else:
            self._rows.add(self._handle, text)

    def attach(self, rows: Rows | None, handle: int = -1) -> bytearray:
        """``rows`` have later text from now on; None: none. Returns the buffer for what they collect."""
        self._rows, self._handle = rows, handle
        return self._text
