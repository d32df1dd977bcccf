"""One request to a model server and its reply, whichever version of HTTP carries them.

Replies come as callbacks: streams are relayed from the callback that reads them, without a task or queue in
between. Common clients hand bodies to a coroutine, so none of them is used here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from penstock.gateway.upstream.reply_scanner import PlainEventRelay, PlainEventShape

Headers = list[tuple[bytes, bytes]]

PIECE_BYTES = 4 << 10
"""Bytes that are processed at a time. The loop reads up to 256 KiB at once: half a second for tiny events."""
TURN_S = 0.002
"""A piece after which processing has taken longer is the connection's last one in this turn of the loop."""
IDLE_S = 30.0
"""Seconds that an idle connection is kept; below the 75 s and 60 s of common servers."""
IDLE_CLOSE_S = 0.2
"""Seconds within which a connection that the server has closed answers a request with a reset: a round trip
and a busy turn. One that breaks later may have run the request."""


class UpstreamError(ConnectionError):
    """No connection to the endpoint, or it broke."""


class Failure(enum.Enum):
    """Why a reply is not complete."""

    NETWORK = enum.auto()
    """The connection broke, or the server violated the protocol."""
    SERVER = enum.auto()
    """The server has said that it failed, on a connection that goes on."""
    IDLE_CLOSED = enum.auto()
    """A connection that was idle broke as it got the request. Most likely the server had closed it before; or
    the request has broken the server."""
    UNPROCESSED = enum.auto()
    """The server has not processed the request, as it says, or as its connection shows."""


class UpstreamRequest(NamedTuple):
    """A request for a model server."""

    method: bytes
    target: bytes
    """Path and query."""
    headers: Sequence[tuple[bytes, bytes]]
    """End-to-end headers. Host and content-length are replaced; expect is dropped because the body is sent
    without waiting for 100 (Continue)."""
    body: bytes
    rest: int | None = 0
    """Bytes of the body that follow by :meth:`Exchange.send_part`; None: their number is unknown."""


class ReplyReceiver(Protocol):
    """Gets one reply: on_head, any number of on_body, then on_end or on_broken."""

    def on_head(self, status: int, headers: Headers) -> None: ...

    def on_body(self, data: bytes, now: float) -> None:
        """The next content, without transfer encoding, at most :data:`PIECE_BYTES`; ``now`` is the time of
        the event loop."""
        ...

    def on_end(self) -> None: ...

    def on_broken(self, reason: str, failure: Failure) -> None:
        """The reply ends before it is complete. Not called after :meth:`Exchange.abort`."""
        ...


class Exchange(Protocol):
    """A connection of HTTP/1.1, or a stream of one of HTTP/2, that takes a request."""

    def send(self, request: UpstreamRequest, receiver: ReplyReceiver) -> None:
        """Send a request. ``receiver`` gets the reply, or on_broken if the connection broke before."""
        ...

    async def send_part(self, data: bytes) -> None:
        """Send the next part of a body that has a ``rest``, once the server has taken most of those before;
        empty: the body is complete. Without effect after the end of the exchange."""
        ...

    def abort(self) -> None:
        """Discard the rest of the reply; the server is told."""
        ...

    def pause(self, receiver: ReplyReceiver) -> None:
        """Stop the reply. Ignored unless ``receiver`` gets it: its client may still be slow when a connection
        already carries another request."""
        ...

    def resume(self, receiver: ReplyReceiver) -> None:
        """Continue after :meth:`pause`."""
        ...

    def enter_fast_path(self, shape: PlainEventShape, relay: PlainEventRelay, size: int) -> int:
        """From here on plain events go to ``relay`` instead of on_body. Returns how many bytes of them may
        come before the fast path has to be left, so that the window is opened again; 0: there is no fast
        path. ``size``: of an event that on_body got, and that counts as the first of them."""
        ...

    def leave_fast_path(self, relayed: int) -> None:
        """Plain events go to on_body again. ``relayed``: bytes that came by the fast path."""
        ...


def port_of(url: str) -> int:
    """The port of a URL, or its scheme's default. Raises ValueError for an invalid port."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Headers that apply to one connection only (RFC 9110 §7.6.1)."""
REPLACED = frozenset((b"host", b"content-length", b"expect"))
"""Headers of a request that are not sent as they are."""


def without_hop_by_hop(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """The end-to-end headers: without hop-by-hop headers, and without those that ``connection`` names."""
    if _HOP_BY_HOP.isdisjoint([name for name, _ in headers]):
        return list(headers)
    named = {
        token.strip().lower()
        for name, value in headers
        if name == b"connection"
        for token in value.split(b",")
    }
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP and name not in named]
