"""Subscribes to the KV cache events of endpoints, in a thread of its own.

The thread receives, orders and replays (:mod:`.batch_order`); the event loop applies the batches to the
index, a millisecond at a time, so that streams do not wait for them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.gateway.kv_events.batch_order import BatchOrder, FallbackStep, Reset
from penstock.gateway.kv_events.block_index import BlockIndex, Source
from penstock.wire.kv_events import END_OF_REPLAY, decode_batch

log = logging.getLogger(__name__)

APPLY_S = 0.001
"""Time in which the event loop applies batches before it does other work."""
SWEPT_BLOCKS = 256
"""Cleared blocks that are freed at once, in about 0.1 ms."""
ROUND_S = 0.005
"""Pause of the thread between two rounds, so that it does not compete with the event loop for each batch."""
POLL_MS = 500
MAX_WAITING = 4096
"""Batches that wait for the event loop. With more the thread reads no further; publishers drop what their
sockets cannot hold, and it is replayed."""
MAX_RECEIVED = 1024
"""Batches of one source that its socket holds."""
MAX_PER_ROUND = 64
"""Batches of one source per round."""
REPLAY_TIMEOUT_S = 5.0
"""Time without the next batches of a replay, after which it is given up. A whole one may take longer: it
waits for the event loop, and those of all sources come together when a gateway starts."""
RECONNECT_MS, RECONNECT_MAX_MS = 100, 5000
RECONNECT_S = 10.0
"""Time without a connection after which a new one is begun: a socket gives up a peer that has sent what is no
message for it, such as a batch that is too large."""
KEEPALIVE_S = 10
MAX_BATCH_BYTES = 4 << 20
"""A source that sends a larger batch is disconnected. One of 800,000 tokens fits. Each is
applied as a whole, while streams wait."""
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@dataclass(slots=True, eq=False)
class EventAddresses:
    """Where one source publishes."""

    source: Source
    events: str
    replay: str | None = None


@dataclass(slots=True, eq=False)
class _Subscription:
    """The sockets of one source; the thread's."""

    addresses: EventAddresses
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    order: BatchOrder
    replay: zmq.Socket[bytes] | None = None
    replaying: int | None = None
    """The first number that was asked for."""
    replay_until: float = 0.0
    connect_at: float = math.inf
    """When to begin a new connection."""


@dataclass(slots=True)
class SubscriberCounts:
    """Counts since the start, for metrics."""

    applied: int = 0
    malformed: int = 0
    resets: int = 0
    """Times that a source's blocks were forgotten: it connected, restarted, or batches were lost."""


