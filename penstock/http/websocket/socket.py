"""The server's side of one WebSocket: messages to a handler, pings, the end, and limits.

A client that is silent is pinged three times within the keep-alive time (``--keep-alive-timeout``), and cut
if nothing comes of it: a connection that only its server believes in ends. A message must come as the body of
a request must (:mod:`penstock.http.slow_clients`), its bytes count for the budget of received bytes, and
frames are parsed in the turns in which chunks of bodies are.
"""

from __future__ import annotations

import logging
from typing import Protocol

from penstock.http.http1.chunked_body import ChunkRounds
from penstock.http.server_state import LINGER_S
from penstock.http.slow_clients import SlowClientTimer, Verdict
from penstock.http.websocket.channel import Channel
from penstock.http.websocket.codec import (
    FAILED,
    GOING_AWAY,
    POLICY,
    TRY_LATER,
    Closed,
    Codec,
    Ping,
    Pong,
    ProtocolFault,
    Text,
)

log = logging.getLogger(__name__)

CHUNKS_PER_FRAME = 5
"""Chunks of a body that are parsed in the time of a frame."""
PINGS = 3
"""Pings to a silent client within the keep-alive time."""
ENDING_IDLE_S = 1.0
"""Idle time after which a server that ends closes, and time for the client's answer: it connects to another
server."""


class MessageHandler(Protocol):
    """What the messages are for."""

    @property
    def busy(self) -> bool:
        """Whether something runs for the client."""
        ...

    @property
    def full(self) -> bool:
        """Whether no more messages are to be given to it; it calls :meth:`WebSocket.read_on` later."""
        ...

    @property
    def held(self) -> int:
        """Bytes of messages that it holds."""
        ...

    def on_message(self, data: bytes) -> None: ...

    def on_written(self) -> None:
        """A control frame was written, and bytes wait now: nothing may be written past them."""
        ...

    def on_pause(self) -> None: ...

    def on_resume(self) -> None: ...

    def on_closed(self) -> None:
        """The client is gone, or has said that it goes: nothing more can be sent."""
        ...


