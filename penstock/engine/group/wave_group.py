"""One rank of a group of engines in lock-step: :mod:`penstock.engine.group.wave_protocol` over sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.engine.group.wave_protocol import WaveProtocol
from penstock.wire.control import Launch
from penstock.wire.messages import encode
from penstock.wire.sockets import PeerLinks, engine_address, engine_identity
from penstock.wire.waves import WaveMessage, decode_from_peer


class GroupLinks(Protocol):
    """What :class:`penstock.wire.sockets.PeerLinks` is to a lockstep."""

    def send_to_all(self, part: bytes) -> None: ...

    def close(self) -> None: ...


class WaveGroup:
    """Tells the engine's loop when to step, and the peers what they must know.

    A group starts and ends as a whole, so all its ranks have the same epoch.
    """

    def __init__(self, rank: int, size: int, interval: int, epoch: int, links: GroupLinks) -> None:
        self._protocol = WaveProtocol(rank, size, interval)
        self._peers = {engine_identity(peer, epoch): peer for peer in range(size) if peer != rank}
        self._links = links
        self._stepping = False
        """A step was allowed that the group does not know of yet."""

    @classmethod
    def from_launch(cls, launch: Launch) -> WaveGroup | None:
        """Of the engine that ``launch`` asks for; None when it runs by itself."""
        if not launch.config.enable_expert_parallel:
            return None
        peers = [rank for rank in range(launch.engine_count) if rank != launch.index]
        addresses = [engine_address(launch.run_dir, rank) for rank in peers]
        links = PeerLinks(addresses, engine_identity(launch.index, launch.epoch))
        interval = launch.config.dp_sync_interval
        return cls(launch.index, launch.engine_count, interval, launch.epoch, links)

    @property
    def waves(self) -> int:
        return self._protocol.waves

    @property
    def in_wave(self) -> bool:
        """Whether a wave is on, of which further steps may be to come."""
        return self._protocol.running

    def try_handle(self, identity: bytes, parts: Sequence[bytes]) -> bool:
        """Take a message of a peer; False when ``identity`` is none. Raises WireError and WaveProtocolError,
        which break the group."""
        peer = self._peers.get(identity)
        if peer is None:
            return False
        for part in parts:
            self._protocol.receive(peer, decode_from_peer(part))
        return True

    def advance(self, has_work: bool) -> bool:
        """Whether to make a step, to be asked before each one; it is a dummy step when this rank has no
        work."""
        if self._stepping:
            self._send(self._protocol.on_step(has_work))
        self._send(self._protocol.before_step(has_work))
        self._stepping = self._protocol.may_step
        return self._stepping

    def leave(self) -> None:
        """This rank has no work from here on."""
        self._send(self._protocol.leave())

    @property
    def may_exit(self) -> bool:
        """Whether no rank needs this one any longer."""
        return self._protocol.may_exit

    def _send(self, messages: Sequence[WaveMessage]) -> None:
        for message in messages:
            self._links.send_to_all(encode(message))

    def close(self) -> None:
        self._links.close()
