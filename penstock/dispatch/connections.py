"""An API server's connections to its engines: one link to each that has a place, made anew when it breaks."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec
import zmq

from penstock.wire.curve import ClusterKey
from penstock.wire.frames import TokenFrame, decode_frame
from penstock.wire.messages import (
    Disconnect,
    EngineInfo,
    FrameHeader,
    FromEngine,
    Hello,
    WireError,
    decode_from_engine,
    encode,
)
from penstock.wire.sockets import EngineLink, host_and_port, server_identity

log = logging.getLogger(__name__)

SAFETY_INTERVAL_S = 0.02
"""ZMQ's descriptor is edge-triggered; this timer finds what a lost edge would leave lying."""
PUMP_INTERVAL_S = 0.003
"""How long a burst of requests may keep the loop from the frames that wait."""
RECONNECT_S = 0.2
SILENCE_S = 2.0
"""An engine that has taken nothing of what it was sent for so long gets new streams only when all are so: its
step takes long, or it hangs and will be killed for it (``--engine-hang-timeout``)."""


class EngineState:
    """One engine as seen from here. Lives as long as the API server; links come and go."""

    def __init__(self, rank: int, address: str | None = None, servers: int = 1) -> None:
        """``servers``: API servers that share the engine."""
        self.rank = rank
        self._servers = servers
        self.address = address
        """Where it is; None: it is not known, or it has left."""
        self.link: EngineLink | None = None
        self.info: EngineInfo | None = None
        self.outbox: list[bytes] = []
        self.epoch = self.incarnation = 0
        """How often it was restarted, and by which run of its supervisor; known while ``info`` is."""
        self.draining = False
        """The operator wants it to finish what it runs, and to get no new streams."""
        self.leaving = False
        """So does the engine itself, as it ends."""
        self.asleep = False
        """It is agreed that engines sleep."""
        self.target_revision = 0
        """Revision of the agreed states that it is to reach."""
        self.connections = 0
        """Made so far."""
        self.clear()

    def clear(self) -> None:
        """Nothing is known of its load: the connection is new."""
        self.reached_revision = 0
        """Revision of the agreed states that it is known to have reached; 0: it is as it was started."""
        self.submitted = 0
        """Streams submitted on this connection."""
        # -- from the latest frame or report
        self.accepted = 0
        """Of those submitted, how many are in the figures below."""
        self._waits_since = math.inf
        """Since when streams have been submitted without any being accepted; inf: all are accepted."""
        self.waiting = 0
        self.running = 0
        self.kv_used_permille = 0
        self._step = 0

    def on_submit(self, now: float) -> None:
        """A stream is submitted."""
        self.submitted += 1
        if self._waits_since == math.inf:
            self._waits_since = now

    def update_load(
        self, step: int, waiting: int, running: int, kv_used_permille: int, accepted: int, now: float
    ) -> None:
        """What a frame or a report says; older ones than the latest are passed over."""
        if step < self._step:
            return
        self._step = step
        self.waiting, self.running, self.kv_used_permille = waiting, running, kv_used_permille
        if accepted != self.accepted:
            self.accepted = accepted
            self._waits_since = now if accepted < self.submitted else math.inf

    def silent(self, now: float) -> bool:
        return now - self._waits_since > SILENCE_S

    @property
    def load(self) -> int:
        """Streams it has, from all API servers, and those that it has not counted yet: ours, and likely as
        many of every other API server, which sees the same loads and chooses alike."""
        return self.waiting + self.running + self._servers * max(0, self.submitted - self.accepted)

    @property
    def up(self) -> bool:
        return self.link is not None and self.info is not None

    @property
    def up_to_date(self) -> bool:
        """It has reached the agreed states."""
        return self.up and self.reached_revision == self.target_revision

    @property
    def accepts_streams(self) -> bool:
        return self.up_to_date and not (self.asleep or self.draining or self.leaving)

    @property
    def host(self) -> str:
        """The host it is on, local for ours; empty when it is not known."""
        if self.address is None:
            return ""
        place = host_and_port(self.address)
        return place[0] if place else "local"


class Receiver(Protocol):
    """Whom connections tell what comes. It may raise WireError, which ends the connection."""

    def on_frames(self, engine: EngineState, frames: list[TokenFrame], now: float) -> None:
        """Consecutive token frames, at least one, in order."""

    def on_message(self, engine: EngineState, message: FromEngine) -> None:
        """Anything but a token frame, in order with them."""

    def on_gone(self, engine: EngineState, reason: str) -> None:
        """Its end of the connection is no more: to be disconnected. ``reason`` as for :meth:`on_lost`."""

    def on_lost(self, engine: EngineState, reason: str) -> None:
        """The connection is no more; ``reason`` is for clients whose request the engine ran."""

    def on_tick(self, now: float) -> None:
        """Called every SAFETY_INTERVAL_S."""


