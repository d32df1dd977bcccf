"""The ZMQ sockets between processes: addresses, identities, options.

Every engine binds one ROUTER; every API server connects one DEALER to every engine. The coordinator binds
one ROUTER; engines and API servers connect one DEALER each. Engines in lock-step connect one DEALER to every
other engine. An identity contains the peer's index, its epoch (restarts), the incarnation of its supervisor
and, towards engines, the number of the connection: a restarted process is a new peer, and so is one that
reconnects. Sockets are used synchronously: receive until EAGAIN; a send that would block returns False.

On one host addresses are ipc://, in the run directory, whose mode is 0700. Between hosts they are tcp://,
with CURVE (:mod:`.curve`), and the kernel probes them, since a host that loses its network closes no
connection. What a peer without the key can make a listening process hold is bounded: connections
(:mod:`.handshakes`), and the size of a part, so that long messages cross in pieces (:mod:`.parts`).
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import zmq

from penstock.wire.curve import HANDSHAKE_FAILURES, ClusterKey, ZapAuthenticator, read_monitor_events
from penstock.wire.parts import PIECE_BYTES, Part, join_parts, mark_whole, split_parts

MEMBER_SEND_HWM = 64
"""Messages that a member queues for a coordinator that is away; later ones are dropped."""
MEMBER_LINGER_MS = 100
"""How long a member that exits waits for the coordinator to take its last messages."""
COORDINATOR_SILENCE_S = 10.0
"""Time without a message of the coordinator, which sends one a second, after which a member connects
again."""
FRAMES_IN_FLIGHT = 64
"""High-water mark of either end of an engine's connection to an API server, in messages. The engine's
publisher merges frames beyond it, so this bounds memory, not throughput."""
PROBE_S, SILENCE_MS = 1, 4000
"""Interval of the kernel's keepalive probes on tcp connections that are quiet, and the time without an
acknowledgement after which a connection counts as broken. The peer's kernel answers, however long a step
takes. A peer that takes no more bytes for that long breaks its connection as well.

ZMQ's own heartbeats (``ZMQ_HEARTBEAT_IVL``) are not used on either side: when a connection breaks while a
receive queue is full, libzmq 4.3.5 stops polling it, but its next heartbeat, or its answer to one that still
waits in the buffer, asserts that this has not happened, and ends the process (``out_event`` in
stream_engine_base.cpp)."""
MESSAGES_RECEIVED_AHEAD = 4096
"""Messages of one peer that a ROUTER receives before they are read; further ones wait at their sender. There
is room for what comes during a long step."""
CONNECT_TIMEOUT_MS = 3000
"""Timeout of a tcp connect; the kernel's own takes minutes."""
RECONNECT_NEVER_MS = 3_600_000
"""ZMQ's reconnect interval; the link is closed long before. With -1, ZMQ's value for never, it would discard
what was received before the connection broke."""
MAX_PART_BYTES = PIECE_BYTES + 256
"""Maximum size of a part over tcp, with CURVE's 33 bytes; a peer that announces more is disconnected."""
HANDSHAKE_MS = 10_000
"""Maximum time from a tcp connection to the end of its handshake."""
_TCP = re.compile(r"tcp://(?P<host>[^\s/:\[\]]+|\[[0-9A-Fa-f:.%\w]+\]):(?P<port>[0-9]{1,5})", re.ASCII)


def engine_address(run_dir: str, rank: int) -> str:
    """Address of engine ``rank`` for API servers on the same host."""
    return f"ipc://{Path(run_dir) / f'engine-{rank}'}"


def coordinator_address(run_dir: str) -> str:
    """Address of the coordinator for members on the same host."""
    return f"ipc://{Path(run_dir) / 'coordinator'}"


RENDEZVOUS_PREFIX = "rendezvous-"
"""Prefix of rendezvous files' names."""


@dataclass(frozen=True, slots=True)
class ProcessGroupSpec:
    """A rank's part in a PyTorch process group, whose ranks compute a model's layers together."""

    rank: int
    world_size: int
    rendezvous: str
    """File by which PyTorch's processes find each other (its file:// init method)."""


