"""A client of raw bytes, which checks that every request gets exactly one reply."""

from __future__ import annotations

import json
import socket
from typing import Any, NamedTuple, Self

import httpx

KEY = "topsecretkey"
HEAD = b"Host: x\r\nAuthorization: Bearer topsecretkey\r\n"
"""Headers of every proper request."""
PROBE = b"GET /version HTTP/1.1\r\n" + HEAD + b"\r\n"


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        text: str = json.loads(self.body)["error"]["message"]
        return text

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"


class RawClient:
    """One connection. A context."""

    def __init__(self, url: str, *, receive_buffer: int = 0, timeout_s: float = 20.0) -> None:
        address = httpx.URL(url)
        assert address.port is not None
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout_s)
        self.socket.connect((address.host, address.port))
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def end_sending(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def reply(self, *, bodyless: bool = False) -> Reply:
        """The next reply, without interim ones. Raises AssertionError if the connection ends before it."""
        while True:
            head, self._unread = self._through(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")[:-2]
            status = int(first.split(" ")[1])
            if status >= 200:
                break
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = b""
        if bodyless or status == 204:
            pass
        elif "content-length" in headers:
            body = self._exactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            while size := int(self._line(), 16):
                body += self._exactly(size)
                assert self._line() == b""
            assert self._line() == b""
        else:
            body = self.rest()
        return Reply(status, headers, body)

    def rest(self) -> bytes:
        """What comes until the server closes."""
        data, self._unread = self._unread, b""
        while more := self.socket.recv(1 << 16):
            data += more
        return data

    def _line(self) -> bytes:
        line, self._unread = self._through(b"\r\n")
        return line[:-2]

    def _through(self, end: bytes) -> tuple[bytes, bytes]:
        while end not in self._unread:
            self._more()
        at = self._unread.index(end) + len(end)
        return self._unread[:at], self._unread[at:]

    def _exactly(self, size: int) -> bytes:
        while len(self._unread) < size:
            self._more()
        data, self._unread = self._unread[:size], self._unread[size:]
        return data

    def _more(self) -> None:
        data = self.socket.recv(1 << 16)
        assert data, f"the connection ended after {self._unread[:200]!r}"
        self._unread += data


def one_reply(url: str, sent: bytes, *, bodyless: bool = False) -> Reply:
    """The reply to ``sent``. Checks that it is the only one, and that the next request is answered: on the
    same connection unless the reply closes it."""
    with RawClient(url) as client:
        client.send(sent)
        reply = client.reply(bodyless=bodyless)
        if reply.closes:
            assert client.rest() == b"", "a reply too many"
        else:
            client.send(PROBE.replace(b"Host: x", b"Host: x\r\nConnection: close"))
            assert client.reply().status == 200
            assert client.rest() == b"", "a reply too many"
    with RawClient(url) as client:
        client.send(PROBE)
        assert client.reply().status == 200
    return reply


def post(body: bytes | dict[str, Any], *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    """A proper POST with additional header lines."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    more = b"".join(line + b"\r\n" for line in headers)
    return b"POST %b HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n%b" % (
        path,
        HEAD,
        len(data),
        more,
        data,
    )