@dataclass(slots=True, eq=False)
class KVEventSubscriber:
    """Keeps ``index`` up to date. Created in the event loop; :meth:`close` ends the thread."""

    index: BlockIndex
    counts: SubscriberCounts = field(default_factory=SubscriberCounts)
    _sources: dict[tuple[object, ...], EventAddresses] = field(default_factory=dict)
    _commands: deque[tuple[bool, EventAddresses]] = field(default_factory=deque)
    """For the thread: sources to subscribe to (True) and to leave."""
    _steps: deque[tuple[Source, FallbackStep]] = field(default_factory=deque)
    """From the thread, to be applied."""
    _followed: set[Source] = field(default_factory=set)
    """Sources that are followed; of others no more steps are applied."""
    _wake: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    _stopping: bool = False
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _thread: threading.Thread | None = None
    _scheduled: bool = False
    _failed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    # -- the event loop's side

    def update(self, wanted: Iterable[EventAddresses]) -> None:
        """Subscribe to these sources, and leave all others. A source of the same endpoint, rank and addresses
        as one before is that one."""
        latest: dict[tuple[object, ...], EventAddresses] = {
            (each.source.endpoint, each.source.rank, each.events, each.replay): each for each in wanted
        }
        for key in self._sources.keys() - latest.keys():
            addresses = self._sources.pop(key)
            self._followed.discard(addresses.source)
            self.index.lose(addresses.source)
            self._commands.append((False, addresses))
        for key in latest.keys() - self._sources.keys():
            self._sources[key] = latest[key]
            self._followed.add(latest[key].source)
            self._commands.append((True, latest[key]))
        if self._commands:
            self._loop.call_soon(self._schedule)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
                self._thread.start()
            os.eventfd_write(self._wake, 1)

    async def watch(self) -> None:
        """Raises what the thread has raised, if ever."""
        await asyncio.shield(self._failed)

    def _fail(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def close(self) -> None:
        self._stopping = True
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        os.close(self._wake)

    def _apply(self) -> None:
        """Apply waiting steps, then free what they have cleared, for a while."""
        deadline, more = time.perf_counter() + APPLY_S, True
        while more and time.perf_counter() < deadline:
            try:
                more = self._apply_next()
            except Exception as error:
                self._fail(error)
                raise
        if more:
            self._loop.call_soon(self._apply)
        else:
            self._scheduled = False

    def _apply_next(self) -> bool:
        """Return whether there may be more."""
        if not self._steps:
            return self.index.sweep(SWEPT_BLOCKS)
        source, step = self._steps.popleft()
        if source in self._followed:
            self._apply_step(source, step)
        return True

    def _apply_step(self, source: Source, step: FallbackStep) -> None:
        if isinstance(step, Reset):
            self.counts.resets += 1
            (self.index.follow if step is Reset.CLEAR else self.index.lose)(source)
        else:
            self._apply_batch(source, step)

    def _apply_batch(self, source: Source, batch: bytes) -> None:
        try:
            events = decode_batch(batch)
        except ValueError as error:
            if not self.counts.malformed:
                log.warning("%s sends KV cache events that cannot be read: %s", source.endpoint.url, error)
            self.counts.malformed += 1
            return
        self.counts.applied += 1
        self.index.apply(source, events)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._apply()

    # -- the thread

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.max_sockets = context.get(zmq.SOCKET_LIMIT)
        subscriptions: dict[EventAddresses, _Subscription] = {}
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not self._stopping:
                ready: dict[Any, int] = dict(poller.poll(POLL_MS))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    self._obey(context, poller, subscriptions)
                if len(self._steps) < MAX_WAITING:
                    for subscription in subscriptions.values():
                        self._receive(context, poller, subscription, ready)
                if self._steps and not self._stopping:
                    self._loop.call_soon_threadsafe(self._schedule)
                time.sleep(ROUND_S)
        except Exception as error:
            log.exception("KV cache events are no longer followed")
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._fail, error)
        finally:
            context.destroy(linger=0)

    def _obey(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        subscriptions: dict[EventAddresses, _Subscription],
    ) -> None:
        while self._commands:
            subscribes, addresses = self._commands.popleft()
            if subscribes:
                try:
                    subscriptions[addresses] = self._subscribe(context, poller, addresses)
                except zmq.ZMQError as error:
                    log.warning("%s cannot be followed: %s", addresses.events, error)
                continue
            subscription = subscriptions.pop(addresses, None)
            if subscription is None:
                continue
            poller.unregister(subscription.socket)
            poller.unregister(subscription.monitor)
            self._end_replay(poller, subscription)
            subscription.socket.disable_monitor()
            subscription.monitor.close()
            subscription.socket.close()

    def _subscribe(
        self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller, addresses: EventAddresses
    ) -> _Subscription:
        socket = context.socket(zmq.SUB)
        _set_options(socket, addresses.events)
        socket.subscribe(b"")
        monitor = socket.get_monitor_socket(_EVENTS)  # before the connection, which it tells of
        try:
            socket.connect(addresses.events)
        except zmq.ZMQError:
            socket.disable_monitor()
            monitor.close()
            socket.close()
            raise
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        order = BatchOrder(replays=addresses.replay is not None)
        return _Subscription(addresses, socket, monitor, order)

    def _receive(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        subscription: _Subscription,
        ready: dict[Any, int],
    ) -> None:
        order, steps = subscription.order, list[FallbackStep]()
        if subscription.monitor in ready:
            for parts in _messages(subscription.monitor):
                event = parse_monitor_message(parts)["event"]
                connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                steps += order.on_connected() if connected else order.on_disconnected()
                subscription.connect_at = math.inf if connected else time.monotonic() + RECONNECT_S
                self._end_replay(poller, subscription)
        if time.monotonic() > subscription.connect_at:
            subscription.connect_at = time.monotonic() + RECONNECT_S
            with suppress(zmq.ZMQError):  # the socket has given it up
                subscription.socket.disconnect(subscription.addresses.events)
            subscription.socket.connect(subscription.addresses.events)
        if subscription.replay is not None and subscription.replay in ready:
            subscription.replay_until = time.monotonic() + REPLAY_TIMEOUT_S
            for parts in _messages(subscription.replay):
                number, batch = parts[-2:] if len(parts) > 2 else (b"", b"")  # before vLLM 0.19 without topic
                if number == END_OF_REPLAY:
                    steps += order.on_replay_ended()
                    break
                if len(number) == 8:
                    steps += order.on_replayed(int.from_bytes(number, "big"), batch)
        if subscription.socket in ready:
            for parts in _messages(subscription.socket):
                if len(parts) == 3 and len(parts[1]) == 8:
                    steps += order.on_live(int.from_bytes(parts[1], "big"), parts[2])
        overdue = subscription.replaying is not None and time.monotonic() > subscription.replay_until
        if overdue and order.wanted is not None:
            steps += order.on_replay_failed()
        if order.wanted != subscription.replaying:
            self._end_replay(poller, subscription)
            if order.wanted is not None:
                try:
                    self._ask_for_replay(context, poller, subscription, order.wanted)
                except zmq.ZMQError as error:
                    log.warning("%s cannot be asked for a replay: %s", subscription.addresses.replay, error)
                    steps += order.on_replay_failed()
        self._steps.extend((subscription.addresses.source, step) for step in steps)

    def _ask_for_replay(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        subscription: _Subscription,
        first: int,
    ) -> None:
        """Raises zmq.ZMQError."""
        address = subscription.addresses.replay
        assert address is not None, "the order knows that there is none"
        socket = context.socket(zmq.DEALER)
        _set_options(socket, address)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        poller.register(socket, zmq.POLLIN)
        subscription.replay, subscription.replaying = socket, first
        subscription.replay_until = time.monotonic() + REPLAY_TIMEOUT_S

    def _end_replay(self, poller: zmq.Poller, subscription: _Subscription) -> None:
        subscription.replaying = None
        if subscription.replay is not None:
            poller.unregister(subscription.replay)
            subscription.replay.close()
            subscription.replay = None


def _messages(socket: zmq.Socket[bytes]) -> Iterable[list[bytes]]:
    for _ in range(MAX_PER_ROUND):
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


def _set_options(socket: zmq.Socket[bytes], address: str) -> None:
    socket.linger = 0
    socket.rcvhwm = MAX_RECEIVED
    socket.maxmsgsize = MAX_BATCH_BYTES
    socket.reconnect_ivl, socket.reconnect_ivl_max = RECONNECT_MS, RECONNECT_MAX_MS
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = KEEPALIVE_S
    socket.ipv6 = "[" in address
