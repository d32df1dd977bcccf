"""A request without a connection: what an application reads is given, what it sends is kept."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.http.http1.request_head import RequestHead
from penstock.http.request import HttpRequest, first_values
from penstock.http.sink import EVENT_STREAM, Headers, Listener, StreamKind
from penstock.http.write_target import WriteTarget


class FakeSink:
    """A connection whose client reads."""

    write_target: WriteTarget | None = None
    write_paused = False

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        """Of the reply, without those that the connection adds."""
        self.parts = list[bytes]()
        """What was written of the body."""
        self.ended = ""
        """How the body ended: finish or cut; empty while it goes on."""

    def listen(self, listener: Listener) -> None:
        self.listener = listener

    def release(self, kept: int = 0) -> None:
        pass

    def unread(self) -> int:
        return 0

    def on_body_wanted(self) -> None:
        pass

    def begin(self, status: int, headers: Headers) -> None:
        assert not self.status, "a second reply"
        self.status, self.headers = status, dict(headers)

    def reply(self, status: int, headers: Headers, body: bytes) -> None:
        self.begin(status, headers)
        self.parts.append(body)
        self.finish()

    def write_body(self, data: bytes) -> None:
        assert self.status, "a body without a head"
        assert data, "an empty part of a body"
        self.parts.append(data)

    def finish(self) -> None:
        assert not self.ended, "a second end"
        self.ended = "finish"

    def cut(self) -> None:
        self.ended = "cut"

    def send(self, data: bytes, *, last: bool, kind: StreamKind = EVENT_STREAM) -> None:
        if not self.status:
            self.begin(200, [])
        self.write(data)
        if last:
            self.finish()

    def write(self, data: bytes) -> None:
        self.parts.append(data)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)


def http_request(
    method: str = "GET",
    target: bytes = b"/x",
    headers: Sequence[tuple[bytes, bytes]] = (),
    body: bytes = b"",
    *,
    client: tuple[str, int] | None = None,
    sink: FakeSink | None = None,
) -> HttpRequest:
    """A request with its whole body."""
    head = RequestHead(
        method=method,
        path=target.partition(b"?")[0].decode("latin-1"),
        target=target,
        version="1.1",
        headers=list(headers),
        fields=first_values(headers),
        length=len(body),
        keep_alive=True,
        expects_continue=False,
    )
    request = HttpRequest(head, sink or FakeSink(), client)
    request.add_body(body)
    request.body_complete = True
    return request


def replied(request: HttpRequest) -> FakeSink:
    """The sink of a request of :func:`http_request`, with its reply."""
    assert isinstance(request.sink, FakeSink)
    return request.sink
