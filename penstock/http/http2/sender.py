"""Sends the frames of one HTTP/2 connection: what is urgent at once, large replies in turns behind it.

Rows, events, heads and control frames go to the transport as they come, joined per turn of the event loop.
What does not fit into one frame or a window waits in its stream (:class:`HeldStream`): held streams take
turns, a frame each, and no more than :data:`BULK_BYTES` of the transport, so a row never waits behind a large
reply.
"""

from __future__ import annotations

from asyncio import get_running_loop
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from penstock.http.http2 import frames
from penstock.http.http2.flow_windows import FlowWindows

BULK_BYTES = 64 * 1024
"""Bytes that wait in the transport from which on held streams wait."""
LOW_WATER_BYTES = 16 * 1024
"""Bytes in the transport from which on they go on."""
MAX_UNSENT_BYTES = 512 * 1024
"""Bytes in the transport from which on its client counts as not reading: every stream pauses."""
UNSENT_BYTES_PER_STREAM = 4 * 1024
"""Unsent bytes per stream of a connection of many streams: about 20 events of each, a quarter of what
HTTP/1.1 allows."""
MAX_FRAME = frames.DEFAULT_FRAME_SIZE
"""Largest payload of a frame that is sent. Every client accepts it; larger ones would keep others waiting."""
RESUMED_PER_TURN = 64
"""Streams that are resumed in one turn of the event loop: each may make an event of all that it held."""


