"""Counts the events of one streamed HTTP reply, from the bytes read; without sockets and JSON."""

from __future__ import annotations

EVENT = b"data: {"
DONE = b"data: [DONE]"
ERROR = b'data: {"error"'
"""Start of an error event. Quotes are escaped in generated text, which therefore cannot contain it."""

_LAST_CHUNK = b"0\r\n\r\n"
_SHOWN = 300  # maximum bytes of an error body in an error message


class ReplyCounter:
    """Counts the events of one reply and finds its end.

    Lines are counted, so an event that is split over reads counts when its line is complete. Chunk headers
    are ignored as separate lines: chunks must hold whole events, as servers write them.

    Call ``feed`` until ``ended``. Then ``error`` is None, or the reason: a status other than 200, an error
    event, or an end without ``[DONE]``.
    """

    __slots__ = (
        "_body",
        "_chunked",
        "_head",
        "_last",
        "_left",
        "_line",
        "done",
        "ended",
        "error",
        "reusable",
        "status",
    )

    def __init__(self) -> None:
        self.status = 0
        self.done = False
        self.ended = False
        self.error: str | None = None
        self.reusable = True  # whether the connection may carry another request after this reply
        self._chunked = False
        self._head: bytes | None = b""  # None once the header section is complete
        self._left: int | None = (
            None  # bytes of the body to come; None: chunked, or until the connection ends
        )
        self._line = b""  # an incomplete line
        self._last = b""  # the last bytes read, for the end of the chunks
        self._body = b""  # start of an error reply

    @property
    def in_stream(self) -> bool:
        """Whether a read that holds only whole JSON events may be counted without ``feed``."""
        return self._head is None and self._left is None and not (self._line or self.done or self.error)

    def feed(self, data: bytes) -> int:
        """Reads more bytes; returns the number of JSON events that they complete."""
        if self._head is not None:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return 0
            self._head = None
            self._read_head(head)
        events = self._read_lines(data)
        self._find_end(data)
        return events

    def close(self) -> None:
        """The connection was closed."""
        if not self.ended:
            self.reusable = False
            # Only a reply without length and chunks ends when its connection closes.
            self._finish(cut=self._head is not None or self._left is not None or self._chunked)

    # -- parts of a reply

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        version, _, rest = first.partition(b" ")
        status = rest[:3]
        if not version.startswith(b"HTTP/1.") or not status.isdigit():
            self.error = f"not an HTTP/1.1 reply: {first[:_SHOWN]!r}"
            self.ended = True
            return
        self.status = int(status)
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (x.partition(b":") for x in lines)
        }
        length = headers.get(b"content-length", b"")
        if length.isdigit():
            self._left = int(length)
        self._chunked = b"chunked" in headers.get(b"transfer-encoding", b"").lower()
        self.reusable = headers.get(b"connection", b"").lower() != b"close"

    def _read_lines(self, data: bytes) -> int:
        if self.status != 200:
            self._body += data[: _SHOWN - len(self._body)] if len(self._body) < _SHOWN else b""
            return 0
        text = self._line + data
        end = text.rfind(b"\n") + 1
        self._line = text[end:]
        if self.error is None and (start := text.find(ERROR, 0, end)) >= 0:
            self.error = "error event: " + _shown(text[start + len(b"data: ") : end].partition(b"\n")[0])
        self.done = self.done or text.find(DONE, 0, end) >= 0
        return text.count(EVENT, 0, end)

    def _find_end(self, data: bytes) -> None:
        if self.ended:
            return
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._finish()
        elif self._chunked:
            self._last = (self._last + data)[-len(_LAST_CHUNK) :]
            if self._last == _LAST_CHUNK:
                self._finish()

    def _finish(self, *, cut: bool = False) -> None:
        self.ended = True
        if self.status not in (0, 200):
            # The first chunk of a chunked body, without its header.
            body = self._body.partition(b"\r\n")[2].partition(b"\r\n")[0] if self._chunked else self._body
            self.error = f"HTTP {self.status}: {_shown(body)}"
        elif self.error is None and cut:
            self.error = (
                "the connection ended before the reply did" if self.status else "closed without a reply"
            )
        elif self.error is None and not self.done:
            self.error = "the reply ended without [DONE]"


def _shown(text: bytes) -> str:
    return " ".join(text[:_SHOWN].decode(errors="replace").split())
