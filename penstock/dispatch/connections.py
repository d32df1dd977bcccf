"""An API server's connections to its engines: connects, reconnects, sends messages, receives token frames."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import zmq

from penstock.dispatch.periodic_timer import PeriodicTimer
from penstock.dispatch.sent_prompts import KnownPrefix, SentPrompts
from penstock.logging_setup import RateLimitedLog
from penstock.wire.curve import ClusterKey
from penstock.wire.decoding import decode_from_engine
from penstock.wire.frames import TokenFrame, decode_frame
from penstock.wire.messages import (
    PAUSE,
    SLEEP,
    AdapterKey,
    DesiredState,
    Disconnect,
    EngineInfo,
    FrameHeader,
    Hello,
    ObservedState,
    Submit,
    WireError,
    encode,
)
from penstock.wire.sockets import EngineLink, host_and_port, server_identity
from penstock.wire.submits import CHOICE_SIZE, join_submits, shared_size
from penstock.wire.weights.desired import WeightsStatus

if TYPE_CHECKING:
    from penstock.dispatch.engine_client import EngineClient

_warn = RateLimitedLog(logging.getLogger(__name__))

CHECK_INTERVAL_S = 1.0
"""Interval of the timer that finds engines which do not answer. It also reads all connections, although no
edge of their descriptors is missed: whatever connects or sends on a link receives afterwards."""
PUMP_INTERVAL_S = 0.003
"""Maximum time that a burst of requests may delay waiting frames."""
RECONNECT_S = 0.2
"""Delay before a broken connection is made again."""
WELCOME_TIMEOUT_S = 10.0
"""Time after which a connection on which the engine has not answered is made again, as another peer. The
engine may be in a long step, or another process has this one's identity there."""
MESSAGES_PER_READ = 256
"""Messages of one engine that are received at a time: the rest waits for the loop's next iteration, so an
engine that floods its API servers delays the others' rows by one batch."""
UNRESPONSIVE_S = 2.0
"""Time after which an engine that has accepted none of its submitted streams counts as unresponsive. It gets
new streams only if all engines are: it runs a long step, or hangs and will be killed
(``--engine-hang-timeout``)."""
MAX_QUEUED_BYTES = 64 << 20
"""An engine that has not accepted submitted requests of this size gets no new ones from this API server; a
larger request goes to an engine that has accepted all others. Bounds what waits in ZMQ's queues."""
MESSAGE_PARTS = 16
"""Maximum messages per ZMQ message."""
MESSAGE_BYTES = 1 << 20
"""A ZMQ message gets no more parts beyond this size: encoding one takes about a millisecond."""


class SubmitBatch:
    """Streams of one request that are submitted to one engine together."""

    def __init__(self, owner: object, first: Submit, known: KnownPrefix | None = None) -> None:
        """``owner``: the request's reply, which its streams have in common. ``known``: of the first one's
        prompt."""
        self.owner = owner
        self.known = known
        self.submits = [first]
        self.size = shared_size(first) + len(first.prompt)
        """Estimated bytes of the encoded streams."""
        self._first_size = self.size

    def add(self, owner: object, submit: Submit) -> int | None:
        """Add another stream of the same request. Returns the bytes it adds, None if it needs another
        batch."""
        first = self.submits[0]
        if submit.pooling is not None or first.pooling is not None:
            return None
        if owner is not self.owner or submit.kv_transfer_params is not first.kv_transfer_params:
            return None
        if submit.resubmitted != first.resubmitted:
            return None
        size = CHOICE_SIZE + (0 if submit.prompt is first.prompt else len(submit.prompt))
        if self.size + size > self._first_size + max(self._first_size, MESSAGE_BYTES):
            return None
        self.submits.append(submit)
        self.size += size
        return size


