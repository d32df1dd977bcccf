"""One HTTP/1.1 connection of the load client: one request at a time."""

from __future__ import annotations

from penstock.bench.load.connection import Ended
from penstock.bench.load.latency import ReadLog
from penstock.bench.load.messages import LoadPlan
from penstock.bench.load.reply_counter import SHOWN, ReplyCounter

_LAST_CHUNK = b"0\r\n\r\n"


def request_bytes(plan: LoadPlan, body: bytes) -> bytes:
    """One HTTP request, with its head."""
    key = f"Authorization: Bearer {plan.api_key}\r\n" if plan.api_key else ""
    head = (
        f"POST {plan.path} HTTP/1.1\r\nHost: {plan.host}:{plan.port}\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Http1Connection:
    """A :class:`Connection`. ``requests``: whole requests, used in turn; ``lane``: its number in the log."""

    __slots__ = ("_lane", "_output", "_reply", "_request", "_requests", "failure")

    places = 1
    ready = True

    def __init__(self, requests: list[bytes], lane: int) -> None:
        self.failure: str | None = None
        self._requests = requests
        self._lane = lane
        self._output = b""
        self._request = 0
        self._reply: Http1Reply | None = None

    @property
    def running(self) -> int:
        return int(self._reply is not None)

    @property
    def whole_events(self) -> bool:
        return self._reply is not None and self._reply.in_stream

    def start(self, request: int) -> int:
        self._request = request
        self._reply = Http1Reply()
        self._output = self._requests[request % len(self._requests)]
        return self._lane

    def feed(self, data: bytes, log: ReadLog) -> list[Ended]:
        reply = self._reply
        if reply is None:
            self.failure = "data without a request"
            return []
        events = reply.feed(data)
        log.entries.append(self._lane)
        log.counts.append(events)
        return self._end(reply) if reply.ended else []

    def close(self) -> list[Ended]:
        self.failure = "closed"
        reply = self._reply
        if reply is None:
            return []
        reply.close()
        return self._end(reply)

    def take_output(self) -> bytes:
        output, self._output = self._output, b""
        return output

    def _end(self, reply: Http1Reply) -> list[Ended]:
        self._reply = None
        if reply.error is not None or not reply.reusable:
            self.failure = self.failure or reply.error or "not kept alive"
        return [Ended(self._request, reply.error)]


class Http1Reply:
    """One reply, with its head.

    Call ``feed`` until ``ended``. Then ``error`` is None, or the reason: a status other than 200, an error
    event, or an end without ``[DONE]``.
    """

    __slots__ = ("_chunked", "_counter", "_head", "_last", "_left", "ended", "error", "reusable")

    def __init__(self) -> None:
        self.ended = False
        self.error: str | None = None
        self.reusable = True  # whether the connection may carry another request after this reply
        self._counter = ReplyCounter()
        self._chunked = False
        self._head: bytes | None = b""  # None once the header section is complete
        self._left: int | None = (
            None  # bytes of the body to come; None: chunked, or until the connection ends
        )
        self._last = b""  # the last bytes read, for the end of the chunks

    @property
    def in_stream(self) -> bool:
        """Whether a read that holds only whole JSON events may be counted without ``feed``."""
        return self._left is None and self._counter.between_events

    def feed(self, data: bytes) -> int:
        """Reads more bytes; returns the number of JSON events that they complete."""
        if self._head is not None:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return 0
            self._head = None
            self._read_head(head)
        events = self._counter.feed(data)
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
            self.error = f"not an HTTP/1.1 reply: {first[:SHOWN]!r}"
            self.ended = True
            return
        self._counter.status = int(status)
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (x.partition(b":") for x in lines)
        }
        length = headers.get(b"content-length", b"")
        if length.isdigit():
            self._left = int(length)
        self._chunked = b"chunked" in headers.get(b"transfer-encoding", b"").lower()
        self.reusable = headers.get(b"connection", b"").lower() != b"close"

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
        counter = self._counter
        if self._chunked:
            # The first chunk of a refusal, without its header.
            counter.body = counter.body.partition(b"\r\n")[2].partition(b"\r\n")[0]
        early = "the connection ended before the reply did" if counter.status else "closed without a reply"
        self.error = counter.end(early if cut else None)
