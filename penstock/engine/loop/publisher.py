"""Gives each API server its rows of every step, without ever waiting for one that does not read.

What a peer's queue has no room for is kept here: rows as segments, merged by stream as they gather, so
that they come to take one int per token; behind them the messages that must not overtake rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from penstock.engine.base import Load, StepRows, StreamFailure
from penstock.engine.loop.drain_rate import DrainRate
from penstock.wire.frames import TokenFrame, encode_frame
from penstock.wire.messages import (
    OVERLOADED,
    Draining,
    EngineMetrics,
    GoAway,
    KVTransferParams,
    RpcReply,
    StreamFailed,
    Welcome,
    encode,
)
from penstock.wire.regroup import merge_frames, take_rows
from penstock.wire.sockets import PeerGone

SEGMENT_TOKENS_PER_ROW = 64
"""A segment with this many tokens per row is not merged any further: its rows' columns weigh little beside
its tokens, and a merge never takes long, however much has gathered."""

Message = Welcome | StreamFailed | RpcReply | GoAway | Draining


class PeerSocket(Protocol):
    """What :class:`penstock.wire.sockets.RouterSocket` is to a publisher."""

    def send(self, identity: bytes, parts: list[bytes]) -> bool:
        """Send without blocking; False when the peer's queue is full. Raises PeerGone."""
        ...


class FrameBacklog:
    """Consecutive frames of one API server, merged so that there are few and each token is merged a
    bounded number of times."""

    def __init__(self) -> None:
        self._frames: deque[TokenFrame] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def append(self, frame: TokenFrame) -> None:
        """Like carrying in binary: merging starts when the last segment is half as large as its neighbour."""
        frames = self._frames
        frames.append(frame)
        while len(frames) > 1 and _mergeable(frames[-2], frames[-1]):
            last = frames.pop()
            frames.append(merge_frames([frames.pop(), last]))

    def popleft(self) -> TokenFrame:
        return self._frames.popleft()


def _mergeable(earlier: TokenFrame, later: TokenFrame) -> bool:
    full = _weight(earlier) >= SEGMENT_TOKENS_PER_ROW * earlier.rows
    return not full and 2 * _weight(later) >= _weight(earlier)


def _weight(frame: TokenFrame) -> int:
    return len(frame.tokens) + (0 if frame.prompt is None else len(frame.prompt.row))


@dataclass(slots=True)
class _Peer:
    """An API server, and what waits for room in its queue, in the order in which it must go out."""

    identity: bytes
    head: list[bytes] | None = None
    """A message that found the queue full, encoded once."""
    segments: FrameBacklog = field(default_factory=FrameBacklog)
    messages: deque[bytes] = field(default_factory=deque)
    accepted: int = 0
    """Submits taken from its connection."""

    @property
    def has_backlog(self) -> bool:
        return bool(self.head is not None or self.segments or self.messages)


