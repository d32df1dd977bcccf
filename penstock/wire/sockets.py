"""The ZMQ sockets between processes.

Every engine binds one ROUTER; every API server connects one DEALER to every engine. The coordinator binds
one ROUTER; engines and API servers connect one DEALER each. Engines in lock-step connect one DEALER to every
other engine. Identities carry the peer's index, its epoch (count of restarts), the incarnation of its
supervisor and, towards engines, the number of the connection: a restarted process is a new peer, and so is
one that connects again. Sockets are used synchronously: receive until EAGAIN; a send that would block says
so.

On one host addresses are ipc://, in the run directory, which nobody else can enter. Between hosts they are
tcp://, with CURVE (:mod:`.curve`), and with heartbeats, as a host that is cut off closes no connection.
"""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import zmq

from penstock.wire.curve import HANDSHAKE_FAILURES, ClusterKey, read_monitor_events

MEMBER_SEND_HWM = 64
"""Messages that a member keeps for a coordinator that is away; later ones are not sent."""
MEMBER_LINGER_MS = 100
"""How long a member that ends waits for the coordinator to take what it said last."""
FRAMES_IN_FLIGHT = 64
"""High-water mark at both ends of the way from an engine to an API server, in messages; what exceeds it is
merged by the engine's publisher, so this bounds memory, not throughput."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 1000, 4000
"""How often ends of a tcp connection ask each other for a sign of life, and after how much silence one takes
the connection for broken. ZMQ's own thread answers, however long a step takes."""
CONNECT_TIMEOUT_MS = 3000
"""How long a tcp connection may take to be made. The kernel would go on for minutes."""
RECONNECT_NEVER_MS = 3_600_000
"""When ZMQ would connect again; the link is long closed by then. With -1, which it has for never, it discards
what was received before the connection broke."""
MAX_MESSAGE_BYTES = 1 << 28
"""Over tcp; more is no message of ours."""
_TCP = re.compile(r"tcp://(?P<host>[^\s/:\[\]]+|\[[0-9A-Fa-f:.%\w]+\]):(?P<port>[0-9]+)")


def engine_address(run_dir: str, rank: int) -> str:
    """Where engine ``rank`` listens for API servers of the same host."""
    return f"ipc://{Path(run_dir) / f'engine-{rank}'}"


def coordinator_address(run_dir: str) -> str:
    """Where the coordinator listens for members on the same host."""
    return f"ipc://{Path(run_dir) / 'coordinator'}"


RENDEZVOUS_PREFIX = "rendezvous-"
"""What the names of rendezvous files begin with."""


@dataclass(frozen=True, slots=True)
class ProcessGroupSpec:
    """A rank's place among those that compute a model's layers together."""

    rank: int
    world_size: int
    rendezvous: str
    """File by which PyTorch's processes find each other."""


def process_group_spec(run_dir: str, rank: int, size: int, epoch: int, incarnation: int) -> ProcessGroupSpec:
    """On a single host. A group that is started again meets in another file."""
    return ProcessGroupSpec(rank, size, str(Path(run_dir) / f"{RENDEZVOUS_PREFIX}{incarnation:x}-{epoch}"))


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of a tcp:// address; an IPv6 address is without its brackets. None for an ipc:// one."""
    match = _TCP.fullmatch(address)
    return None if match is None else (match["host"].strip("[]"), int(match["port"]))


def resolve_address(address: str) -> str:
    """A tcp:// address with an IP address in place of a name, as it can be bound. Raises OSError."""
    place = host_and_port(address)
    assert place is not None
    host, port = place
    if host == "*":
        return address
    return tcp_address(str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port)


def tcp_address(host: str, port: int | str) -> str:
    """``port`` * takes a free one."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def new_incarnation() -> int:
    """A number for one run of a supervisor, which no other has: milliseconds since 1970 and 12 random bits,
    so that a later run has a higher one. Epochs are counted within it."""
    return time.time_ns() // 1_000_000 << 12 | secrets.randbits(12)


def engine_identity(rank: int, epoch: int, incarnation: int = 0) -> bytes:
    return b"engine-%d-%d-%x" % (rank, epoch, incarnation)


def server_identity(server: int, epoch: int, incarnation: int = 0, connection: int = 0) -> bytes:
    return b"api-server-%d-%d-%x-%d" % (server, epoch, incarnation, connection)


class PeerGone(ConnectionError):
    """The peer's connection no longer exists."""


