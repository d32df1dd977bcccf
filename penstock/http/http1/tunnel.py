"""An HTTP/1.1 connection that has become a WebSocket (status 101)."""

from __future__ import annotations

from asyncio import Protocol
from collections.abc import Callable
from typing import Any

from penstock.http.server_state import ServerState
from penstock.http.websocket.channel import Channel, ChannelUser
from penstock.http.write_target import WriteTarget


class Tunnel(Protocol):
    """The channel of a WebSocket, and one of the server's connections."""

    def __init__(
        self, transport: Any, state: ServerState, write_target: WriteTarget | None, *, write_paused: bool
    ) -> None:
        """``write_target``: None if rows cannot be written to the connection."""
        self._transport = transport
        self._state = state
        self._write_target = write_target
        self.write_paused = write_paused
        self._user: ChannelUser

    def open(self, use: Callable[[Channel], ChannelUser]) -> None:
        """Take the transport over from its protocol."""
        self._state.connections.add(self)
        self._transport.set_protocol(self)
        self._transport.resume_reading()
        self._user = use(self)

    # -- what the transport tells

    def data_received(self, data: bytes) -> None:
        self._user.on_data(data)

    def eof_received(self) -> bool:
        """The client is gone, or has answered the end: the transport closes."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self._write_target = None  # the socket is about to be closed; another connection may get its number
        self._user.on_lost()
        self._state.on_lost()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._user.on_pause()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._user.on_resume()

    # -- what the server asks: see ServedConnection

    @property
    def bytes_queued(self) -> int:
        return self.unread()

    @property
    def is_over(self) -> bool:
        return (self._user.is_over or self._transport.is_closing()) and not self.unread()

    def shutdown(self) -> None:
        self._user.shutdown()

    def cut_if_slow(self, now: float, request_timeout_s: float, keep_alive_s: float) -> None:
        self._user.check(now, request_timeout_s, keep_alive_s)

    # -- what the WebSocket asks: see Channel

    @property
    def state(self) -> ServerState:
        return self._state

    @property
    def write_target(self) -> WriteTarget | None:
        return None if self._transport.get_write_buffer_size() else self._write_target

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def unread(self) -> int:
        size: int = self._transport.get_write_buffer_size()
        return size

    def read_on(self, on: bool, /) -> None:
        if self._transport.is_closing():
            return
        if on:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def end(self) -> None:
        # Closing at once would reset the connection if the client still sends, and could destroy the end.
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