class HeldStream(Protocol):
    """A stream whose bytes wait for a window, or for its turn."""

    slot: int
    queued: bool
    """Whether it waits for its turn."""

    @property
    def held(self) -> int:
        """Bytes that wait."""
        ...

    def take_frame(self, size: int) -> tuple[bytes, memoryview]:
        """The next ``size`` of them as a frame: header and payload."""
        ...

    def on_all_sent(self) -> None:
        """None wait any more."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class FrameSender:
    """The sending half of a connection; a :class:`penstock.http.http2.flow_windows.FrameWriter`."""

    __slots__ = (
        "_batching",
        "_bulk",
        "_closed",
        "_flushes",
        "_out",
        "_pumping",
        "_resuming",
        "_streams",
        "_taken",
        "_taken_at",
        "_transport",
        "_windows",
        "_written",
        "congested",
        "data_bytes",
        "paused",
        "slot",
    )

    def __init__(self, transport: Any, windows: FlowWindows, streams: Mapping[int, HeldStream]) -> None:
        """``streams``: all of the connection's, by id."""
        self._transport = transport
        self._windows = windows
        self._streams = streams
        self.slot = windows.add_connection(self, frames.DEFAULT_WINDOW)
        self._out: list[bytes | memoryview] = []
        """What is written at the end of this turn of the event loop."""
        self._batching = False
        """Whether the connection flushes at the end of what it does."""
        self._flushes = False
        """Whether a flush is scheduled."""
        self._bulk = deque[HeldStream]()
        """Streams whose turn comes."""
        self._pumping = False
        self._resuming = deque[HeldStream]()
        self.congested = False
        """Whether the transport holds so much that held streams wait."""
        self.paused = False
        """Whether it holds so much that every stream pauses."""
        self._closed = False
        self.data_bytes = 0
        """Bytes of DATA frames, ever."""
        self._written = 0
        """Bytes given to the transport."""
        self._taken = -1
        """Bytes that the client had taken at the latest check."""
        self._taken_at = 0.0
        """When that had changed."""
        transport.set_write_buffer_limits(BULK_BYTES, LOW_WATER_BYTES)

    # -- urgent frames

    def write(self, data: bytes) -> None:
        """Write frames at the end of the turn."""
        self._out.append(data)
        if not (self._batching or self._flushes):
            self._flushes = True
            get_running_loop().call_soon(self._flush_later)

    def write_frames(self, data: bytes) -> None:
        """Write the DATA frames of a step's rows: now, together with what waits for the end of the turn."""
        self.data_bytes += len(data)
        self._out.append(data)
        self.flush()

    def begin_batch(self) -> None:
        """What is written is flushed, and held streams go on, in :meth:`end_batch`."""
        self._batching = True

    def end_batch(self) -> None:
        self._batching = False
        if self._bulk:
            self.pump()
        self.flush()

    def _flush_later(self) -> None:
        self._flushes = False
        self.flush()

    def flush(self) -> None:
        out = self._out
        if not out:
            return
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        if self._closed or self._transport.is_closing():
            return
        self._written += len(data)
        self._transport.write(data)
        if self.congested and not self.paused:
            self._pause_if_unread()

    def _pause_if_unread(self) -> None:
        unsent = self._transport.get_write_buffer_size()
        if unsent > MAX_UNSENT_BYTES and unsent > UNSENT_BYTES_PER_STREAM * len(self._streams):
            self.paused = True
            for stream in list(self._streams.values()):
                stream.pause()

    def take_window(self, slot: int, size: int, *, urgent: bool) -> bool:
        """Whether a frame of ``size`` bytes may be sent now for the stream in ``slot``, whose windows are
        then charged. ``urgent``: an event, which does not wait for a turn."""
        if size > MAX_FRAME or self.paused or (self.congested and not urgent):
            return False
        windows, own = self._windows, self.slot
        stream_left = windows.streams.item(slot) - size
        left = windows.connections.item(own) - size
        if stream_left < 0 or left < 0:
            return False
        windows.streams[slot] = stream_left
        windows.connections[own] = left
        self.data_bytes += size
        return True

    def widen(self, stream: HeldStream | None, increment: int) -> bool:
        """WINDOW_UPDATE for a stream, or for the connection: what has waited for it goes on. Return whether
        the window stays below its maximum."""
        windows = self._windows
        if stream is None:
            column, slot = windows.connections, self.slot
        else:
            column, slot = windows.streams, stream.slot
        window = column.item(slot) + increment
        if window > frames.MAX_WINDOW:
            return False
        column[slot] = window
        if stream is None:
            self.pump()
        elif stream.held:
            self.queue(stream)
        return True

    # -- held streams

    def queue(self, stream: HeldStream) -> None:
        """The stream holds bytes, or its window has opened."""
        if not stream.queued:
            stream.queued = True
            self._bulk.append(stream)
        self.pump()

    def pump(self) -> None:
        """Let the held streams take turns, as far as transport and windows allow; in a batch, at its end:
        many small WINDOW_UPDATE would else open the window for as many small pieces of events."""
        if self._pumping or self._batching:
            return
        self._pumping = True
        try:
            size = 0
            while self._bulk and not self.congested:
                sent = self._take_turn()
                if not sent:
                    break
                size += sent
                if size >= BULK_BYTES:
                    size = 0
                    self.flush()
        finally:
            self._pumping = False
        if self._out and not self._flushes:
            self.flush()

    def _take_turn(self) -> int:
        """One frame of the next stream whose window is open. Returns its size; 0: the connection's window is
        used up, or no stream's is open."""
        windows, bulk = self._windows, self._bulk
        left = windows.connections.item(self.slot)
        while bulk and left > 0:
            stream = bulk.popleft()
            stream.queued = False
            stream_left = windows.streams.item(stream.slot)
            size = min(stream.held, stream_left, left, MAX_FRAME)
            if size <= 0:
                continue  # until its window opens
            windows.streams[stream.slot] = stream_left - size
            windows.connections[self.slot] = left - size
            self.data_bytes += size
            self._out += stream.take_frame(size)
            if stream.held:
                stream.queued = True
                bulk.append(stream)
            else:
                stream.on_all_sent()
            return size
        return 0

    # -- the transport's notices

    def on_congested(self) -> None:
        self.congested = True

    def on_drained(self) -> None:
        """The transport has little left."""
        self.congested = False
        if self.paused:
            self.paused = False
            self._resuming = deque(self._streams.values())
            self._resume_some()
        self.pump()

    def _resume_some(self) -> None:
        resuming = self._resuming
        for _ in range(min(len(resuming), RESUMED_PER_TURN)):
            if self.paused:
                return
            resuming.popleft().resume()
        if resuming:
            get_running_loop().call_soon(self._resume_some)

    def is_stuck(self, now: float, timeout_s: float) -> bool:
        """Whether the client has taken nothing of what waits for ``timeout_s``; called once a second."""
        waiting = self._transport.get_write_buffer_size()
        taken = self._written - waiting
        if not waiting or taken != self._taken:
            self._taken, self._taken_at = taken, now
        return bool(now - self._taken_at > timeout_s)

    def change_initial_window(self, difference: int) -> bool:
        """Change the windows of all streams, as SETTINGS want. Return whether none exceeds the maximum."""
        streams = list(self._streams.values())
        if not streams:
            return True
        slots = [stream.slot for stream in streams]
        windows = self._windows.streams[slots] + difference
        self._windows.streams[slots] = windows
        if difference > 0:
            for stream in streams:
                if stream.held:
                    self.queue(stream)
        return int(windows.max()) <= frames.MAX_WINDOW

    def close(self) -> None:
        """Nothing is sent any more. The slot stays until no stream is left."""
        self._closed = True
        self._streams = {}
        self._out.clear()
        self._bulk.clear()
        self._resuming.clear()
        self.paused = True
