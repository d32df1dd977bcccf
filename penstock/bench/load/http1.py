"""One HTTP/1.1 connection of the load client: one request at a time."""

from __future__ import annotations

from penstock.bench.load.connection import Ended
from penstock.bench.load.latency import ReadLog
from penstock.bench.load.messages import LoadPlan
from penstock.bench.load.reply_counter import SHOWN, ReplyCounter
from penstock.http.http1.reply_reader import ReplyFault, ReplyReader

_CHUNK_END = b"\n\r\n"
"""Ends a read that ends with a chunk, if the chunks hold whole lines."""


def request_bytes(plan: LoadPlan, body: bytes) -> bytes:
    """One HTTP request, with its head."""
    key = f"Authorization: Bearer {plan.api_key}\r\n" if plan.api_key else ""
    head = (
        f"POST {plan.path} HTTP/1.1\r\nHost: {plan.host}:{plan.port}\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Http1LoadConnection:
    """A :class:`Connection`. ``requests``: whole requests, used in turn; ``number``: in the log."""

    __slots__ = ("_number", "_output", "_reply", "_request", "_requests", "failure", "running")

    places = 1
    ready = True

    def __init__(self, requests: list[bytes], number: int) -> None:
        self.failure: str | None = None
        self._requests = requests
        self._number = number
        self._output = b""
        self._request = 0
        self._reply = Http1Reply()
        self.running = 0

    @property
    def whole_events(self) -> bool:
        return self._reply.in_stream

    def start(self, request: int) -> int:
        self._request = request
        self._reply.begin()
        self.running = 1
        self._output = self._requests[request % len(self._requests)]
        return self._number

    def feed(self, data: bytes, log: ReadLog) -> list[Ended]:
        if not self.running:
            self.failure = "data without a request"
            return []
        events = self._reply.feed(data)
        log.entries.append(self._number)
        log.counts.append(events)
        return self._end() if self._reply.ended else []

    def close(self) -> list[Ended]:
        self.failure = "closed"
        if not self.running:
            return []
        self._reply.close()
        return self._end()

    def take_output(self) -> bytes:
        output, self._output = self._output, b""
        return output

    def _end(self) -> list[Ended]:
        reply, self.running = self._reply, 0
        if reply.error is not None or not reply.reusable:
            self.failure = self.failure or reply.error or "not kept alive"
        return [Ended(self._request, reply.error)]


class Http1Reply:
    """One reply after the other, with their heads.

    Call ``feed`` until ``ended``. Then ``error`` is None, or the reason: a status other than 200, an error
    event, or an end without ``[DONE]``.
    """

    __slots__ = ("_chunked", "_counter", "_reader", "ended", "error", "in_stream", "reusable")

    def __init__(self) -> None:
        self._reader = ReplyReader(self._on_head)
        self.begin()

    def begin(self) -> None:
        """Begin the next reply."""
        self._reader.begin(bodyless=False)
        self._counter = ReplyCounter()
        self.ended = False
        self.error: str | None = None
        self.reusable = True  # whether the connection may carry another request after this reply
        # Whether a read of whole JSON events in whole chunks may be counted without ``feed``.
        self.in_stream = self._chunked = False

    def feed(self, data: bytes) -> int:
        """Read more bytes. Return the number of JSON events that they complete."""
        reader, counter = self._reader, self._counter
        try:
            content = reader.feed(data)
        except ReplyFault as fault:
            shown = data.partition(b"\r\n")[0][:SHOWN]
            self._finish(str(fault) if reader.has_head else f"not an HTTP/1.1 reply: {shown!r}")
            return 0
        events = counter.feed(content) if content else 0
        if reader.complete:
            self._finish(counter.end(None))
        else:
            self.in_stream = self._chunked and data.endswith(_CHUNK_END) and counter.between_events
        return events

    def close(self) -> None:
        """The connection was closed."""
        if self.ended:
            return
        counter = self._counter
        early = "the connection ended before the reply did" if counter.status else "closed without a reply"
        self._finish(counter.end(None if self._reader.ends_with_connection else early))
        self.reusable = False

    def _on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._counter.status = status
        self._chunked = b"transfer-encoding" in dict(headers)

    def _finish(self, error: str | None) -> None:
        self.error, self.ended, self.in_stream = error, True, False
        self.reusable = self._reader.complete and self._reader.keeps_alive