class RouterSocket:
    """The end that binds: an engine's or the coordinator's. Knows its peers by their identities."""

    def __init__(self, *addresses: str, key: ClusterKey | None = None) -> None:
        """Binds ``addresses``; a tcp:// one may have * as its port. Raises zmq.ZMQError when it cannot.

        With ``key``, which tcp:// needs, only peers that present it come in, whatever the address.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # an API server that connects again is not kept out by what is left of its last connection
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, FRAMES_IN_FLIGHT)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # requests are bounded by the API servers' admission
        self._socket.setsockopt(zmq.LINGER, 1000)
        try:
            if key is not None:
                key.secure_server(self._socket)
            for address in addresses:
                if address.startswith("tcp:"):
                    assert key is not None
                    _set_tcp_options(self._socket)
                    self._socket.setsockopt(zmq.IPV6, int("[" in address))  # it would show IPv4 as IPv6
                self._socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def address(self) -> str:
        """The last one that was bound, with its port."""
        return cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    @property
    def fd(self) -> int:
        return cast(int, self._socket.getsockopt(zmq.FD))

    def wait(self, timeout_s: float | None, also: int | None = None) -> bool:
        """Block until something can be received or the descriptor ``also`` is readable; False when
        ``timeout_s`` is over first."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        if also is not None:
            poller.register(also, zmq.POLLIN)
        return bool(poller.poll(None if timeout_s is None else int(timeout_s * 1000)))

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """One message, (peer identity, parts), or None when nothing waits."""
        try:
            identity, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return identity, parts

    def send(self, identity: bytes, parts: list[bytes]) -> bool:
        """Send without blocking; False when the peer's queue is full. Raises PeerGone."""
        try:
            self._socket.send_multipart([identity, *parts], zmq.NOBLOCK)
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


_BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | HANDSHAKE_FAILURES


class EngineLink:
    """An API server's end of its connection to one engine.

    A link is good for one connection: when that breaks, or cannot be made, :meth:`lost` turns true for good,
    and the owner opens another link under another identity. So nothing that is queued for a dead engine
    reaches its successor, and nothing that an engine sent into a broken connection comes later.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        identity: bytes,
        key: ClusterKey | None = None,
    ) -> None:
        """``key`` is for tcp:// addresses, which need one."""
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by admission; a submit must not be lost
        self._socket.setsockopt(zmq.RCVHWM, FRAMES_IN_FLIGHT)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_NEVER_MS)
        if address.startswith("tcp:"):
            assert key is not None
            key.secure_client(self._socket)
            _set_tcp_options(self._socket)
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
        """Whether the connection to the engine broke or could not be made."""
        self._lost = self._lost or bool(read_monitor_events(self._monitor, _BROKEN))
        return self._lost

    def send(self, parts: list[bytes]) -> None:
        """Queue one or more control messages as one ZMQ message."""
        self._socket.send_multipart(parts, zmq.NOBLOCK)

    def receive(self) -> list[bytes] | None:
        """The parts of one message, or None when nothing waits."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()


class PeerLinks:
    """A rank's connections to the other ranks of its group, on which it only sends: what they say comes to
    the socket that it binds.

    Messages to a rank that has not bound its socket yet wait for it.
    """

    def __init__(self, addresses: Iterable[str], identity: bytes) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = [self._connected(address, identity) for address in addresses]

    def _connected(self, address: str, identity: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the protocol; a vote must not be lost
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

    Connects again by itself, for as long as it lives, so a coordinator may come and go.
    """

    def __init__(self, address: str, identity: bytes, key: ClusterKey | None = None) -> None:
        """``key`` as the coordinator has it."""
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

    @property
    def fd(self) -> int:
        """Edge-triggered: after it is readable, receive until None, also after every send."""
        return cast(int, self._socket.getsockopt(zmq.FD))

    def refused(self) -> bool:
        """Whether, since it was asked last, there was somebody at the address who is not the coordinator, or
        has another key."""
        return bool(read_monitor_events(self._monitor, HANDSHAKE_FAILURES))

    def wait(self, timeout_s: float) -> bool:
        """Block until something can be received; False when ``timeout_s`` is over first."""
        return bool(self._socket.poll(int(timeout_s * 1000)))

    def send(self, part: bytes) -> bool:
        """False when too much waits for the coordinator already: the message is not sent."""
        try:
            self._socket.send(part, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> bytes | None:
        """One message, or None when nothing waits."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()


def _set_tcp_options(socket: zmq.Socket[bytes]) -> None:
    """What a socket needs between hosts, before it is bound or connected."""
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