class Publisher:
    """Sends the rows and messages of one engine to its API servers, in order for each of them."""

    def __init__(self, outbox: PeerSocket, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` gives seconds."""
        self._socket = outbox
        self._drain_rate = DrainRate(clock)
        self._peers: dict[int, _Peer] = {}
        self._gone: list[int] = []
        self.attach_count = 0
        """API servers that ever came."""
        self._step = 0

    # -- API servers come and go

    def attach(self, server: int, identity: bytes) -> None:
        """From here on ``server`` is the peer ``identity``; what waited for another one is discarded."""
        self.attach_count += 1
        self._peers[server] = _Peer(identity)
        if server in self._gone:
            self._gone.remove(server)  # that was its predecessor

    def detach(self, server: int) -> None:
        """Discard what waits for ``server``; its rows go nowhere from here on."""
        self._peers.pop(server, None)

    def take_disconnected(self) -> list[int]:
        """API servers whose connection broke; each is named once, and detached."""
        gone, self._gone = self._gone, []
        return gone

    @property
    def has_backlog(self) -> bool:
        """Whether anything waits for room in a peer's queue."""
        return any(peer.has_backlog for peer in self._peers.values())

    def count_submit(self, server: int) -> None:
        """A Submit of ``server`` was taken, whatever becomes of it: its frames say so from here on."""
        self._peers[server].accepted += 1

    def accepted(self) -> dict[int, int]:
        """Submits taken from the present connection of each API server."""
        return {server: peer.accepted for server, peer in self._peers.items()}

    @property
    def step(self) -> int:
        """Steps published."""
        return self._step

    # -- what goes out

    def publish(self, rows: StepRows, load: Load) -> None:
        """Send a step's rows: one frame for each API server that has any, then the streams that failed.
        What waited for room is sent first, as far as there is room.

        The arrays of ``rows`` are kept while a peer is behind: they must not change afterwards.
        """
        self._step += 1
        self.flush()
        if len(rows.server):
            frame = TokenFrame(
                step=self._step,
                stream=rows.stream,
                position=rows.position,
                tokens=rows.tokens,
                count=rows.count,
                finish=rows.finish,
                cached=rows.cached,
                logprobs=rows.logprobs,
                waiting=load.waiting,
                running=load.running,
                kv_used_permille=round(load.kv_used * 1000),
                prompt=rows.prompt,
            )
            self._split(rows, frame, rows.kv_transfer_params or {})
        self._drain_rate.step(0 if rows.finish is None else int(np.count_nonzero(rows.finish)))
        for failure in rows.failed:
            self.fail(failure, load)

    def _split(
        self, rows: StepRows, frame: TokenFrame, params: Mapping[int, dict[int, KVTransferParams]]
    ) -> None:
        """``params``: kv_transfer_params by API server and stream."""
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
        peer = self._peers.get(server)
        if peer is None:
            return
        frame.accepted = peer.accepted
        if peer.has_backlog:
            peer.segments.append(frame)
        else:
            self._try_send(server, peer, encode_frame(frame))

    def send(self, server: int, message: Message) -> None:
        """Send a message behind everything that was sent or waits; nothing when ``server`` is unknown."""
        peer = self._peers.get(server)
        if peer is None:
            return
        peer.messages.append(encode(message))
        self._flush_peer(server, peer)

    def fail(self, failure: StreamFailure, load: Load) -> None:
        """Tell a stream's API server that it failed and, where the reason is ``load``, when to try again."""
        retry_after_ms = self._drain_rate.retry_after_ms(load.waiting) if failure.code == OVERLOADED else 0
        self.send(
            failure.server,
            StreamFailed(failure.stream, failure.position, failure.code, failure.message, retry_after_ms),
        )

    def send_to_all(self, message: Message) -> None:
        for server in list(self._peers):
            self.send(server, message)

    def offer_to_all(self, message: EngineMetrics) -> None:
        """Send a message that may be lost: peers that are behind do not get it."""
        encoded = encode(message)
        for server, peer in list(self._peers.items()):
            if not peer.has_backlog:
                self._try_send(server, peer, [encoded])

    def reject_peer(self, identity: bytes, reason: str) -> None:
        """Tell a peer that is not, or no longer, attached; when there is no room it is not told."""
        with suppress(PeerGone):
            self._socket.send(identity, [encode(GoAway(reason))])

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        for server, peer in list(self._peers.items()):
            if peer.has_backlog:
                self._flush_peer(server, peer)

    def _flush_peer(self, server: int, peer: _Peer) -> None:
        while peer.has_backlog:
            parts = peer.head or _next_parts(peer)
            peer.head = None
            if not self._try_send(server, peer, parts):
                return

    def _try_send(self, server: int, peer: _Peer, parts: list[bytes]) -> bool:
        """Send, or make it the peer's head. False when it was not sent."""
        try:
            if self._socket.send(peer.identity, parts):
                return True
        except PeerGone:
            del self._peers[server]
            self._gone.append(server)
            return False
        peer.head = parts
        return False


def _next_parts(peer: _Peer) -> list[bytes]:
    if peer.segments:
        return encode_frame(peer.segments.popleft())
    return [peer.messages.popleft()]
