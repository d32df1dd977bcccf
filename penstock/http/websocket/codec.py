"""Messages and control frames of one WebSocket connection (RFC 6455), for a server and for a client.

A codec gets bytes and makes bytes; it knows no socket. Whoever has one writes what :meth:`Codec.text` and the
like return, and gives it what comes::

    codec = Codec(client=True, max_bytes=limit)     # a client, after check_accepted of the handshake
    transport.write(codec.text(b'{"type":"response.create"}'))

    def data_received(data):
        codec.receive(data)
        try:
            while True:
                for event in codec.events():        # Text, Ping, Pong, Closed
                    ...                             # answer a Ping with codec.pong(event.payload)
                if not codec.has_more:
                    break
                # there is more: let others take a turn of the event loop, and read no more meanwhile
        except ProtocolFault as fault:
            transport.write(codec.close(fault.code, fault.reason))   # and close the connection

The states of frames are wsproto's, which takes 5 us per frame that comes. Heads of a server's messages are
made here: it writes thousands per second, and wsproto takes 2 us for each. It is imported for the first
connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

if TYPE_CHECKING:  # a server without WebSockets does without
    from wsproto.frame_protocol import FrameProtocol, Opcode

FRAMES_PER_TURN = 256
"""Frames that are parsed at a time: 1 to 2 ms."""
MAX_REASON = 123
"""Bytes of the reason in a close frame."""
ENDED, GOING_AWAY, PROTOCOL_ERROR, NOT_TEXT, NO_STATUS = 1000, 1001, 1002, 1003, 1005
POLICY, TOO_BIG, FAILED, RESTARTS, TRY_LATER = 1008, 1009, 1011, 1012, 1013
"""Close codes (RFC 6455 §7.4.1, and IANA's registry)."""


class Text(NamedTuple):
    """A whole text message."""

    data: bytes
    """UTF-8."""


class Ping(NamedTuple):
    """To be answered by a pong with the same payload."""

    payload: bytes


class Pong(NamedTuple):
    payload: bytes


class Closed(NamedTuple):
    """The peer has closed; nothing follows. To be answered by a close frame unless one was sent."""

    code: int
    """1005: it named none."""
    reason: str


Event: TypeAlias = Text | Ping | Pong | Closed


class ProtocolFault(Exception):
    """The peer has broken the protocol or a limit: the connection ends with this close code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Codec:
    """The codec of one connection, in either role. No extension is known: messages are not compressed."""

    __slots__ = (
        "_client",
        "_fed",
        "_frames",
        "_max_bytes",
        "_message",
        "close_sent",
        "has_more",
        "parsed",
        "stopped",
    )

    def __init__(self, *, client: bool, max_bytes: int) -> None:
        """``max_bytes``: of a message that is received, whole, however fragmented."""
        self._client = client
        self._max_bytes = max_bytes
        self._frames = self._new_frames()
        self._message = bytearray()
        """What has come of a message."""
        self._fed = 0
        """Bytes that may wait unparsed."""
        self.has_more = False
        """Whether another call of :meth:`events` may find more without further bytes."""
        self.parsed = 0
        """Frames of the latest call of :meth:`events`."""
        self.close_sent = self.stopped = False

    def _new_frames(self) -> FrameProtocol:
        from wsproto.frame_protocol import FrameProtocol

        return FrameProtocol(self._client, [])

    # -- what comes

    @property
    def held(self) -> int:
        """Bytes of messages that are not complete, and that are not parsed, at most."""
        return len(self._message) + self._fed

    def receive(self, data: bytes) -> None:
        if self.stopped:
            return
        self._frames.receive_bytes(data)
        self._fed += len(data)
        self.has_more = True

    def events(self) -> list[Event]:
        """What has come, of at most :data:`FRAMES_PER_TURN` frames. Raises ProtocolFault once; what came
        before it in this turn is lost, and nothing more is to be received."""
        from wsproto.frame_protocol import ParseFailed

        found: list[Event] = []
        self.parsed = 0
        try:
            for frame in self._frames.received_frames():
                event = self._event(frame.opcode, frame.payload, whole=frame.message_finished)
                if event is not None:
                    found.append(event)
                self.parsed += 1
                if self.parsed == FRAMES_PER_TURN:
                    return found
        except ParseFailed as error:
            raise ProtocolFault(int(error.code), str(error)) from None
        self._fed, self.has_more = 0, False
        return found

    def stop(self) -> None:
        """Forget what has come, and ignore what still comes."""
        self.stopped = True
        self._frames = self._new_frames()
        self._message = bytearray()
        self._fed, self.has_more = 0, False

    def _event(self, opcode: Opcode, payload: bytes | str | tuple[int, str], *, whole: bool) -> Event | None:
        from wsproto.frame_protocol import Opcode

        match opcode:
            case Opcode.TEXT:
                self._message += cast("str", payload).encode()
                if len(self._message) > self._max_bytes:
                    raise ProtocolFault(TOO_BIG, f"A message is larger than {self._max_bytes} bytes.")
                if whole:
                    message, self._message = bytes(self._message), bytearray()
                    return Text(message)
                return None
            case Opcode.PING:
                return Ping(cast("bytes", payload))
            case Opcode.PONG:
                return Pong(cast("bytes", payload))
            case Opcode.CLOSE:
                code, reason = cast("tuple[int, str]", payload)
                return Closed(int(code), reason)
        raise ProtocolFault(NOT_TEXT, "Messages are text; a binary one has come.")

    # -- what is sent

    def text(self, data: bytes) -> bytes:
        """``data``, UTF-8, as one message."""
        if not self._client:
            return text_head(len(data)) + data
        return bytes(self._frames.send_data(data.decode()))

    def ping(self, payload: bytes = b"") -> bytes:
        return bytes(self._frames.ping(payload))

    def pong(self, payload: bytes) -> bytes:
        return bytes(self._frames.pong(payload))

    def close(self, code: int, reason: str = "") -> bytes:
        """The close frame, after which nothing may be sent; empty if it was sent before."""
        if self.close_sent:
            return b""
        self.close_sent = True
        return bytes(self._frames.close(None if code == NO_STATUS else code, reason or None))


def text_head(size: int) -> bytes:
    """What precedes a text message of ``size`` bytes that a server sends as one frame."""
    return frame_head(size, first=True, last=True)


def frame_head(size: int, *, first: bool, last: bool) -> bytes:
    """What precedes a frame of ``size`` bytes of a server's text message: its first or last frame, or one
    between them."""
    start = (0x80 if last else 0) | first
    if size < 126:
        return bytes((start, size))
    if size < 1 << 16:
        return b"%c\x7e%b" % (start, size.to_bytes(2, "big"))
    return b"%c\x7f%b" % (start, size.to_bytes(8, "big"))
