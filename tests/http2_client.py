"""An HTTP/2 client without a socket: requests over one connection, whose server must keep to every window.

It goes on after GOAWAY, which the library h2 cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import hpack

from penstock.http.http2.faults import ConnectionFault, ErrorCode
from penstock.http.http2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_FRAME_SIZE,
    DEFAULT_WINDOW,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    WINDOW_UPDATE,
    FrameScanner,
    frame,
    ping,
    rst_stream,
    settings_frame,
    unpack_goaway,
    unpack_long,
    unpack_settings,
    window_update,
    without_padding,
)

JSON = (b"content-type", b"application/json")


class Reply(Protocol):
    """What receives the reply to a request. :meth:`end` or :meth:`cut` comes last."""

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def on_body(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def cut(self, reason: str, *, refused: bool) -> None:
        """``refused``: the server says that it has not begun the request (RFC 9113 §8.7)."""


class _Stream:
    def __init__(self, reply: Reply, body: bytes, send_window: int, window: int) -> None:
        self.reply = reply
        self.unsent = body
        self.send_window = send_window
        self.window = window
        """Bytes that the server may still send."""
        self.withheld = 0
        """Bytes that came and were not granted again."""
        self.held = False
        self.status = 0


class Http2Client:
    """One connection; :meth:`take_output` gives what is to be sent, also before the first request."""

    def __init__(self, authority: str, window: int = DEFAULT_WINDOW) -> None:
        """``window``: of each stream, in bytes."""
        self._authority = authority.encode()
        self._initial_window = window
        settings = settings_frame({ENABLE_PUSH: 0, INITIAL_WINDOW_SIZE: window})
        self._output = [PREFACE, settings]
        self._scanner = FrameScanner()
        self._decoder = hpack.Decoder()
        self._encoder = hpack.Encoder()
        self._block = b""
        self._next = 1
        self._streams: dict[int, _Stream] = {}
        self._window = DEFAULT_WINDOW
        self._send_window = DEFAULT_WINDOW
        self._send_initial = DEFAULT_WINDOW
        self.last_ids: list[int] = []
        """Of the GOAWAY frames that have come."""
        self.pings = 0
        """Acknowledgements."""
        self.failure = ""
        """Why the connection is of no use any more."""

    @property
    def running(self) -> int:
        return len(self._streams)

    @property
    def usable(self) -> bool:
        """Whether the server takes further requests."""
        return not (self.failure or self.last_ids)

    def take_output(self) -> bytes:
        output = b"".join(self._output)
        self._output.clear()
        return output

    # -- requests

    def start(
        self,
        path: str,
        body: bytes,
        reply: Reply,
        *,
        ends: bool = True,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> int:
        """Returns the stream's id. Without ``ends`` the body is missing. ``headers``: further ones."""
        number, self._next = self._next, self._next + 2
        fields = [
            (b":method", b"POST" if body or not ends else b"GET"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", self._authority),
            *headers,
        ]
        if body:
            fields += [JSON, (b"content-length", b"%d" % len(body))]
        flags = END_HEADERS if body or not ends else END_HEADERS | END_STREAM
        self._output.append(frame(HEADERS, flags, number, self._encoder.encode(fields)))
        self._streams[number] = _Stream(reply, body, self._send_initial, self._initial_window)
        self._send_bodies()
        return number

    def reset(self, stream: int, code: ErrorCode = ErrorCode.CANCEL) -> None:
        """The client wants no more of the reply, if it has not ended."""
        if self._streams.pop(stream, None) is not None:
            self._output.append(rst_stream(stream, code))

    def change_window(self, window: int) -> None:
        """New SETTINGS: the windows of all streams change by the same."""
        for stream in self._streams.values():
            stream.window += window - self._initial_window
        self._initial_window = window
        self._output.append(settings_frame({INITIAL_WINDOW_SIZE: window}))

    def write(self, frames: bytes) -> None:
        """Send something else."""
        self._output.append(frames)

    def ping(self) -> None:
        self._output.append(ping(b"12345678"))

    def hold(self, stream: int) -> None:
        """Grant no window for this stream."""
        self._streams[stream].held = True

    def open(self, stream: int) -> None:
        """Grant its window again."""
        found = self._streams.get(stream)
        if found is not None:
            found.held = False
            self._grant(stream, found)

    def lost(self, reason: str = "the connection is closed") -> None:
        """The connection has ended."""
        self.failure = self.failure or reason
        for number in list(self._streams):
            self._streams.pop(number).reply.cut(self.failure, refused=False)

    # -- what comes

    def feed(self, data: bytes) -> None:
        if self.failure:
            return
        try:
            self._scanner.receive(data)
            for each in self._scanner.take_frames(1_000_000):
                self._take(*each)
        except (ConnectionFault, hpack.HPACKError) as fault:
            self._output.append(frame(GOAWAY, 0, 0, bytes(8)))
            self.lost(f"the server broke the protocol: {fault}")

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block and kind != CONTINUATION:
            raise _fault("a header block is interrupted")
        if kind == DATA:
            self._take_data(flags, number, payload)
        elif kind in (HEADERS, CONTINUATION):
            self._block += without_padding(flags, payload) if kind == HEADERS else payload
            if flags & END_HEADERS:
                self._take_head(number, self._block, last=bool(flags & END_STREAM))
                self._block = b""
        elif kind == RST_STREAM:
            code = ErrorCode(unpack_long(payload, "RST_STREAM"))
            stream = self._streams.pop(number, None)
            if stream is not None:
                stream.reply.cut(code.name, refused=code is ErrorCode.REFUSED_STREAM)
        elif kind == SETTINGS and not flags & ACK:
            self._take_settings(payload)
        elif kind == PING:
            self.pings += flags & ACK
            if not flags & ACK:
                self._output.append(ping(payload, ack=True))
        elif kind == WINDOW_UPDATE:
            self._take_window(number, unpack_long(payload, "WINDOW_UPDATE"))
        elif kind == GOAWAY:
            self._take_goaway(payload)

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._window -= size
        if self._window < 0:
            raise _fault(f"DATA {-self._window} bytes beyond the connection's window")
        if self._window < DEFAULT_WINDOW // 2:
            self._output.append(window_update(0, DEFAULT_WINDOW - self._window))
            self._window = DEFAULT_WINDOW
        stream = self._streams.get(number)
        if stream is None:
            self._check_known(number)
            return  # it was reset
        if not stream.status:
            raise _fault("DATA before HEADERS")
        stream.window -= size
        stream.withheld += size
        if stream.window < 0:
            raise _fault(f"DATA {-stream.window} bytes beyond the window of a stream")
        stream.reply.on_body(without_padding(flags, payload))
        if flags & END_STREAM:
            self._end(number)
        elif not stream.held and stream.withheld > self._initial_window // 2:
            self._grant(number, stream)

    def _grant(self, number: int, stream: _Stream) -> None:
        if stream.withheld:
            self._output.append(window_update(number, stream.withheld))
            stream.window += stream.withheld
            stream.withheld = 0

    def _take_head(self, number: int, block: bytes, *, last: bool) -> None:
        headers: dict[bytes, bytes] = dict(self._decoder.decode(block, raw=True))
        stream = self._streams.get(number)
        if stream is None:
            self._check_known(number)
            return
        status = int(headers[b":status"])
        if status < 200:
            return
        if stream.status:
            raise _fault("a second reply to a request")
        stream.status = status
        stream.reply.begin(status, headers)
        if last:
            self._end(number)

    def _end(self, number: int) -> None:
        stream = self._streams.pop(number)
        if stream.unsent:
            self._output.append(rst_stream(number, ErrorCode.NO_ERROR))
        stream.reply.end()

    def _check_known(self, number: int) -> None:
        if number >= self._next or not number & 1:
            raise _fault(f"a reply on stream {number}, which is idle")

    def _take_settings(self, payload: bytes) -> None:
        self._output.append(SETTINGS_ACK)
        for name, value in unpack_settings(payload):
            if name == INITIAL_WINDOW_SIZE:
                for stream in self._streams.values():
                    stream.send_window += value - self._send_initial
                self._send_initial = value
        self._send_bodies()

    def _take_window(self, number: int, by: int) -> None:
        if not number:
            self._send_window += by
        elif number in self._streams:
            self._streams[number].send_window += by
        self._send_bodies()

    def _take_goaway(self, payload: bytes) -> None:
        last, code, debug = unpack_goaway(payload)
        self.last_ids.append(last)
        reason = f"GOAWAY {ErrorCode(code).name} {debug.decode()}"
        for number in [each for each in self._streams if each > last]:
            self._streams.pop(number).reply.cut(reason, refused=True)
        if code != ErrorCode.NO_ERROR:
            self.lost(reason)

    def _send_bodies(self) -> None:
        for number, stream in self._streams.items():
            while stream.unsent:
                size = min(len(stream.unsent), stream.send_window, self._send_window, DEFAULT_FRAME_SIZE)
                if size <= 0:
                    break
                piece, stream.unsent = stream.unsent[:size], stream.unsent[size:]
                stream.send_window -= size
                self._send_window -= size
                self._output.append(frame(DATA, 0 if stream.unsent else END_STREAM, number, piece))


def _fault(text: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.PROTOCOL_ERROR, text)
