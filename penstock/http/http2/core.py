"""One HTTP/2 connection (RFC 9113), at either end of it, without a socket.

:meth:`Http2Core.handle` takes frames. What concerns the connection alone is answered here: SETTINGS, PING,
the window that the peer may fill, and the rates of frames that carry nothing. What concerns streams or the
connection's end is told to :class:`ConnectionEvents`. What is sent goes through :class:`SendingHalf`.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from penstock.http.http2 import frames
from penstock.http.http2.block_assembler import Block, BlockAssembler, check_dependency
from penstock.http.http2.faults import ConnectionFault, ErrorCode, StreamFault
from penstock.http.http2.header_blocks import Field, HeaderDecoder, HeaderListTooLarge
from penstock.http.http2.peer_settings import PeerSettings
from penstock.http.http2.rates import (
    BYTES_PER_CONTROL,
    SETTINGS_BYTES_PER_CONTROL,
    WINDOWS_PER_CONTROL,
    control_limit,
    window_change_limit,
)
from penstock.http.http2.roles import Role

S = TypeVar("S")
_S = TypeVar("_S", contravariant=True)


class SendingHalf(Protocol[_S]):
    """Sends the frames of a connection, within the windows that the peer grants."""

    data_bytes: int
    """Bytes of content sent, ever."""

    def write(self, data: bytes, /) -> object:
        """Send complete frames."""
        ...

    def widen(self, stream: _S | None, increment: int) -> bool:
        """Count what the peer grants to a stream, or to all together, and send what has waited for it. Return
        whether the window stays below its maximum."""
        ...

    def change_initial_window(self, difference: int) -> bool:
        """Change the windows of all streams. Return whether they stay below the maximum."""
        ...


class ConnectionEvents(Protocol[_S]):
    """The owner of a connection. Each method may raise ConnectionFault, and StreamFault where it is about a
    stream; ``stream`` is None where the stream has ended."""

    def on_headers(self, stream_id: int, fields: list[Field] | None, size: int, *, last: bool) -> None:
        """A header block of ``size`` bytes; ``fields`` is None where they are more than allowed. A server's
        streams begin with it."""
        ...

    def on_data(self, stream_id: int, stream: _S | None, content: bytes, size: int, *, last: bool) -> None:
        """Content; ``size`` is what it takes from the window of the stream."""
        ...

    def on_reset(self, stream_id: int, stream: _S | None, code: int) -> None: ...

    def on_stream_fault(self, fault: StreamFault) -> None:
        """The peer has violated the protocol within one stream."""
        ...

    def on_settings(self) -> None:
        """The peer's SETTINGS are applied and acknowledged."""
        ...

    def on_goaway(self, last_id: int, code: int, debug: bytes) -> None: ...

    def on_ping_ack(self, payload: bytes) -> None: ...