class WebSocket:
    """Its channel tells it what happens: see :class:`~penstock.http.websocket.channel.ChannelUser`."""

    __slots__ = (
        "__weakref__",
        "_closing_since",
        "_codec",
        "_continues",
        "_handler",
        "_heard_at",
        "_held",
        "_idle_since",
        "_pinged_at",
        "_reads",
        "_state",
        "_timer",
        "channel",
    )

    def __init__(self, channel: Channel, max_message_bytes: int) -> None:
        self.channel = channel
        self._state = channel.state
        self._codec = Codec(client=False, max_bytes=max_message_bytes)
        self._handler: MessageHandler | None = None
        """None once it was told of the end."""
        now = self._state.clock()
        self._heard_at = self._pinged_at = self._idle_since = now
        self._timer = SlowClientTimer(now)
        self._timer.on_close()
        self._closing_since: float | None = None
        """When this side has said that it closes."""
        self._continues = False
        """Whether a turn to parse more is waited for."""
        self._reads = True
        self._held = 0
        """Bytes that the budget knows of."""

    def open(self, handler: MessageHandler) -> None:
        self._handler = handler

    # -- sending

    def send(self, frames: bytes) -> None:
        """Write frames; ignored once the end was said."""
        if not self._codec.close_sent:
            self.channel.write(frames)

    def ping(self) -> None:
        self._pinged_at = self._state.clock()
        self._send_control(self._codec.ping())

    def _send_control(self, frame: bytes) -> None:
        self.send(frame)
        if self._handler is not None and self.channel.unread():
            self._handler.on_written()

    def close(self, code: int, reason: str = "") -> None:
        """Say the end, and close once the client has said so, too, or is too late."""
        if self._closing_since is None:
            self._closing_since = self._state.clock()
            self.channel.write(self._codec.close(code, reason))
            self._timer.on_close()
            self._leave()

    def abort(self) -> None:
        self.channel.abort()
        self._leave()

    def _leave(self) -> None:
        """Tell the handler of the end, and forget what it has asked for."""
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.on_closed()
        self._account()

    # -- what the channel tells

    def on_data(self, data: bytes) -> None:
        self._heard_at = self._state.clock()
        self._codec.receive(data)
        if self._timer.waiting_since is not None:
            self._timer.on_body(self._heard_at, len(data))
        if not self._continues:
            self._read()

    def _read(self) -> None:
        rounds: ChunkRounds = self._state.chunk_rounds
        try:
            while self._codec.has_more and not (self._handler is not None and self._handler.full):
                if rounds.left <= 0:
                    self._continues = True
                    rounds.wait(self._continue)
                    break
                events = self._codec.events()
                rounds.spend(1 + CHUNKS_PER_FRAME * self._codec.parsed)
                for event in events:
                    match event:
                        case Text():
                            if self._handler is not None:
                                self._handler.on_message(event.data)
                        case Ping():
                            if not self.channel.write_paused:
                                self._send_control(self._codec.pong(event.payload))
                        case Pong():
                            pass
                        case Closed():
                            self._on_close(event)
                            return
        except ProtocolFault as fault:
            self._codec.stop()
            self.close(fault.code, fault.reason)
            self.channel.end()
            return
        except Exception:
            log.exception("a WebSocket failed")
            self._codec.stop()
            self.close(FAILED, "The server failed.")
            self.channel.end()
            return
        self._after_read()

    def _after_read(self) -> None:
        waits = self._continues or self._codec.has_more
        if self._reads == waits:
            self._reads = not waits
            self.channel.read_on(self._reads)
        if not self._codec.held or waits or self._closing_since is not None:
            self._timer.on_close()
        elif self._timer.waiting_since is None:
            self._timer.on_body_begin(self._heard_at)
        self._account()

    def _continue(self) -> None:
        self._continues = False
        self._read()

    def read_on(self) -> None:
        """The handler takes messages again."""
        if not self._continues:
            self._read()

    def _on_close(self, event: Closed) -> None:
        if self._closing_since is None:
            self._closing_since = self._state.clock()
            self.channel.write(self._codec.close(event.code))
        self._codec.stop()
        self._leave()
        self.channel.end()

    def on_lost(self) -> None:
        if self._closing_since is None:
            self._closing_since = self._state.clock()
        self._codec.stop()
        self._leave()

    def on_pause(self) -> None:
        if self._handler is not None:
            self._handler.on_pause()

    def on_resume(self) -> None:
        self._heard_at = self._state.clock()  # it reads
        if self._handler is not None:
            self._handler.on_resume()

    # -- limits

    def on_idle(self) -> None:
        """Nothing runs for the client any more."""
        self._idle_since = self._state.clock()
        if self._state.ending:
            self.shutdown()
        self._account()

    def check(self, now: float, request_timeout_s: float, keep_alive_s: float) -> None:
        if self._closing_since is not None:
            # A client that waits for nothing, such as Codex while its tools run, does not answer.
            if now - self._closing_since > (ENDING_IDLE_S if self._state.ending else LINGER_S):
                self.channel.abort()
            return
        late = self._timer.check(
            now, request_timeout_s, keep_alive_s, reading=self._reads, replying=True, unread=0
        )
        if late is not Verdict.KEEP:
            self.close(POLICY, f"A message comes too slowly: its rest is waited for {request_timeout_s:g} s.")
            return
        if not self._reads:  # it is not asked
            self._heard_at = now
        idle = self._handler is None or not self._handler.busy
        allowed = self._state.limits.keep_alive_timeout_s
        if idle and self._state.ending:
            if now - self._idle_since > ENDING_IDLE_S:
                self.close(GOING_AWAY, "The server is shutting down.")
        elif idle and keep_alive_s < allowed:  # others wait for want of descriptors
            if now - self._idle_since > keep_alive_s:
                self.close(TRY_LATER, "The server needs the connection.")
        elif now - self._heard_at > allowed:
            self.abort()
        elif now - max(self._heard_at, self._pinged_at) > allowed / (PINGS + 1):
            self.ping()

    def shutdown(self) -> None:
        """Close, now if idle, else :meth:`on_idle` does."""
        if self._handler is None or not self._handler.busy:
            self.close(GOING_AWAY, "The server is shutting down.")

    @property
    def is_over(self) -> bool:
        return self._closing_since is not None

    # -- the bytes that it holds: see Holder

    @property
    def receiving(self) -> bool:
        return self._codec.held > 0

    def on_over_budget(self) -> None:
        self._held = 0
        self._codec.stop()
        self.close(TRY_LATER, self._state.budget.refusal().message)
        self.channel.end()

    def _account(self) -> None:
        held = self._codec.held + (0 if self._handler is None else self._handler.held)
        if held != self._held:
            self._held = held
            self._state.budget.hold(self, held)
