"""One rank of a wave group, engines that step together: :mod:`.wave_protocol` over sockets."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.group.wave_protocol import WaveProtocol
from penstock.wire.control import Launch
from penstock.wire.messages import WireError, encode
from penstock.wire.parts import Part
from penstock.wire.sockets import PeerLinks, engine_address, engine_identity
from penstock.wire.waves import WaveMessage, decode_from_peer

SYNC_INTERVAL = 32
"""Steps between two checks of whether any rank has work: fewer wait for peers more often, more make steps
without work."""


class WaveGroup:
    """Tells the engine loop when to step, and exchanges the wave protocol's messages with the peers.

    A group starts and ends as a whole, so all its ranks have the same epoch.
    """

    def __init__(self, rank: int, size: int, *, interval: int, epoch: int, links: PeerLinks) -> None:
        """``interval``: steps between two sync rounds ."""
        self._protocol = WaveProtocol(rank, size, interval)
        self._peers = {engine_identity(peer, epoch): peer for peer in range(size) if peer != rank}
        self._links = links
        self._stepping = False
        """The last :meth:`advance` allowed a step, which is not reported to the protocol yet."""

    @classmethod
    def from_launch(cls, launch: Launch) -> WaveGroup | None:
        """For the engine of ``launch``; None when it does not share its experts with other ranks."""
        if not launch.config.enable_expert_parallel:
            return None
        peers = [rank for rank in range(launch.engine_count) if rank != launch.index]
        addresses = [engine_address(launch.run_dir, rank) for rank in peers]
        links = PeerLinks(addresses, engine_identity(launch.index, launch.epoch))
        return cls(
            launch.index,
            launch.engine_count,
            interval=SYNC_INTERVAL,
            epoch=launch.epoch,
            links=links,
        )

    @property
    def waves(self) -> int:
        return self._protocol.waves

    @property
    def in_wave(self) -> bool:
        """Whether a wave is running, so that further steps may follow."""
        return self._protocol.running

    def try_handle(self, identity: bytes, parts: Sequence[Part]) -> bool:
        """Handle a message of a peer; False when ``identity`` is not a peer. Raises WireError and
        WaveProtocolError, which break the group."""
        peer = self._peers.get(identity)
        if peer is None:
            return False
        try:
            for part in parts:
                self._protocol.receive(peer, decode_from_peer(part))
        except WireError as error:
            raise WireError(f"rank {peer}: {error}") from None
        return True

    def advance(self, has_work: bool) -> bool:
        """Whether to make the next step, a dummy step when this rank has no work. Call it before each one."""
        if self._stepping:
            self._send(self._protocol.on_step(has_work))
        self._send(self._protocol.before_step(has_work))
        self._stepping = self._protocol.may_step
        return self._stepping

    def leave(self) -> None:
        """Announce that this rank is ending and has no work from here on."""
        self._send(self._protocol.leave())

    @property
    def may_exit(self) -> bool:
        """Whether all ranks are leaving and no wave is running."""
        return self._protocol.may_exit

    def _send(self, messages: Sequence[WaveMessage]) -> None:
        for message in messages:
            self._links.send_to_all(encode(message))

    def close(self) -> None:
        self._links.close()
