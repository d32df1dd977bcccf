"""Sends each API server its rows of every step as one token frame, without blocking on slow readers.

What does not fit a peer's ZMQ queue is kept as its backlog (:mod:`.backlog`), up to a bound in bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from penstock.engine.base import Load, StepRows, StreamFailure
from penstock.engine.loop.drain_rate import DrainRate
from penstock.engine.loop.peers import Peer, Peers, peer_name
from penstock.logging_setup import RateLimitedLog
from penstock.wire.frames import TokenFrame, encode_frame
from penstock.wire.media.items import PagesWanted
from penstock.wire.messages import (
    OVERLOADED,
    Admitted,
    Draining,
    EngineMetrics,
    GoAway,
    KVTransferParams,
    RoutedExperts,
    RpcReply,
    Started,
    StatesObserved,
    StreamFailed,
    Welcome,
    encode,
)
from penstock.wire.regroup import take_rows
from penstock.wire.sockets import PeerGone

MAX_BACKLOG_BYTES = 256 << 20
"""Bytes that wait for one API server: half a million tokens of 1,024 streams, or minutes of a stalled
process. It is detached when more gathers."""
MAX_FAREWELLS = 1024
"""Peers that are told why they were refused once their queue has room."""

Message = (
    Welcome
    | StreamFailed
    | Started
    | Admitted
    | RpcReply
    | GoAway
    | Draining
    | EngineMetrics
    | StatesObserved
    | RoutedExperts
    | PagesWanted
)

log = logging.getLogger(__name__)


class FrameSocket(Protocol):
    """The part of :class:`penstock.wire.sockets.RouterSocket` that the publisher uses."""

    def send(self, identity: bytes, parts: list[bytes]) -> bool: ...


class Publisher:
    """Sends the rows and messages of one engine to its API servers, in order for each of them."""

    def __init__(
        self,
        socket: FrameSocket,
        kept_prompt_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        *,
        tells_times: bool = False,
    ) -> None:
        """``clock`` returns monotonic seconds. ``kept_prompt_bytes``: of prompts that are kept for API
        servers. ``tells_times``: streams that get a slot are told of."""
        self.peers = Peers(kept_prompt_bytes)
        self.tells_times = tells_times
        self.step = 0
        """Steps published."""
        self._weights = 0
        """Generation of the weights that the rows to come were computed with."""
        self._socket = socket
        self._drain_rate = DrainRate(clock)
        self._farewells: dict[bytes, list[bytes]] = {}
        """GoAway for detached peers whose queue was full, by identity."""
        self._notice = RateLimitedLog(log, logging.INFO)

    def attach(self, server: int, identity: bytes, order: tuple[int, int, int] = (0, 0, 0)) -> Peer:
        """See :meth:`Peers.attach`."""
        self._farewells.pop(identity, None)  # that was for its last connection
        return self.peers.attach(server, identity, order)

    def on_weights(self, generation: int) -> None:
        """The rows to come were computed with the weights of that generation."""
        self._weights = generation

    # -- sending

    def publish(self, rows: StepRows, load: Load) -> None:
        """Send a step's rows: one frame for each API server that has any, then the streams that failed.
        The backlog is sent first, as far as there is room.

        The arrays of ``rows`` are kept while a peer has a backlog: they must not change afterwards.
        """
        self.step += 1
        self.flush()
        for server, message in rows.routed:
            self.send(server, message)
        if len(rows.server):
            frame = TokenFrame(
                step=self.step,
                stream=rows.stream,
                position=rows.position,
                tokens=rows.tokens,
                count=rows.count,
                finish=rows.finish,
                cached=rows.cached,
                logprobs=rows.logprobs,
                waiting=load.waiting,
                running=load.running,
                kv_used=load.kv_used,
                prompt=rows.prompt,
                weights=self._weights,
                vectors=rows.vectors,
            )
            self._split(rows, frame, rows.kv_transfer_params or {})
        self._drain_rate.step(0 if rows.finish is None else int(np.count_nonzero(rows.finish)))
        for failure in rows.failed:
            self.fail(failure, load)

    def _split(
        self, rows: StepRows, frame: TokenFrame, params: Mapping[int, dict[int, KVTransferParams]]
    ) -> None:
        """Send each API server its part of ``frame``. ``params``: kv_transfer_params by API server and
        stream."""
        server = rows.server
        first = int(server[0])
        if (server == first).all():
            frame.kv_transfer_params = params.get(first)
            self._send_frame(first, frame)
            return
        order = np.argsort(server, kind="stable")
        ordered = server[order]
        for part in np.split(order, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1):
            index, own = int(server[part[0]]), take_rows(frame, part)
            own.kv_transfer_params = params.get(index)
            self._send_frame(index, own)

    def _send_frame(self, server: int, frame: TokenFrame) -> None:
        peer = self.peers.get(server)
        if peer is None:
            return
        frame.accepted = peer.accepted
        if peer.backlog:
            peer.backlog.add_frame(frame)
            self._check_backlog(peer)
        else:
            self._try_send(peer, encode_frame(frame))

    def send(self, server: int, message: Message) -> None:
        """Send a message behind the backlog of ``server``; does nothing when it is not attached."""
        peer = self.peers.get(server)
        if peer is None:
            return
        peer.backlog.add_message(encode(message))
        self._flush_peer(peer)
        self._check_backlog(peer)

    def fail(self, failure: StreamFailure, load: Load) -> None:
        """Send StreamFailed to the stream's API server; with the code ``overloaded`` it has the time after
        which to retry, estimated from ``load``."""
        retry_after_ms = self._drain_rate.retry_after_ms(load.waiting) if failure.code == OVERLOADED else 0
        message = StreamFailed(
            stream=failure.stream,
            position=failure.position,
            code=failure.code,
            message=failure.message,
            retry_after_ms=retry_after_ms,
        )
        self.send(failure.server, message)

    def start(self, server: int, number: int) -> None:
        """Send Started for an open stream."""
        self.send(server, Started(self.peers.handle_of(number)))

    def admit(self, server: int, number: int, queued: float, ran: float) -> None:
        """Send Admitted for an open stream."""
        self.send(server, Admitted(self.peers.handle_of(number), queued, ran))

    def send_to_all(self, message: Message) -> None:
        for peer in self.peers:
            self.send(peer.server, message)

    def offer_to_all(self, message: EngineMetrics) -> None:
        """Send a message that may be lost: peers with a backlog do not get it."""
        encoded = encode(message)
        for peer in self.peers:
            if not peer.backlog:
                self._try_send(peer, [encoded])

    # -- the backlog

    @property
    def has_backlog(self) -> bool:
        return bool(self._farewells) or any(peer.backlog for peer in self.peers)

    def flush(self) -> None:
        """Send the backlog of every peer, as far as there is room."""
        for identity, parts in list(self._farewells.items()):
            if self._say(identity, parts) is not False:
                del self._farewells[identity]
        for peer in self.peers:
            if peer.backlog:
                self._flush_peer(peer)

    def _flush_peer(self, peer: Peer) -> None:
        while peer.backlog and self._try_send(peer, peer.backlog.take_message()):
            pass

    def _try_send(self, peer: Peer, parts: list[bytes]) -> bool:
        """Send ``parts``, or put them at the head of the backlog. False when they were not sent."""
        try:
            if self._socket.send(peer.identity, parts):
                return True
        except PeerGone:
            self._notice(name := peer_name(peer.identity), "%s is gone, its streams are dropped", name)
            self.peers.detach(peer)
            return False
        peer.backlog.put_back(parts)
        return False

    def _check_backlog(self, peer: Peer) -> None:
        if peer.backlog.size > MAX_BACKLOG_BYTES:
            log.warning(
                "%s does not read: more than %d MiB wait for it; its streams are dropped",
                peer_name(peer.identity),
                MAX_BACKLOG_BYTES >> 20,
            )
            self.dismiss(peer, "it did not read what the engine sent")

    # -- the end of a connection

    def dismiss(self, peer: Peer, reason: str) -> None:
        """Detach a peer and tell it so; what else waits for it is discarded."""
        self.peers.detach(peer)
        self.reject_peer(peer.identity, reason)

    def reject_peer(self, identity: bytes, reason: str) -> bool:
        """Send GoAway to a peer that is not attached, later if its queue is full. False: it is gone."""
        parts = [encode(GoAway(reason))]
        sent = self._say(identity, parts)
        if sent is False and len(self._farewells) < MAX_FAREWELLS:
            self._farewells[identity] = parts
        return sent is not None

    def _say(self, identity: bytes, parts: list[bytes]) -> bool | None:
        """Whether ``parts`` were sent; None: the peer is gone."""
        try:
            return self._socket.send(identity, parts)
        except PeerGone:
            return None
