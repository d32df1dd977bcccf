"""A stream of an HTTP/2 connection that has become a WebSocket (RFC 8441): DATA frames carry its bytes."""

from __future__ import annotations

from typing import Protocol

from penstock.http.http2.faults import ErrorCode
from penstock.http.server_state import ServerState
from penstock.http.websocket.channel import ChannelUser


class TunnelStream(Protocol):
    """The stream, as its tunnel sees it."""

    @property
    def write_paused(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    def unread(self) -> int: ...

    def finish(self) -> None: ...

    def reset(self, code: ErrorCode) -> None: ...

    def on_body_wanted(self) -> None: ...


class StreamTunnel:
    """The channel of a WebSocket, and the listener of its stream."""

    __slots__ = ("_reads", "_stream", "state", "user")

    write_target = None
    """Rows are written by :meth:`write`: a message is one frame in another."""

    def __init__(self, stream: TunnelStream, state: ServerState) -> None:
        self._stream = stream
        self.state = state
        self._reads = True
        self.user: ChannelUser
        """Set at once."""

    # -- what the stream tells

    def on_data(self, data: bytes, *, last: bool) -> None:
        """A DATA frame; ``last``: the client sends nothing more, and is gone."""
        self.user.on_data(data)
        if last:
            self.user.on_lost()
            self._stream.finish()
        elif self._reads:
            self._stream.on_body_wanted()

    def on_disconnect(self) -> None:
        self.user.on_lost()

    def on_pause(self) -> None:
        self.user.on_pause()

    def on_resume(self) -> None:
        self.user.on_resume()

    # -- what the WebSocket asks: see Channel

    @property
    def write_paused(self) -> bool:
        return self._stream.write_paused

    def write(self, data: bytes) -> None:
        if data:
            self._stream.write(data)

    def unread(self) -> int:
        return self._stream.unread()

    def read_on(self, on: bool, /) -> None:
        """What the client sends beyond its window, which is not opened, breaks the protocol."""
        self._reads = on
        if on:
            self._stream.on_body_wanted()

    def end(self) -> None:
        self._stream.finish()

    def abort(self) -> None:
        self._stream.reset(ErrorCode.CANCEL)