class Connections:
    """Synchronous throughout: works in the event loop's reader callbacks and within calls, never awaiting."""

    def __init__(
        self,
        ranks: int,
        places: Mapping[int, str],
        server: Hello,
        key: ClusterKey | None,
        receiver: Receiver,
        servers: int = 1,
    ) -> None:
        """``places``: addresses that are known beforehand, by rank; others come by :meth:`place`. ``server``
        says how this API server introduces itself, one of ``servers``. ``key`` is for tcp:// addresses."""
        self.engines = [EngineState(rank, places.get(rank), servers) for rank in range(ranks)]
        self._server = server
        self._key = key
        self._receiver = receiver
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, max(1023, 4 * ranks + 16))
        self._loop = asyncio.get_running_loop()
        self._last_pump = 0.0
        self._flush_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # -- connections come and go

    def open(self) -> None:
        for engine in self.engines:
            self._connect(engine)
        self._tick()

    def place(self, rank: int, address: str | None) -> None:
        """Where the engine of a rank is; None: it leaves, and is not to be looked for when it has gone."""
        engine = self.engines[rank]
        if engine.address == address:
            return
        engine.address = address
        if address is None:
            return
        if engine.link is None:
            self._connect(engine)
        else:  # it was replaced by one elsewhere, to which we get when this connection has ended
            self.disconnect(engine, "The engine that ran this request was replaced.")

    def _connect(self, engine: EngineState) -> None:
        if self._closed or engine.address is None or engine.link is not None:
            return
        hello = msgspec.structs.replace(self._server, connection=engine.connections)
        engine.connections += 1
        identity = server_identity(hello.server, hello.epoch, hello.incarnation, hello.connection)
        link = EngineLink(self._context, engine.address, identity, self._key)
        engine.link = link
        link.send([encode(hello)])
        self._loop.add_reader(link.fd, self._receive, engine)
        self._loop.add_reader(link.monitor_fd, self._check, engine)

    def _check(self, engine: EngineState) -> None:
        if engine.link is not None and engine.link.lost():
            self._receive(engine)  # what it sent before it went
            self._receiver.on_gone(engine, "The engine that ran this request is gone.")

    def disconnect(self, engine: EngineState, reason: str) -> None:
        """End a connection; another one follows, if the engine has a place."""
        link = engine.link
        if link is None:
            return
        engine.link, engine.info, engine.leaving = None, None, False
        engine.outbox.clear()
        engine.clear()
        self._loop.remove_reader(link.fd)
        self._loop.remove_reader(link.monitor_fd)
        link.close()
        self._receiver.on_lost(engine, reason)
        if not self._closed:
            self._loop.call_later(RECONNECT_S, self._connect, engine)

    def _tick(self) -> None:
        """The safety timer."""
        self.pump()
        for engine in self.engines:
            self._check(engine)
        self._receiver.on_tick(time.monotonic())
        if not self._closed:
            self._timer = self._loop.call_later(SAFETY_INTERVAL_S, self._tick)

    def stop(self) -> None:
        """Make no more connections."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def close(self, reason: str) -> None:
        """Leave the engines."""
        self.stop()
        for engine in self.engines:
            if engine.link is not None:
                engine.link.send([encode(Disconnect())])
                self.disconnect(engine, reason)
        self._context.destroy(linger=100)

    # -- out

    def send(self, engine: EngineState, part: bytes, most: int | None = None) -> None:
        """Put a control message into the next ZMQ message, which goes out with the loop's next turn, or at
        once when it holds ``most``."""
        engine.outbox.append(part)
        if most is not None and len(engine.outbox) >= most:
            self._flush(engine)
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_all)

    def _flush_all(self) -> None:
        self._flush_scheduled = False
        for engine in self.engines:
            if engine.outbox:
                self._flush(engine)
                self._receive(engine)  # a send may swallow the descriptor's edge

    def _flush(self, engine: EngineState) -> None:
        parts, engine.outbox = engine.outbox, []
        if engine.link is not None:
            engine.link.send(parts)

    # -- in

    def yield_to_pump(self) -> None:
        """Called within bursts of other work: takes what waits, at most every PUMP_INTERVAL_S."""
        if time.monotonic() - self._last_pump > PUMP_INTERVAL_S:
            self.pump()

    def pump(self) -> None:
        for engine in self.engines:
            if engine.outbox:
                self._flush(engine)
            self._receive(engine)

    def _receive(self, engine: EngineState) -> None:
        """Take all messages that wait."""
        now = self._last_pump = time.monotonic()
        link = engine.link
        frames: list[TokenFrame] = []
        try:
            while link is not None and (parts := link.receive()) is not None:
                message = decode_from_engine(parts[0])
                if isinstance(message, FrameHeader):
                    if len(parts) != 2:
                        raise WireError(f"a token frame has 2 parts, not {len(parts)}")
                    frames.append(decode_frame(message, parts[1]))
                else:
                    if frames:
                        self._receiver.on_frames(engine, frames, now)
                        frames = []
                    self._receiver.on_message(engine, message)
                    link = engine.link
            if frames:
                self._receiver.on_frames(engine, frames, now)
        except WireError as error:
            log.error("engine %d: %s", engine.rank, error)
            self.disconnect(engine, "The engine that ran this request sent what cannot be understood.")
