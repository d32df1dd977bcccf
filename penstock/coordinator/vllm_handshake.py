"""The handshake with vLLM's engines (``--attach``): tells each where it connects.

    engine                                 coordinator
      HELLO  ─────────────────────────────►
             ◄─────────────────────────────  addresses of its requests and outputs
      … loads its model, connects there, and describes itself to the process that attaches it
      READY  ─────────────────────────────►

Nothing is kept between HELLO and READY, so that this process may be restarted, as may an engine. Engines of a
mixture-of-experts model with several ranks step together: they are answered when all have said HELLO, and are
told a process group and where waves are coordinated (:mod:`.vllm_waves`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from penstock.coordinator.vllm_waves import VllmWaves
from penstock.logging_setup import RateLimitedLog
from penstock.wire.sockets import HANDSHAKE_MS, Wakeup, bound_port, set_keepalive, tcp_address
from penstock.wire.vllm.addresses import address_towards
from penstock.wire.vllm.attachment_file import AttachmentFile, data_ports
from penstock.wire.vllm.messages import Addresses, HandshakeMessage, HandshakeReply, encode

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 16
RETRY_S = 0.1
"""Seconds between two attempts to answer an engine whose own process here has not bound its sockets yet."""
GROUP_PORTS = 5
"""Ports that the engines of a group may take for their process groups, on the host of rank 0."""


class VllmHandshake:
    """The socket to which engines connect first."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        ranks: int,
        run_dir: str,
        in_group: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind ``port`` of ``host``, a number; 0: a free one. ``in_group``: the engines step together.
        Raises zmq.ZMQError."""
        self._host = host
        self._given_port = port
        self._ranks = ranks
        self._files = [AttachmentFile(run_dir, port, rank) for rank in range(ranks)]
        self._clock = clock
        self._report_error = RateLimitedLog(log, logging.ERROR)
        self._inform = RateLimitedLog(log, logging.INFO)
        self._warn = RateLimitedLog(log, logging.WARNING)
        self.is_attached: Callable[[int], bool] = lambda rank: False
        """Whether a rank has an engine."""
        self._waiting: dict[int, str] = {}
        """Address of each engine that has said HELLO and is not answered yet, by its rank."""
        self._retry_at = 0.0
        self._hash: str | None = None
        """Hash of the configuration of the group's first engine that was ready."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.waves: VllmWaves | None = None
        try:
            self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted engine has its identity again
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.IPV6, int(":" in host))
            self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            set_keepalive(self._socket)
            self._socket.bind(tcp_address(host, port or "*"))
            if in_group:
                first = port + 1 + 2 * ranks if port else 0
                self.waves = VllmWaves(self._context, host, first, ranks)
        except zmq.ZMQError as error:
            self.close()
            where = tcp_address(host, port)
            raise zmq.ZMQError(error.errno, f"--attach {where}: {zmq.strerror(error.errno or 0)}") from None

    @property
    def port(self) -> int:
        return bound_port(self._socket)

    @property
    def wakeups(self) -> Sequence[Wakeup]:
        """To be polled for input before :meth:`run_once`."""
        return (self._socket, *(self.waves.wakeups if self.waves is not None else ()))

    def run_once(self) -> float | None:
        """Handle what waits. Returns the seconds after which to call again without input; None: none."""
        for _ in range(self._ranks + 16):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._handle(frames)
        if self.waves is not None:
            self.waves.run_once()
        now = self._clock()
        if self._waiting and now >= self._retry_at:
            self._answer()
            self._retry_at = now + RETRY_S
        return RETRY_S if self._waiting else None

    def close(self) -> None:
        if self.waves is not None:
            self.waves.close()
        self._socket.close()
        self._context.term()

    def _handle(self, frames: list[zmq.Frame]) -> None:
        identity, peer = bytes(frames[0].buffer), _peer_address(frames[-1])
        if len(frames) != 2 or len(identity) != 2:
            self._report_error("peer", "%s is no engine of vLLM's: it is ignored", peer)
            return
        rank = int.from_bytes(identity, "little")
        if rank >= self._ranks:
            text = "engine %d at %s wants to be attached, but --data-parallel-size is %d: it is ignored"
            self._report_error(f"rank {rank}", text, rank, peer, self._ranks)
            return
        try:
            message = msgspec.msgpack.decode(frames[1].buffer, type=HandshakeMessage)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            self._report_error(f"rank {rank}", "engine %d at %s: %s", rank, peer, error)
            return
        if message.status == "HELLO":
            self._waiting[rank] = peer
            self._retry_at = 0.0
            if self.is_attached(rank):
                text = "another engine %d, at %s, wants to be attached: it is left alone"
                self._warn(f"hello {rank}", f"{text} until the first is lost", rank, peer)
            else:
                self._inform(f"hello {rank}", "engine %d at %s wants to be attached", rank, peer)
        elif message.status == "READY":
            self._inform(f"ready {rank}", "engine %d at %s has loaded its model", rank, peer)
            self._check_hash(rank, message.parallel_config_hash)

    def _check_hash(self, rank: int, given: str | None) -> None:
        """Engines that step together must be configured alike."""
        if self.waves is None or given is None:
            return
        self._hash = self._hash or given
        if given != self._hash:
            self._report_error(
                "hash",
                "engine %d is configured in another way than the others, with which it must step together",
                rank,
            )

    def _answer(self) -> None:
        """Answer engines whose addresses are known; those of a group all at once."""
        if self.waves is not None and len(self._waiting) < self._ranks:
            return
        replies: dict[int, HandshakeReply] = {}
        for rank, peer in self._waiting.items():
            ports = self._ports(rank)
            if ports is not None:
                try:
                    host = address_towards(self._host, peer)
                except (OSError, ValueError) as error:
                    self._report_error(
                        f"rank {rank}", "engine %d at %s: no route to it: %s", rank, peer, error
                    )
                    continue
                replies[rank] = self._reply(host, ports)
        if self.waves is not None and len(replies) < self._ranks:
            return
        if self.waves is not None:
            self._hash = None
        for rank, reply in replies.items():
            del self._waiting[rank]
            self._socket.send_multipart([rank.to_bytes(2, "little"), encode(reply)], zmq.NOBLOCK)

    def _ports(self, rank: int) -> tuple[int, int] | None:
        """Ports of the engine's sockets; None: they are not bound yet."""
        if self._given_port:
            return data_ports(self._given_port, rank)
        found = self._files[rank].load()
        return None if found is None else found.ports

    def _reply(self, host: str, ports: tuple[int, int]) -> HandshakeReply:
        requests, outputs = (tcp_address(host, port) for port in ports)
        if self.waves is None:
            return HandshakeReply(Addresses([requests], [outputs]))
        published, reports = (tcp_address(host, port) for port in self.waves.ports)
        first = (self.waves.ports[1] if self._given_port else self.port) + 1
        group_ports = list(range(first, first + GROUP_PORTS))
        return HandshakeReply(
            Addresses([requests], [outputs], published, reports),
            {
                "data_parallel_master_ip": self._waiting[0],
                "data_parallel_master_port": group_ports[0],
                "_data_parallel_master_port_list": group_ports,
                "data_parallel_size": self._ranks,
            },
        )


def _peer_address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "an unknown address"
