"""Sends each API server its rows of every step as one token frame, without blocking on slow readers.

What does not fit a peer's ZMQ queue is kept here as its backlog: token frames, merged by stream as they
gather, so that they take about one int per token, and behind them the messages that must not overtake rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

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
from penstock.wire.sockets import PeerGone, RouterSocket

SEGMENT_TOKENS_PER_ROW = 64
"""A frame with this many tokens per row is not merged further: its rows' columns are small beside its
tokens, and the time of a merge stays bounded, however large the backlog."""

Message = Welcome | StreamFailed | RpcReply | GoAway | Draining


class FrameBacklog:
    """Consecutive frames of one API server, merged into few; each token is merged a bounded number of
    times."""

    def __init__(self) -> None:
        self._frames: deque[TokenFrame] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def append(self, frame: TokenFrame) -> None:
        """Merges like a binary carry: while the last frame has at least half its neighbour's tokens."""
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
    """An API server and its backlog, in the order in which it must be sent: head, segments, messages."""

    identity: bytes
    head: list[bytes] | None = None
    """An encoded message that found the ZMQ queue full."""
    segments: FrameBacklog = field(default_factory=FrameBacklog)
    messages: deque[bytes] = field(default_factory=deque)
    accepted: int = 0
    """Submits received on its connection."""

    @property
    def has_backlog(self) -> bool:
        return bool(self.head is not None or self.segments or self.messages)


class Publisher:
    """Sends the rows and messages of one engine to its API servers, in order for each of them."""

    def __init__(self, socket: RouterSocket, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns monotonic seconds."""
        self._socket = socket
        self._drain_rate = DrainRate(clock)
        self._peers: dict[int, _Peer] = {}
        self._gone: list[int] = []
        self.attach_count = 0
        """API servers attached since the start, reconnections included."""
        self.step = 0
        """Steps published."""

    # -- API servers come and go

    def attach(self, server: int, identity: bytes) -> None:
        """Bind ``server`` to the peer ``identity``; the backlog of its predecessor is discarded."""
        self.attach_count += 1
        self._peers[server] = _Peer(identity)
        if server in self._gone:
            self._gone.remove(server)  # that was its predecessor

    def detach(self, server: int) -> None:
        """Discard the backlog of ``server``, and all its rows from here on."""
        self._peers.pop(server, None)

    def take_disconnected(self) -> list[int]:
        """API servers whose connection broke, each returned once; they are detached already."""
        gone, self._gone = self._gone, []
        return gone

    @property
    def has_backlog(self) -> bool:
        """Whether any peer has a backlog."""
        return any(peer.has_backlog for peer in self._peers.values())

    def count_submit(self, server: int) -> None:
        """Count a Submit received from ``server``, rejected or not; its frames carry the count."""
        self._peers[server].accepted += 1

    def accepted(self) -> dict[int, int]:
        """Submits received on the current connection of each API server."""
        return {server: peer.accepted for server, peer in self._peers.items()}

    # -- sending

    def publish(self, rows: StepRows, load: Load) -> None:
        """Send a step's rows: one frame for each API server that has any, then the streams that failed.
        The backlog is sent first, as far as there is room.

        The arrays of ``rows`` are kept while a peer has a backlog: they must not change afterwards.
        """
        self.step += 1
        self.flush()
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
        peer = self._peers.get(server)
        if peer is None:
            return
        frame.accepted = peer.accepted
        if peer.has_backlog:
            peer.segments.append(frame)
        else:
            self._try_send(server, peer, encode_frame(frame))

    def send(self, server: int, message: Message) -> None:
        """Send a message behind the backlog of ``server``; does nothing when it is not attached."""
        peer = self._peers.get(server)
        if peer is None:
            return
        peer.messages.append(encode(message))
        self._flush_peer(server, peer)

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

    def send_to_all(self, message: Message) -> None:
        for server in list(self._peers):
            self.send(server, message)

    def offer_to_all(self, message: EngineMetrics) -> None:
        """Send a message that may be lost: peers with a backlog do not get it."""
        encoded = encode(message)
        for server, peer in list(self._peers.items()):
            if not peer.has_backlog:
                self._try_send(server, peer, [encoded])

    def reject_peer(self, identity: bytes, reason: str) -> None:
        """Send GoAway to a peer that is not attached; it is lost when the peer's queue is full."""
        with suppress(PeerGone):
            self._socket.send(identity, [encode(GoAway(reason))])

    def flush(self) -> None:
        """Send the backlog of every peer, as far as there is room."""
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
        """Send ``parts``, or keep them as the peer's head. False when they were not sent."""
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
