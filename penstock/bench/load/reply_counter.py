"""Counts the events of one streamed reply, from the bytes of its body; without sockets and JSON."""

from __future__ import annotations

import re

EVENT = b"data: {"
DONE = b"data: [DONE]"
ERROR = b'data: {"error"'
"""Start of an error event. Quotes are escaped in generated text, which therefore cannot contain it."""
find_last = re.compile(
    rb"event: (?:message_stop|response\.(?:completed|incomplete)|(error|response\.failed))\n"
).search
"""Finds the last event of a stream of messages or responses; its group matches if the stream failed. No text
has ends of lines. A pattern that could also begin with ``data: `` would take seven times as long."""
SHOWN = 300
"""Maximum bytes of an error body in an error message."""


class ReplyCounter:
    """Counts the events of one reply, of either protocol.

    Lines are counted, so an event that is split over reads counts when its line is complete.
    """

    __slots__ = ("_error", "_line", "body", "done", "status")

    def __init__(self) -> None:
        self.status = 0
        """Status of the reply; 0 until its head has come."""
        self.done = False
        """Whether the terminator has come."""
        self.body = b""
        """Start of the body of a reply with another status than 200."""
        self._error: str | None = None
        self._line = b""  # an incomplete line

    @property
    def between_events(self) -> bool:
        """Whether bytes that hold only whole JSON events may be counted without ``feed``."""
        return self.status == 200 and not (self._line or self.done or self._error)

    def feed(self, data: bytes) -> int:
        """Read more of the body; return the number of JSON events that it completes."""
        if self.status != 200:
            self.body += data[: SHOWN - len(self.body)] if len(self.body) < SHOWN else b""
            return 0
        text = self._line + data
        end = text.rfind(b"\n") + 1
        self._line = text[end:]
        last = find_last(text, 0, end)
        if (start := text.find(ERROR, 0, end)) >= 0:
            self._fail(text[start + len(b"data: ") : end])
        elif last is not None and last[1]:
            self._fail(text[last.start(1) : end])
        elif last is not None or text.find(DONE, 0, end) >= 0:
            self.done = True
        return text.count(EVENT, 0, end)

    def _fail(self, event: bytes) -> None:
        if self._error is None:
            self._error = "error event: " + shown(event.partition(b"\n\n")[0])

    def end(self, cut: str | None = None) -> str | None:
        """The reply has ended: what was wrong with it, or None. ``cut``: why it ended early, if it did."""
        if self.status not in (0, 200):
            return f"HTTP {self.status}: {shown(self.body)}"
        if self._error is not None or cut is not None:
            return self._error or cut
        return None if self.done else "the reply ended without its terminator"


def shown(text: bytes) -> str:
    """The beginning of ``text`` as one line."""
    return " ".join(text[:SHOWN].decode(errors="replace").split())