def process_group_spec(run_dir: str, rank: int, size: int, epoch: int, incarnation: int) -> ProcessGroupSpec:
    """The process group of a single host. A restarted group uses another file."""
    return ProcessGroupSpec(rank, size, str(Path(run_dir) / f"{RENDEZVOUS_PREFIX}{incarnation:x}-{epoch}"))


def host_and_port(address: str) -> tuple[str, int] | None:
    """Host and port of a tcp:// address, an IPv6 host without brackets; None for an ipc:// address."""
    match = _TCP.fullmatch(address)
    return None if match is None else (match["host"].strip("[]"), int(match["port"]))


def is_ip_address(address: str) -> bool:
    """Whether this is a tcp:// address with the number of a host, not a name, which ZMQ would resolve while
    all its connections wait."""
    host_port = host_and_port(address)
    if host_port is None or not 0 < host_port[1] < 1 << 16:
        return False
    try:
        ipaddress.ip_address(host_port[0])
    except ValueError:
        return False
    return True


def resolve_address(address: str) -> str:
    """A tcp:// address with its host name resolved, so that it can be bound. Raises OSError."""
    host_port = host_and_port(address)
    assert host_port is not None
    host, port = host_port
    if host == "*":
        return address
    return tcp_address(str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port)


def tcp_address(host: str, port: int | str) -> str:
    """A tcp:// address; binding it with ``port`` "*" takes a free port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def new_incarnation() -> int:
    """A random number for one run of a supervisor. Epochs are counted within it. It says nothing about time:
    clocks may be set back between two runs."""
    return 1 + secrets.randbits(63 - 1)


def engine_identity(rank: int, epoch: int, incarnation: int = 0) -> bytes:
    return b"engine-%d-%d-%x" % (rank, epoch, incarnation)


def server_identity(server: int, epoch: int, incarnation: int = 0, connection: int = 0) -> bytes:
    return b"api-server-%d-%d-%x-%d" % (server, epoch, incarnation, connection)


Wakeup = int | zmq.Socket[bytes]
"""What can be polled for input: a descriptor, or a socket."""


class PeerGone(ConnectionError):
    """The peer's connection no longer exists."""


