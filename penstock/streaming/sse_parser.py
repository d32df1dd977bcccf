"""Parser of server-sent events, fed with bytes in any chunks; HTML standard, "Server-sent events" §9.2.5/6.

Events keep their raw bytes, because a relay passes on the bytes that it received.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_BOM = b"\xef\xbb\xbf"
_find_line_end = re.compile(rb"[\r\n]").search
_empty_lines = re.compile(rb"[\r\n]*").match


MAX_LINES = 1 << 14
"""Lines of an event; one of 16 MiB could have millions, which take seconds."""


class SSEError(ValueError):
    """An event exceeds a limit."""


class Event(NamedTuple):
    """One event, a block of comments, or empty lines."""

    raw: bytes
    """The event's bytes, including the empty line at its end."""
    data: bytes | None
    """The event's data lines joined by LF; None when it has none: readers ignore such an event, e.g. a
    comment."""
    name: bytes = b""
    """The event's ``event`` field."""


class SSEParser:
    """Splits a stream into events; an incomplete event is :attr:`pending`.

    Lines end with LF, CRLF or CR. A CR at the end of a chunk ends its line immediately; an LF that follows
    belongs to the same line end.
    """

    def __init__(self, max_event_bytes: int = 16 << 20) -> None:
        self._max_event_bytes = max_event_bytes
        self._pending = bytearray()
        self._scanned = 0
        """Bytes of pending that contain no empty line."""
        self._lines = 0
        """Lines that end in them."""
        self.between_events = False
        """Whether the next byte starts an event; False while it may belong to the end of the last event or to
        the byte order mark."""
        self._at_start = True
        """The stream may still begin with a byte order mark, whose bytes are incomplete."""
        self._marked = False
        """Pending begins with the byte order mark of the stream."""
        self._after_cr = False
        """The last event ended with CR; an LF that comes next belongs to that line end."""

    @property
    def pending(self) -> bytes:
        """Bytes after the last event that was returned."""
        return bytes(self._pending) if self._pending else b""

    @property
    def pending_bytes(self) -> int:
        """How many bytes are :attr:`pending`."""
        return len(self._pending)

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that ``chunk`` completes. Raises SSEError; what was not returned is pending then."""
        if (self.between_events or (self._at_start and not self._pending)) and _is_plain(chunk):
            self.between_events, self._at_start = True, False
            if chunk.find(b"\n") == len(chunk) - 2:
                return [Event(chunk, chunk[6:-2])]
            return [Event(b"data: %b\n\n" % data, data) for data in chunk[6:-2].split(b"\n\ndata: ")]
        self.between_events = False
        events = self._feed_slowly(chunk)
        self.between_events = not (self._pending or self._at_start or self._after_cr)
        return events

    def _feed_slowly(self, chunk: bytes) -> list[Event]:
        self._pending += chunk
        events: list[Event] = []
        if self._after_cr and self._pending:
            self._after_cr = False
            if self._pending[0] == 0x0A:
                # it belongs to the CR of the last event, which was returned already: an event without content
                events.append(Event(b"\n", None))
                del self._pending[:1]
        try:
            self._complete_events(events)
        except SSEError:
            self._pending[:0] = b"".join([event.raw for event in events])  # nobody gets them
            raise
        return events

    def _complete_events(self, events: list[Event]) -> None:
        """Move the complete events of pending to ``events``. Raises SSEError."""
        if self._at_start:
            if _BOM.startswith(self._pending[:3]) and len(self._pending) < 3:
                return
            self._at_start = False
            self._marked = self._pending.startswith(_BOM)
        while (end := self._end_of_event()) is not None:
            raw = bytes(self._pending[:end])
            del self._pending[:end]
            self._scanned = self._lines = 0
            events.append(_event(raw, raw[3:] if self._marked else raw))
            self._marked = False
            self._after_cr = raw.endswith(b"\r") and not self._pending
        if len(self._pending) > self._max_event_bytes:
            raise SSEError(f"an event of more than {self._max_event_bytes} bytes")

    def _end_of_event(self) -> int | None:
        """Index behind the first complete event of pending, including its empty line."""
        pending = self._pending
        at = max(0, self._scanned - 3)
        while True:
            found = _find_line_end(pending, at)
            if found is None:
                self._scanned = len(pending)
                return None
            line_end = found.start()
            after = _behind_line_end(pending, line_end)
            if line_end == 0:  # all of them at once, so that a flood of them is no flood of events
                run = _empty_lines(pending)
                assert run is not None, "it matches anything"
                return run.end()
            if _begins_with_line_end(pending, after):
                return _behind_line_end(pending, after)
            self._lines += line_end >= self._scanned
            if self._lines > MAX_LINES:
                raise SSEError(f"an event of more than {MAX_LINES} lines")
            at = after


def _behind_line_end(data: bytearray, at: int) -> int:
    """Index behind the line end at ``at``."""
    return at + 2 if data[at : at + 2] == b"\r\n" else at + 1


def _begins_with_line_end(data: bytearray, at: int) -> bool:
    return data.startswith((b"\n", b"\r"), at)


def _is_plain(chunk: bytes) -> bool:
    """Whether a chunk is complete events of one data line each; most servers send one such event a chunk."""
    return (
        chunk.startswith(b"data: ")
        and chunk.endswith(b"\n\n")
        and b"\r" not in chunk
        and (chunk.find(b"\n") == len(chunk) - 2 or chunk.count(b"\n") == 2 * chunk.count(b"\n\ndata: ") + 2)
    )


def _event(raw: bytes, body: bytes) -> Event:
    """``body``: the raw bytes without the byte order mark."""
    data: list[bytes] = []
    name = b""
    for line in body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        field, _, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return Event(raw, b"\n".join(data) if data else None, name)
