"""An API server's connection to the coordinator: gets engines' loads and addresses, exchanges metrics."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from penstock.dispatch.engine_client import EngineClient
from penstock.logging_setup import RateLimitedLog
from penstock.metrics.board import Posted
from penstock.metrics.snapshot import ProcessKey, Snapshot, decode_snapshot, encode_snapshot
from penstock.wire.control import Launch
from penstock.wire.coordination import (
    COORDINATOR_PROTOCOL_VERSION,
    EngineAddress,
    FleetLoad,
    JoinAccepted,
    JoinRejected,
    ProcessMetrics,
    Rejoin,
    ServerJoin,
    decode_from_coordinator,
)
from penstock.wire.messages import WireError, encode
from penstock.wire.sockets import CoordinatorLink, server_identity

log = logging.getLogger(__name__)
_complain = RateLimitedLog(log, logging.ERROR)

JOIN_INTERVAL_S = 1.0
"""Interval of repeated joins, which a restarted coordinator needs, and of this process's metrics. Also covers
missed edges of the link's edge-triggered descriptor."""


class CoordinatorClient:
    """Lives as long as the API server; the coordinator may restart meanwhile.

    Metrics of other processes go to ``engine_client.board``.
    """

    def __init__(self, launch: Launch, engine_client: EngineClient) -> None:
        """``launch``: this API server's, in a fleet with a coordinator."""
        assert launch.coordinator is not None
        index, epoch, incarnation = launch.index, launch.epoch, launch.incarnation
        self._loop = asyncio.get_running_loop()
        self._link = CoordinatorLink(
            launch.coordinator, server_identity(index, epoch, incarnation), launch.key
        )
        self._join = encode(ServerJoin(COORDINATOR_PROTOCOL_VERSION, index, epoch, incarnation))
        self._engine_client = engine_client
        self._snapshot: Callable[[], Snapshot] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rejected = False
        self._sent_final: set[ProcessKey] = set()
        """Ended engines whose final metrics were sent."""
        self._to_repeat: deque[Posted] = deque()
        """Entries of the board that a new coordinator is sent, as its queue takes them."""
        self._loop.add_reader(self._link.fd, self._receive)
        self._tick()

    def start_reporting(self, snapshot: Callable[[], Snapshot]) -> None:
        """Sends this process's metrics from here on; ``snapshot`` returns them."""
        self._snapshot = snapshot

    def close(self) -> None:
        """Sends the final metrics and disconnects."""
        if self._snapshot is not None:
            self._send_metrics(self._snapshot())
        self._loop.remove_reader(self._link.fd)
        if self._timer is not None:
            self._timer.cancel()
        self._link.close()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(JOIN_INTERVAL_S, self._tick)
        if not self._rejected:
            self._link.send(self._join)
            if self._snapshot is not None:
                self._send_metrics(self._snapshot())
            self._send_final_metrics()
            self._repeat()
        self._receive()

    def _send_final_metrics(self) -> None:
        board, ended = self._engine_client.board, self._engine_client.ended_engines()
        self._sent_final &= set(ended)
        for key in ended:
            if key not in self._sent_final and self._send(board.find(key)):
                self._sent_final.add(key)

    def _repeat(self) -> None:
        while self._to_repeat and self._send(self._to_repeat[0]):
            self._to_repeat.popleft()

    def _send(self, posted: Posted) -> bool:
        return self._link.send(encode(posted.message()))

    def _send_metrics(self, snapshot: Snapshot) -> None:
        self._send(Posted(snapshot.key, snapshot.sequence, encode_snapshot(snapshot)))

    def _receive(self) -> None:
        while (part := self._link.receive()) is not None:
            try:
                self._on_message(part)
            except (WireError, ValueError) as error:
                _complain("coordinator", "coordinator: %.300s", error)

    def _on_message(self, part: bytes) -> None:
        message = decode_from_coordinator(part)
        match message:
            case EngineAddress():
                self._engine_client.on_engine_address(message)
            case FleetLoad():
                for load in message.engines:
                    self._engine_client.on_load(load)
            case ProcessMetrics():
                self._engine_client.board.offer(decode_snapshot(message.snapshot), message.snapshot)
            case JoinAccepted():
                self._to_repeat = deque(self._engine_client.board)
                self._repeat()
            case Rejoin():
                self._link.send(self._join)
            case JoinRejected():
                log.error("the coordinator refuses this API server: %s", message.reason)
                self._rejected = True