class EngineState:
    """One engine as this API server sees it. Lives as long as the API server, over all connections."""

    def __init__(self, rank: int, address: str | None = None, servers: int = 1) -> None:
        """``servers``: number of API servers that share the engine."""
        self.rank = rank
        self._servers = servers
        self.address = address
        """The engine's address; None: unknown, or the engine has left."""
        self.link: EngineLink | None = None
        self.info: EngineInfo | None = None
        self.outbox: deque[bytes | SubmitBatch] = deque()
        """What the next ZMQ messages contain, in order."""
        self.epoch = self.incarnation = 0
        """The engine's restarts, and the run of its supervisor. Valid while ``info`` is set."""
        self.draining = False
        """The operator drains the engine: it gets no new streams."""
        self.leaving = False
        """The engine drains itself before it exits."""
        self.closed = ""
        """Why it gets no streams: see :class:`.stream_gates.StreamGates`; empty: it may get some."""
        self.desired: Sequence[DesiredState] = ()
        """The states that the engine shall have."""
        self.connections = 0
        """Connections made so far."""
        self.connected_at = 0.0
        """Monotonic time of the last one."""
        self.clear()

    def clear(self) -> None:
        """Reset what belongs to one connection."""
        self.sent_prompts: SentPrompts | None = None
        """What the engine keeps of submitted prompts; None: it keeps none."""
        self.weights = -1
        """Generation of the weights of its latest frame; -1: it has sent none."""
        self.weights_status = WeightsStatus()
        """What it has said to compute with."""
        self.observed: dict[str, ObservedState] = {}
        """What the engine has observed, by name of the state."""
        self.adapters: dict[str, str] = {}
        """Digests of the LoRA adapters that the engine has, by name."""
        self.missing_adapters: dict[str, str] = {}
        """Why it lacks adapters of the desired list, by name."""
        self.submitted = 0
        """Streams submitted on this connection."""
        self.queued_bytes = 0
        """Estimated bytes of the submitted streams that the engine has not accepted."""
        self._queued: deque[tuple[int, int]] = deque()
        """For each of these streams, its number on this connection and its bytes."""
        # -- from the latest frame or report
        self.accepted = 0
        """Submitted streams that the load figures below include."""
        self._waiting_since = math.inf
        """Monotonic time since which submitted streams have not been accepted; inf: all are accepted."""
        self.waiting = 0
        self.running = 0
        self.kv_used = 0.0
        self.deferred = 0
        """Waiting streams that could not begin even if there were room."""
        self._step = 0

    def keep_prompts(self, room: int) -> None:
        """The engine keeps prompts of ``room`` bytes for all API servers."""
        self.sent_prompts = SentPrompts(room // self._servers) if room else None

    def on_submit(self, now: float, size: int = 0) -> None:
        """Count a submitted stream of ``size`` bytes."""
        self.submitted += 1
        self.queued_bytes += size
        self._queued.append((self.submitted, size))
        if self._waiting_since == math.inf:
            self._waiting_since = now

    def update_load(
        self, step: int, waiting: int, running: int, kv_used: float, accepted: int, now: float
    ) -> None:
        """Take the load of a frame or a report, unless a newer one has been taken."""
        if step < self._step:
            return
        self._step = step
        self.waiting, self.running, self.kv_used = waiting, running, kv_used
        if accepted != self.accepted:
            self.accepted = accepted
            self._waiting_since = now if accepted < self.submitted else math.inf
            while self._queued and (self._queued[0][0] <= accepted or accepted >= self.submitted):
                self.queued_bytes -= self._queued.popleft()[1]

    def is_unresponsive(self, now: float) -> bool:
        """Whether it has accepted none of its submitted streams for UNRESPONSIVE_S."""
        return now - self._waiting_since > UNRESPONSIVE_S

    def is_silent(self, now: float) -> bool:
        """Whether it has not answered on this connection for WELCOME_TIMEOUT_S."""
        return self.link is not None and self.info is None and now > self.connected_at + WELCOME_TIMEOUT_S

    @property
    def load(self) -> int:
        """Streams of all API servers on the engine, plus an estimate of those that it has not counted yet:
        every API server has likely submitted as many as this one, since all choose by the same loads."""
        return self.waiting + self.running + self._servers * max(0, self.submitted - self.accepted)

    @property
    def up(self) -> bool:
        return self.link is not None and self.info is not None

    def observed_generation(self, name: str) -> int:
        """The latest generation of a state that the engine has applied; 0: none."""
        observed = self.observed.get(name)
        return 0 if observed is None or observed.error is not None else observed.generation

    def has_reached(self, state: DesiredState) -> bool:
        """Whether the engine has applied this generation of a state, or a later one."""
        return self.observed_generation(state.name) >= state.generation

    def has_failed(self, state: DesiredState) -> bool:
        """Whether the engine could not apply this generation of a state."""
        observed = self.observed.get(state.name)
        return observed is not None and observed.error is not None and observed.generation == state.generation

    @property
    def state_errors(self) -> dict[str, str]:
        """Why the engine is not as desired, by name of the state."""
        failed = (state.name for state in self.desired if self.has_failed(state))
        return {name: self.observed[name].error or "" for name in failed}

    @property
    def up_to_date(self) -> bool:
        """Whether the engine has observed the desired states."""
        return self.up and all(self.has_reached(state) for state in self.desired)

    @property
    def asleep(self) -> bool:
        """Whether it has given its memory back."""
        observed = self.observed.get(SLEEP)
        return observed is not None and bool(observed.result.get("level"))

    @property
    def paused(self) -> bool:
        """Whether it computes no streams."""
        observed = self.observed.get(PAUSE)
        return observed is not None and bool(observed.result.get("paused"))

    @property
    def weight_version(self) -> str | None:
        """The version of its weights; None: it is not connected."""
        return self.weights_status.version if self.up else None

    @property
    def accepts_streams(self) -> bool:
        # Spelled out: several calls per request.
        return (
            self.info is not None
            and self.link is not None
            and not (self.closed or self.draining or self.leaving)
        )

    def has_adapter(self, adapter: AdapterKey | None) -> bool:
        """Whether it can run streams with ``adapter``; None: the base model."""
        return adapter is None or self.adapters.get(adapter[0]) == adapter[1]

    @property
    def full(self) -> bool:
        """Whether it has MAX_QUEUED_BYTES of requests that it has not accepted."""
        return self.queued_bytes >= MAX_QUEUED_BYTES

    @property
    def host(self) -> str:
        """The engine's host: "local" for this host, empty if unknown."""
        if self.address is None:
            return ""
        host_port = host_and_port(self.address)
        return host_port[0] if host_port else "local"


class Connections:
    """The connections to all engines. ``receiver`` gets what arrives; if it raises WireError, the engine is
    disconnected.

    Synchronous: works in the event loop's reader callbacks and within calls, and never awaits.
    """

    def __init__(
        self,
        ranks: int,
        addresses: Mapping[int, str],
        server: Hello,
        key: ClusterKey | None,
        receiver: EngineClient,
        servers: int = 1,
    ) -> None:
        """``ranks``: number of engines. ``addresses``: those known at the start, by rank; :meth:`set_address`
        adds others. ``server``: the first message on each connection, without its number. ``servers``: number
        of API servers. ``key``: for tcp:// addresses."""
        self.engines = [EngineState(rank, addresses.get(rank), servers) for rank in range(ranks)]
        self._server = server
        self._key = key
        self._receiver = receiver
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, max(1023, 4 * ranks + 16))
        self._loop = asyncio.get_running_loop()
        self._last_pump = 0.0
        self._flush_scheduled = False
        self._timer: PeriodicTimer | None = None
        self._closed = False

    # -- connecting and disconnecting

    def open(self) -> None:
        for engine in self.engines:
            self._connect(engine)
        self._timer = PeriodicTimer("the engines' connections", CHECK_INTERVAL_S, self._tick)

    def set_address(self, rank: int, address: str | None) -> None:
        """Set the address of an engine; None: it leaves, so a broken connection is not made again."""
        engine = self.engines[rank]
        if engine.address == address:
            return
        engine.address = address
        if address is None:
            return
        if engine.link is None:
            self._connect(engine)
        else:  # another process has replaced it; disconnecting makes the new connection
            self.disconnect(engine, "The engine that ran this request was replaced.")

    def _connect(self, engine: EngineState) -> None:
        if self._closed or engine.address is None or engine.link is not None:
            return
        hello = msgspec.structs.replace(self._server, connection=engine.connections)
        engine.connections += 1
        identity = server_identity(hello.server, hello.epoch, hello.incarnation, hello.connection)
        try:
            link = EngineLink(self._context, engine.address, identity, self._key)
        except (zmq.ZMQError, OSError) as error:  # such as too many open files
            _warn(f"engine {engine.rank}", "engine %d: no connection: %s", engine.rank, error)
            self._loop.call_later(RECONNECT_S, self._connect, engine)
            return
        engine.link, engine.connected_at = link, time.monotonic()
        link.send([encode(hello)])
        self._loop.add_reader(link.fd, self._receive, engine)
        self._loop.add_reader(link.monitor_fd, self._check, engine)
        self._loop.call_soon(self._look, engine)  # ZMQ reports nothing before the first vain read

    def _check(self, engine: EngineState) -> None:
        if engine.link is not None and engine.link.lost():
            self._receive(engine)  # messages that were sent before the connection broke
            self._receiver.on_gone(engine, "The engine that ran this request is gone.")
        elif engine.is_silent(time.monotonic()):
            _warn(f"engine {engine.rank}", "engine %d does not answer; connecting again", engine.rank)
            self.disconnect(engine, "The engine does not answer.")

    def disconnect(self, engine: EngineState, reason: str) -> None:
        """Close a connection; it is made again later if the engine has an address. ``reason``: for clients
        whose request the engine ran."""
        link = engine.link
        if link is None:
            return
        engine.link, engine.info, engine.leaving = None, None, False
        engine.outbox.clear()
        accepted = engine.accepted
        engine.clear()
        self._loop.remove_reader(link.fd)
        self._loop.remove_reader(link.monitor_fd)
        link.close()
        self._receiver.on_lost(engine, reason, accepted)
        if not self._closed:
            self._loop.call_later(RECONNECT_S, self._connect, engine)

    def _look(self, engine: EngineState) -> None:
        """Read a connection, and find out whether it is broken."""
        self._receive(engine)
        self._check(engine)

    def _tick(self) -> None:
        for engine in self.engines:
            self._look(engine)

    def stop(self) -> None:
        """Make no more connections."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def close(self, reason: str) -> None:
        """Disconnects from all engines."""
        self.stop()
        for engine in self.engines:
            if engine.link is not None:
                engine.link.send([encode(Disconnect())])
                self.disconnect(engine, reason)
        self._context.destroy(linger=100)

    # -- sending

    def send(self, engine: EngineState, part: bytes) -> None:
        """Add an encoded message to the next ZMQ message, which is sent in the loop's next iteration, or now
        if it has MESSAGE_PARTS."""
        engine.outbox.append(part)
        self._schedule_flush(engine)

    def submit(
        self, engine: EngineState, request: Submit, owner: object, known: KnownPrefix | None = None
    ) -> None:
        """:meth:`send` for a Submit; consecutive streams of the same ``owner`` become one message, which is
        encoded when it is sent. ``known``: of its prompt."""
        last = engine.outbox[-1] if engine.outbox else None
        size = last.add(owner, request) if isinstance(last, SubmitBatch) else None
        if size is None:
            batch = SubmitBatch(owner, request, known)
            size = batch.size
            engine.outbox.append(batch)
        engine.on_submit(time.monotonic(), size)
        self._schedule_flush(engine)

    def _schedule_flush(self, engine: EngineState) -> None:
        if len(engine.outbox) > MESSAGE_PARTS:
            self._flush(engine)
            self._loop.call_soon(self._receive, engine)  # not now: this may be a reply to what it sent
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_all)

    def _flush_all(self) -> None:
        self._flush_scheduled = False
        for engine in self.engines:
            if engine.outbox:
                self._flush(engine)
                self._receive(engine)  # sending may consume the descriptor's edge

    def _flush(self, engine: EngineState) -> None:
        """Send one ZMQ message. What is left is sent in the loop's next iteration, so that rows are not
        delayed by the encoding of large requests."""
        outbox, size = engine.outbox, 0
        parts: list[bytes] = []
        while outbox and len(parts) < MESSAGE_PARTS and size < MESSAGE_BYTES:
            item = outbox.popleft()
            if isinstance(item, SubmitBatch):
                batch = item
                try:
                    submit = join_submits(batch.submits)
                    if engine.sent_prompts is not None and submit.pooling is None:
                        submit = engine.sent_prompts.shorten(submit, batch.known)
                    item = encode(submit)
                except Exception:  # noqa: BLE001 - that request fails, the others do not notice
                    self._receiver.on_unsent(engine, [submit.stream for submit in batch.submits])
                    continue
            parts.append(item)
            size += len(item)
        if engine.link is not None and parts:
            engine.link.send(parts)
        if outbox and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush_all)

    # -- receiving

    def yield_to_pump(self) -> None:
        """Receive waiting messages, at most every PUMP_INTERVAL_S. To be called within bursts of work."""
        if time.monotonic() - self._last_pump > PUMP_INTERVAL_S:
            self.pump()

    def pump(self) -> None:
        """Send and receive on all connections."""
        for engine in self.engines:
            if engine.outbox:
                self._flush(engine)
            self._receive(engine)

    def _receive(self, engine: EngineState) -> None:
        """Receive waiting messages of an engine; consecutive frames are delivered together."""
        now = self._last_pump = time.monotonic()
        try:
            if not self._receive_some(engine, now):
                self._loop.call_soon(self._receive, engine)  # the descriptor has no further edge
        except WireError as error:
            self._receiver.on_fault(engine, "%s", error)
            self.disconnect(engine, "The engine that ran this request sent what cannot be understood.")
        except Exception:  # noqa: BLE001 - that engine is disconnected, the others go on
            self._receiver.on_fault(engine, "a message could not be handled", exc_info=True)
            self.disconnect(engine, "The server failed to handle a message of the engine.")

    def _receive_some(self, engine: EngineState, now: float) -> bool:
        """Receive up to MESSAGES_PER_READ messages; False if more may wait."""
        frames: list[TokenFrame] = []
        link = engine.link
        try:
            for _ in range(MESSAGES_PER_READ):
                if link is None or not link.has_message or (parts := link.receive()) is None:
                    return True
                message = decode_from_engine(parts[0])
                if isinstance(message, FrameHeader):
                    if len(parts) != 2:
                        raise WireError(f"a token frame has 2 parts, not {len(parts)}")
                    frame = decode_frame(message, parts[1])
                    if frames and (frame.vectors is not None or frames[-1].vectors is not None):
                        before, frames = frames, []
                        self._receiver.on_frames(engine, before, now)
                    frames.append(frame)
                else:
                    before, frames = frames, []
                    if before:
                        self._receiver.on_frames(engine, before, now)
                    self._receiver.on_message(engine, message)
                    link = engine.link
            return False
        finally:
            if frames:  # also those before a message that cannot be read
                self._receiver.on_frames(engine, frames, now)