class Http2Core(Generic[S]):
    """The state of one connection but for its streams' contents."""

    __slots__ = (
        "_control",
        "_decoder",
        "_events",
        "_role",
        "_sender",
        "_window_changes",
        "blocks",
        "greeted",
        "is_over",
        "last_id",
        "now",
        "receive_window",
        "settings",
        "streams",
    )

    def __init__(
        self,
        role: Role,
        streams: dict[int, S],
        sender: SendingHalf[S],
        events: ConnectionEvents[S],
        now: float,
    ) -> None:
        self._role = role
        self.streams = streams
        """Open streams by id."""
        self._sender = sender
        self._events = events
        self.now = now
        """The time, as its owner has set it before the latest frames."""
        self.settings = PeerSettings(is_client=role.is_client)
        self.greeted = False
        """Whether the peer's first frame has come, its SETTINGS."""
        self.is_over = False
        """Whether frames are ignored, as the connection has ended."""
        self.last_id = -1 if role.is_client else 0
        """The latest stream that was opened."""
        self.receive_window = role.receive_window
        """Bytes of content that the peer may send."""
        self.blocks = BlockAssembler(role.max_block_bytes, role.max_block_frames)
        self._decoder = HeaderDecoder()
        self._control = control_limit(now, role.control_burst)
        self._window_changes = window_change_limit(now, role.window_changes)

    def open(self, stream: S) -> int:
        """Open a client's next stream. Return its id."""
        self.last_id += 2
        self.streams[self.last_id] = stream
        return self.last_id

    def end(self) -> None:
        """Ignore what comes from here on."""
        if not self.is_over:
            self.is_over = True
            self.blocks.clear()
            del self._events  # breaks a reference cycle

    # -- what comes

    def handle(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Handle a frame. Raises ConnectionFault."""
        if self.is_over:
            return
        unfinished = self.blocks.stream_id
        if unfinished and (kind != frames.CONTINUATION or stream_id != unfinished):
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted by another frame")
        if not self.greeted:
            if kind != frames.SETTINGS or flags & frames.ACK:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self.greeted = True
        try:
            if kind == frames.DATA:
                self._on_data(flags, stream_id, payload)
            elif kind == frames.HEADERS:
                self._on_block(self.blocks.on_headers(flags, stream_id, payload))
            elif kind == frames.WINDOW_UPDATE:
                self._on_window_update(stream_id, payload)
            elif kind == frames.RST_STREAM:
                self._on_reset(stream_id, payload)
            else:
                self._control.spend(self.now, self._sender.data_bytes // BYTES_PER_CONTROL)
                self._on_control(kind, flags, stream_id, payload)
        except StreamFault as fault:
            if not self.is_over:
                self._events.on_stream_fault(fault)

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        stream = self.streams.get(stream_id)
        if stream is None:
            self.check_opened(stream_id, "DATA")
        size = len(payload)
        self.receive_window -= size
        if self.receive_window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "DATA beyond the connection's window")
        if self.receive_window < self._role.receive_window // 2:
            self.refill()
        content = frames.without_padding(flags, payload) if flags & frames.PADDED else payload
        last = bool(flags & frames.END_STREAM)
        if len(content) < self._role.small_data and not last:
            self._control.spend(self.now, self._sender.data_bytes // BYTES_PER_CONTROL)
        self._events.on_data(stream_id, stream, content, size, last=last)

    def _on_block(self, complete: Block | None) -> None:
        """Decode a header block; None: it is not complete yet."""
        if complete is None:
            return
        flags, stream_id, block = complete
        role, size = self._role, len(block)
        if size >= role.header_bytes_per_control:
            self.spend_control(size // role.header_bytes_per_control)
        try:
            fields = self._decoder.decode(block, role.max_header_bytes, role.max_headers)
        except HeaderListTooLarge:
            fields = None
        self._events.on_headers(stream_id, fields, size, last=bool(flags & frames.END_STREAM))

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        increment = frames.unpack_long(payload, "WINDOW_UPDATE") & frames.STREAM_BITS
        self._control.spend(self.now, self._sender.data_bytes // BYTES_PER_CONTROL)
        stream = self.streams.get(stream_id)
        if stream is None and stream_id:
            self.check_opened(stream_id, "WINDOW_UPDATE")
            return
        if not increment:
            raise _fault(stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
        if not self._sender.widen(stream, increment):
            raise _fault(stream_id, ErrorCode.FLOW_CONTROL_ERROR, "WINDOW_UPDATE beyond 2^31-1")

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        code = frames.unpack_long(payload, "RST_STREAM")
        stream = self.streams.get(stream_id)
        if stream is None:
            self.check_opened(stream_id, "RST_STREAM")
            self.spend_control()
        self._events.on_reset(stream_id, stream, code)

    def _on_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.CONTINUATION:
            self._on_block(self.blocks.on_continuation(flags, stream_id, payload))
        elif kind == frames.PRIORITY:
            if not stream_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY without a stream")
            if len(payload) != 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "the length of PRIORITY is not 5")
            check_dependency(stream_id, payload)
        elif kind == frames.PUSH_PROMISE:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a push, which nobody has asked for")
        elif kind in _OF_CONNECTION:
            if stream_id:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{_OF_CONNECTION[kind]} on a stream")
            if kind == frames.SETTINGS:
                self._on_settings(flags, payload)
            elif kind == frames.GOAWAY:
                self._events.on_goaway(*frames.unpack_goaway(payload))
            elif len(payload) != 8:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "the length of PING is not 8")
            elif flags & frames.ACK:
                self._events.on_ping_ack(payload)
            else:
                self._sender.write(frames.ping(payload, ack=True))

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if payload:
                text = "an acknowledgement of SETTINGS has settings"
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, text)
            return
        before = self.settings.initial_window
        self.settings.apply(payload)
        difference = self.settings.initial_window - before
        windows = len(self.streams) // WINDOWS_PER_CONTROL if difference else 0
        self.spend_control(windows + len(payload) // SETTINGS_BYTES_PER_CONTROL)
        if difference:
            self._window_changes.spend(self.now, 0)
            if not self._sender.change_initial_window(difference):
                text = "SETTINGS raise a window above 2^31-1"
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, text)
        self._sender.write(frames.SETTINGS_ACK)
        self._events.on_settings()

    # -- for the owner

    def check_opened(self, stream_id: int, name: str) -> None:
        """Check that the stream has been opened. Raises ConnectionFault for a frame that is ahead of it."""
        if not stream_id or stream_id > self.last_id or not stream_id & 1:
            text = f"{name} on stream {stream_id}, which was not opened"
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, text)

    def spend_control(self, count: int = 1) -> None:
        """Count frames that carry nothing, or hardly anything, or what takes as long. Raises ConnectionFault
        if there are too many of them."""
        self._control.spend(self.now, self._sender.data_bytes // BYTES_PER_CONTROL, count)

    def refill(self) -> None:
        """Open the window of the connection again."""
        size = self._role.receive_window
        self._sender.write(frames.window_update(0, size - self.receive_window))
        self.receive_window = size


_OF_CONNECTION = {frames.SETTINGS: "SETTINGS", frames.PING: "PING", frames.GOAWAY: "GOAWAY"}


def _fault(stream_id: int, code: ErrorCode, reason: str) -> ConnectionFault | StreamFault:
    """The fault of a frame that may be about a stream, or about the connection (0)."""
    return StreamFault(stream_id, code, reason) if stream_id else ConnectionFault(code, reason)