class RouterSocket:
    """The ROUTER socket of an engine or the coordinator, which addresses its peers by identity."""

    def __init__(
        self,
        *addresses: str,
        key: ClusterKey | None = None,
        receive_queue: int = MESSAGES_RECEIVED_AHEAD,
        reconnecting: bool = False,
    ) -> None:
        """Bind ``addresses``; the port of a tcp:// address may be "*". Raises zmq.ZMQError on failure.

        With ``key``, which tcp:// requires, only peers with the same key are accepted, on every address.
        ``receive_queue``: messages received from one peer that may wait here. ``reconnecting``: peers keep
        their identity when they connect again, so the later connection has it. Otherwise every connection has
        its own, and one under an identity that is in use is left alone: nothing of it is read, and the peer
        that has the identity does not notice.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, int(reconnecting))
        self._socket.setsockopt(zmq.SNDHWM, FRAMES_IN_FLIGHT)
        self._socket.setsockopt(zmq.RCVHWM, receive_queue)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._guard: ZapAuthenticator | None = None
        self._poller: zmq.Poller | None = None
        self._polled: tuple[Wakeup, ...] = ()
        """What ``_poller`` watches beside this socket."""
        try:
            if key is not None:
                self._guard = key.secure_server(self._socket)
            for address in addresses:
                if address.startswith("tcp:"):
                    assert key is not None
                    _set_tcp_options(self._socket)
                    self._socket.setsockopt(zmq.IPV6, int("[" in address))  # 1 shows IPv4 as IPv6
                self._socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def address(self) -> str:
        """The address bound last, with its port."""
        return bound_address(self._socket)

    @property
    def fd(self) -> int:
        return cast(int, self._socket.getsockopt(zmq.FD))

    def wait(self, timeout_s: float | None, *also: Wakeup) -> bool:
        """Block until a message can be received or one of ``also``, descriptors and sockets, is readable;
        False after ``timeout_s`` seconds."""
        if self._poller is None or also != self._polled:
            self._poller, self._polled = zmq.Poller(), also
            for socket in (self._socket, *also):
                self._poller.register(socket, zmq.POLLIN)
        return bool(self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))

    def receive(self) -> tuple[bytes, list[Part]] | None:
        """One message as (peer identity, parts), or None if none waits.

        A part above PIECE_BYTES is a view: to copy a prompt of 100,000 tokens takes 0.2 ms, most of it for
        new pages of memory.
        """
        try:
            identity = self._socket.recv(_NOBLOCK)
        except zmq.Again:
            return None
        parts: list[Part] = []
        while True:
            frame = self._socket.recv(_NOBLOCK, copy=False)
            parts.append(frame.bytes if len(frame) <= PIECE_BYTES else frame.buffer)
            if not frame.more:  # told in a third of the time in which the socket tells it
                return identity, join_parts(parts)

    @property
    def disconnects(self) -> int:
        """How many connections have ended. Counted only with a key."""
        return 0 if self._guard is None else self._guard.disconnects

    def send(self, identity: bytes, parts: list[bytes]) -> bool:
        """Send without blocking; False if the peer's queue is full. Raises PeerGone."""
        try:
            self._socket.send_multipart([identity, *split_parts(parts)], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone(identity.decode(errors="replace")) from None
            raise
        return True

    def close(self) -> None:
        self._socket.close()
        self._context.term()


_EVENTS, _READABLE, _NOBLOCK = zmq.EVENTS, int(zmq.POLLIN), int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | HANDSHAKE_FAILURES


class EngineLink:
    """An API server's end of its connection to one engine.

    A link makes one connection. When that breaks or cannot be made, :meth:`lost` stays true, and the owner
    opens another link under another identity. So no message queued for a dead engine reaches its successor,
    and no message of a broken connection arrives late.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        identity: bytes,
        key: ClusterKey | None = None,
    ) -> None:
        """``key``: required for a tcp:// address."""
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # the owner bounds the bytes; a Submit must not be lost
        self._socket.setsockopt(zmq.RCVHWM, FRAMES_IN_FLIGHT)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_NEVER_MS)
        if address.startswith("tcp:"):
            assert key is not None
            key.secure_client(self._socket)
            _set_tcp_options(self._socket)
        self._divide = split_parts if address.startswith("tcp:") else mark_whole
        self._monitor = self._socket.get_monitor_socket(_BROKEN)
        self._lost = False
        self._socket.connect(address)

    @property
    def fd(self) -> int:
        """Edge-triggered: after it is readable, receive until None, also after every send."""
        return cast(int, self._socket.getsockopt(zmq.FD))

    @property
    def monitor_fd(self) -> int:
        """Readable (edge-triggered) when :meth:`lost` may have changed."""
        return cast(int, self._monitor.getsockopt(zmq.FD))

    def lost(self) -> bool:
        """Whether the connection broke or could not be made."""
        self._lost = self._lost or bool(read_monitor_events(self._monitor, _BROKEN))
        return self._lost

    def send(self, parts: list[bytes]) -> None:
        """Queue one or more messages as one ZMQ message."""
        *others, last = self._divide(parts)
        send = self._socket.send
        for part in others:  # as in send_multipart, which combines the flags anew for each part
            send(part, _NOBLOCK_MORE)
        send(last, _NOBLOCK)

    @property
    def has_message(self) -> bool:
        """Whether :meth:`receive` returns a message; takes a sixth of the time of a vain :meth:`receive`
        in a process that has just woken up."""
        return bool(cast(int, self._socket.getsockopt(_EVENTS)) & _READABLE)

    def receive(self) -> list[bytes] | None:
        """The parts of one ZMQ message, or None if none waits."""
        receive = self._socket.recv
        try:
            frame = receive(_NOBLOCK, copy=False)
        except zmq.Again:
            return None
        parts = [frame.bytes]
        while frame.more:
            frame = receive(_NOBLOCK, copy=False)
            parts.append(frame.bytes)
        return join_parts(parts)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()


