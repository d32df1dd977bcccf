"""Publishes KV cache events on ZMQ sockets, as vLLM does (:mod:`penstock.wire.kv_events`)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from penstock.config.errors import ConfigError
from penstock.config.kv_events import KVEventsConfig, address_of_rank
from penstock.wire.kv_events import END_OF_REPLAY, KVCacheEvent, encode_batch

log = logging.getLogger(__name__)

MAX_BUFFERED_BYTES = 64 << 20
"""Memory of the batches kept for replay, however many ``buffer_steps`` are allowed."""
REPLAY_SEND_TIMEOUT_MS = 1000
"""Time that a subscriber has to take the next batches of a replay, before it is given up."""
MAX_REQUEST_BYTES = 64
BIND_TIMEOUT_S = 5.0
"""Time that the process before this one has to let go of the address."""
BIND_INTERVAL_S = 0.05


class KVEventPublisher:
    """One rank's PUB socket and its replay socket, which a thread serves. Nothing that subscribers do delays
    :meth:`publish`: batches for slow ones are dropped, and they ask for them again."""

    def __init__(self, config: KVEventsConfig, rank: int) -> None:
        """Raises ConfigError when an address cannot be bound."""
        self._rank = rank
        self._topic = config.topic.encode()
        self._next = 0
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffered_bytes = 0
        self._most_batches = config.buffer_steps
        self._lock = threading.Lock()
        """Guards the buffer."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.sndhwm = config.hwm
        self.address = self._bind(self._pub, "endpoint", config.endpoint)
        self.replay_address: str | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._thread: threading.Thread | None = None
        if config.replay_endpoint is not None:
            self._replay = replay = self._context.socket(zmq.ROUTER)
            replay.router_mandatory = True
            replay.maxmsgsize = MAX_REQUEST_BYTES
            replay.sndtimeo = REPLAY_SEND_TIMEOUT_MS
            self.replay_address = self._bind(replay, "replay_endpoint", config.replay_endpoint)
            self._thread = threading.Thread(
                target=self._serve_replays, args=(replay,), name="kv-events-replay", daemon=True
            )
            self._thread.start()
        log.info("KV cache events of rank %d are published at %s", rank, self.address)

    def _bind(self, socket: zmq.Socket[bytes], field: str, address: str) -> str:
        socket.linger = 0
        address = address_of_rank(address, self._rank)
        if "[" in address or "::" in address:
            socket.ipv6 = True
        deadline = time.monotonic() + BIND_TIMEOUT_S
        while True:
            try:
                socket.bind(address)
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    self._context.destroy(linger=0)
                    raise ConfigError(f"--kv-events-config: {field} {address}: {error.strerror}") from None
                time.sleep(BIND_INTERVAL_S)
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return bound.rstrip("\0")

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Send a batch of events, if there are any."""
        if not events:
            return
        number, batch = self._next, encode_batch(time.time(), [*events], self._rank)
        self._next += 1
        if self._replay is not None:
            self._keep(number, batch)
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), batch))

    def _keep(self, number: int, batch: bytes) -> None:
        with self._lock:
            buffer = self._buffer
            buffer.append((number, batch))
            self._buffered_bytes += len(batch)
            while len(buffer) > self._most_batches or self._buffered_bytes > MAX_BUFFERED_BYTES:
                self._buffered_bytes -= len(buffer.popleft()[1])

    def _serve_replays(self, replay: zmq.Socket[bytes]) -> None:
        with replay:
            while True:
                try:
                    parts = replay.recv_multipart()
                    if len(parts) == 3 and len(parts[2]) == 8:
                        self._replay_to(replay, parts[0], int.from_bytes(parts[2], "big"))
                except zmq.ContextTerminated:
                    return
                except zmq.ZMQError as error:
                    log.debug("a replay of KV cache events has ended: %s", error)

    def _replay_to(self, replay: zmq.Socket[bytes], subscriber: bytes, first: int) -> None:
        """Raises zmq.ZMQError when the subscriber is slow, or gone."""
        with self._lock:
            wanted = [entry for entry in self._buffer if entry[0] >= first]
        for number, batch in wanted:
            replay.send_multipart((subscriber, b"", self._topic, number.to_bytes(8, "big"), batch))
        replay.send_multipart((subscriber, b"", b"", END_OF_REPLAY, b""))

    def close(self) -> None:
        """Close both sockets."""
        self._pub.close()
        self._context.term()
