"""The two sockets over which one engine of vLLM's is attached.

The engine connects a DEALER to the first (requests), with its rank as identity, and a PUSH to the second
(outputs). It was told both addresses at its handshake, and keeps them for its life: when a connection
breaks, it connects again. What was under way is lost then, and neither side can tell: so a connection that
breaks ends this attachment (:class:`EngineLost`), and the process with it. Its successor binds the same
addresses.

Nothing authenticates a peer. A second peer with the engine's identity is left alone, one with another
identity is not read, nor are outputs of any connection but that by which the engine has answered a call whose
number is random.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from penstock.wire.sockets import Wakeup, bound_port, set_keepalive
from penstock.wire.vllm.messages import EngineLost

MAX_OUTPUT_BYTES = 256 << 20
"""Bytes of a frame of outputs: logprobs of whole vocabularies for a long prompt. A peer that announces more
is disconnected."""
MAX_REQUEST_BYTES = 1 << 20
"""Bytes of what an engine sends on the socket that gives it requests: its ReadyResponse."""
MAX_FRAMES = 1 << 16
"""Frames of a message."""
OUTPUTS_AHEAD = 1000
"""Messages that may wait here; further ones wait at the engine."""
CLOSE_TIMEOUT_MS = 500
"""How long a process that ends waits for the engine to take its last messages."""
BIND_TIMEOUT_S = 10.0
"""How long a process tries to bind the addresses of its predecessor, which may still be ending."""
RETRY_S = 0.1
_SRCFD = int(zmq.SRCFD)
_ANY = -1
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN, _EVENTS = int(zmq.POLLIN), zmq.EVENTS
_NOTHING = (b"\x01", b"\x90")
"""An abort of no requests: tells whether the engine is connected."""


class EngineConnection:
    """Sends to one engine, and receives from it."""

    def __init__(self, addresses: tuple[str, str], rank: int) -> None:
        """Bind the ``addresses`` for requests and outputs; ``rank``: of the engine, as vLLM knows it. Raises
        zmq.ZMQError."""
        self._identity = rank.to_bytes(2, "little")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._requests = self._context.socket(zmq.ROUTER)
        self._outputs = self._context.socket(zmq.PULL)
        self._requests.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._requests.setsockopt(zmq.SNDHWM, 0)  # bounded by the slots; a request must not be lost
        self._requests.setsockopt(zmq.RCVHWM, 4)
        self._requests.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._outputs.setsockopt(zmq.RCVHWM, OUTPUTS_AHEAD)
        self._outputs.setsockopt(zmq.MAXMSGSIZE, MAX_OUTPUT_BYTES)
        self._monitors: list[zmq.Socket[Any]] = []
        self._others: tuple[zmq.Socket[Any], ...] = ()
        """All sockets but that of outputs."""
        self._source = _ANY
        """Descriptor of the connection by which the engine sends outputs; those of others are not read."""
        self._latest_source = _ANY
        """Descriptor of the connection by which the latest message came."""
        try:
            for socket, address in zip((self._requests, self._outputs), addresses, strict=True):
                _set_options(socket, address)
                self._monitors.append(socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
                _bind(socket, address)
        except zmq.ZMQError:
            self.close()
            raise
        self._others = self._requests, *self._monitors

    @property
    def ports(self) -> tuple[int, int]:
        """Return those of requests and outputs, over TCP."""
        return bound_port(self._requests), bound_port(self._outputs)

    @property
    def wakeups(self) -> Sequence[Wakeup]:
        """To be polled: readable when there is something to receive, or a connection has broken."""
        return self._outputs, *self._others

    # -- requests

    def receive_ready(self) -> bytes | None:
        """The ReadyResponse of an engine that has started, or None if none waits."""
        while True:
            try:
                identity, *frames = self._requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if identity == self._identity and len(frames) == 1:
                return frames[0]

    def is_connected(self) -> bool:
        """Whether the engine can be sent requests."""
        return self._send(_NOTHING)

    def send(self, frames: Sequence[bytes]) -> None:
        """Raises EngineLost."""
        if not self._send(frames):
            raise EngineLost("it has closed its connection")

    def _send(self, frames: Sequence[bytes]) -> bool:
        send = self._requests.send
        *others, last = frames
        try:
            send(self._identity, _NOBLOCK_MORE)
            for frame in others:  # as in send_multipart, which combines the flags anew for each frame
                send(frame, _NOBLOCK_MORE)
            send(last, _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    # -- outputs

    @property
    def has_output(self) -> bool:
        """Whether :meth:`receive` returns something."""
        return bool(cast(int, self._outputs.getsockopt(_EVENTS)) & _POLLIN)

    def receive(self) -> list[memoryview] | None:
        """The frames of the engine's next message, or None if none waits. Raises EngineLost."""
        receive = self._outputs.recv
        while True:
            try:
                frame = receive(_NOBLOCK, copy=False)
            except zmq.Again:
                return None
            source = self._latest_source = frame.get(_SRCFD)
            frames = [frame.buffer]
            while frame.more:
                frame = receive(_NOBLOCK, copy=False)
                if len(frames) < MAX_FRAMES:
                    frames.append(frame.buffer)
            if source == self._source or self._source == _ANY:
                if len(frames) == MAX_FRAMES:
                    raise EngineLost(f"it sent a message of {MAX_FRAMES} or more frames")
                return frames

    def trust_source(self) -> None:
        """The latest message was the engine's: from here on, only what comes by its connection is read, and
        :meth:`read_disconnects` tells when that breaks."""
        self._source = self._latest_source

    # -- both

    @property
    def has_news(self) -> bool:
        """Whether :meth:`read_disconnects` or :meth:`receive_ready` has something to read."""
        return any(cast(int, socket.getsockopt(_EVENTS)) & _POLLIN for socket in self._others)

    def read_disconnects(self) -> None:
        """Read which connections have ended. Raises EngineLost if the engine's has, once
        :meth:`trust_source` has told which that is."""
        gone: list[set[int]] = [set(), set()]
        for place, monitor in enumerate(self._monitors):
            while monitor.poll(0):
                gone[place].add(int(parse_monitor_message(monitor.recv_multipart())["value"]))
        if self._source == _ANY:
            return
        if self._source in gone[1] or (gone[0] and not self.is_connected()):
            raise EngineLost("its connection has broken")

    def wait(self, timeout_s: float) -> bool:
        """Block until there is something to receive or to check; False after ``timeout_s`` seconds."""
        poller = zmq.Poller()
        for socket in self.wakeups:
            poller.register(socket, zmq.POLLIN)
        return bool(poller.poll(max(0, int(timeout_s * 1000))))

    def close(self) -> None:
        for socket in (self._requests, self._outputs):
            socket.disable_monitor()
            socket.close()
        for monitor in self._monitors:
            monitor.close()
        self._context.term()


def _set_options(socket: zmq.Socket[bytes], address: str) -> None:
    """The kernel probes a quiet peer, and one that takes nothing breaks its connection, as between hosts of a
    fleet."""
    socket.setsockopt(zmq.LINGER, CLOSE_TIMEOUT_MS)
    socket.setsockopt(zmq.IPV6, int(address.startswith("tcp://[")))
    set_keepalive(socket)


def _bind(socket: zmq.Socket[bytes], address: str) -> None:
    """Raise zmq.ZMQError, with the address."""
    deadline = time.monotonic() + BIND_TIMEOUT_S
    while True:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(RETRY_S)
                continue
            raise zmq.ZMQError(error.errno, f"{address}: {zmq.strerror(error.errno or 0)}") from None
        return