class PeerLinks:
    """A rank's connections to the other ranks of its group. It only sends on them, and receives on the socket
    that it binds.

    Messages to a rank that has not bound its socket yet are queued.
    """

    def __init__(self, addresses: Iterable[str], identity: bytes) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = [self._connected(address, identity) for address in addresses]

    def _connected(self, address: str, identity: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the protocol; a Vote must not be lost
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address)
        return socket

    def send_to_all(self, part: bytes) -> None:
        for link in self._sockets:
            link.send(part, zmq.NOBLOCK)

    def close(self) -> None:
        for link in self._sockets:
            link.close()
        self._context.term()


class CoordinatorLink:
    """An engine's or API server's end of its connection to the coordinator.

    Reconnects by itself, so that a coordinator can restart. That does not help where another process has
    taken this one's identity: the connection stands, but the coordinator reads it no more
    (:meth:`reconnect_if_silent`).
    """

    def __init__(self, address: str, identity: bytes, key: ClusterKey | None = None) -> None:
        """``key``: the coordinator's, if it has one."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.SNDHWM, MEMBER_SEND_HWM)
        self._socket.setsockopt(zmq.LINGER, MEMBER_LINGER_MS)
        if key is not None:
            key.secure_client(self._socket)
        if address.startswith("tcp:"):
            _set_tcp_options(self._socket)
        self._monitor = self._socket.get_monitor_socket(HANDSHAKE_FAILURES)
        self._socket.connect(address)
        self._address = address
        self._heard_at = time.monotonic()

    @property
    def fd(self) -> int:
        """Edge-triggered: after it is readable, receive until None, also after every send."""
        return cast(int, self._socket.getsockopt(zmq.FD))

    def refused(self) -> bool:
        """Whether a handshake has failed since the last call: the peer has another key, or is no
        coordinator."""
        return bool(read_monitor_events(self._monitor, HANDSHAKE_FAILURES))

    def wait(self, timeout_s: float) -> bool:
        """Block until a message can be received; False after ``timeout_s`` seconds."""
        return bool(self._socket.poll(int(timeout_s * 1000)))

    def send(self, part: bytes) -> bool:
        """Send without blocking. False: the queue is full, and the message is dropped."""
        try:
            self._socket.send_multipart(split_parts([part]), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """One message, or None if none waits."""
        try:
            part = b"".join(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return None
        self._heard_at = time.monotonic()
        return part

    def reconnect_if_silent(self, now: float) -> None:
        """To be called once all that waits has been received; ``now``: monotonic seconds."""
        if now > self._heard_at + COORDINATOR_SILENCE_S:
            self._heard_at = now
            self._socket.disconnect(self._address)
            self._socket.connect(self._address)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()


def set_keepalive(socket: zmq.Socket[bytes]) -> None:
    """Have the kernel probe quiet connections, and break those that answer or take nothing for SILENCE_MS. To
    be called before the socket is bound or connected."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, PROBE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, SILENCE_MS // (1000 * PROBE_S))
    socket.setsockopt(zmq.TCP_MAXRT, SILENCE_MS)


def bound_address(socket: zmq.Socket[bytes]) -> str:
    """The address that a socket has been bound to last, with its port."""
    return cast(bytes, socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def bound_port(socket: zmq.Socket[bytes]) -> int:
    """The port of :func:`bound_address`, of a tcp socket."""
    return int(bound_address(socket).rpartition(":")[2])


def _set_tcp_options(socket: zmq.Socket[bytes]) -> None:
    """Options of a tcp socket, to be set before it is bound or connected."""
    socket.setsockopt(zmq.IPV6, 1)
    set_keepalive(socket)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PART_BYTES)
