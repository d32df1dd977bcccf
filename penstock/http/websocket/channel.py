"""What a WebSocket runs over: an HTTP/1.1 connection that was upgraded, or a stream of HTTP/2."""

from __future__ import annotations

from typing import Protocol

from penstock.http.server_state import ServerState
from penstock.http.write_target import WriteTarget


class Channel(Protocol):
    """Bytes in both directions, from the handshake on."""

    @property
    def state(self) -> ServerState: ...

    @property
    def write_paused(self) -> bool:
        """Whether the client reads too slowly to be sent more."""
        ...

    @property
    def write_target(self) -> WriteTarget | None:
        """As :attr:`penstock.http.sink.EventSink.write_target`, for messages."""
        ...

    def write(self, data: bytes) -> None:
        """Write, never blocking; ignored once the client has gone."""
        ...

    def unread(self) -> int:
        """Bytes that wait for the client."""
        ...

    def read_on(self, on: bool, /) -> None:
        """Read from the client, or leave what it sends with it."""
        ...

    def end(self) -> None:
        """Close once all that was written is sent."""
        ...

    def abort(self) -> None:
        """Close now; what was not sent is lost."""
        ...


class ChannelUser(Protocol):
    """Told what happens to a channel, by the connection that has it."""

    @property
    def is_over(self) -> bool:
        """Whether it only waits for its client to close."""
        ...

    def on_data(self, data: bytes) -> None: ...

    def on_lost(self) -> None:
        """The channel is closed."""
        ...

    def on_pause(self) -> None:
        """The client reads too slowly."""
        ...

    def on_resume(self) -> None: ...

    def check(self, now: float, request_timeout_s: float, keep_alive_s: float) -> None:
        """Called once a second: end the channel if its client is too slow or gone."""
        ...

    def shutdown(self) -> None:
        """The server ends: close now if idle, else after what runs."""
        ...
