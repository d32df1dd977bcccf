"""An API server's connection to the coordinator: gets engines' loads and addresses, exchanges metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from penstock.dispatch.engine_client import EngineClient
from penstock.metrics.merge import merge_views, view_of
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

JOIN_INTERVAL_S = 1.0
"""Interval of repeated joins, which a restarted coordinator needs, and of this process's metrics. Also covers
missed edges of the link's edge-triggered descriptor."""


class CoordinatorClient:
    """Lives as long as the API server; the coordinator may restart meanwhile.

    Metrics of other processes go to ``engine_client.snapshots``.
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
        """Ended processes whose final metrics were sent."""
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
            for snapshot in self._engine_client.ended_snapshots():
                if snapshot.key not in self._sent_final:
                    self._sent_final.add(snapshot.key)
                    self._send_metrics(snapshot)
        self._receive()

    def _send_metrics(self, snapshot: Snapshot) -> None:
        message = ProcessMetrics(
            process=snapshot.process,
            epoch=snapshot.epoch,
            sequence=snapshot.sequence,
            snapshot=encode_snapshot(snapshot),
            incarnation=snapshot.incarnation,
        )
        self._link.send(encode(message))

    def _receive(self) -> None:
        while (part := self._link.receive()) is not None:
            try:
                self._on_message(part)
            except (WireError, ValueError) as error:
                log.error("coordinator: %s", error)

    def _on_message(self, part: bytes) -> None:
        message = decode_from_coordinator(part)
        match message:
            case EngineAddress():
                self._engine_client.on_engine_address(message)
            case FleetLoad():
                for load in message.engines:
                    self._engine_client.on_load(load)
            case ProcessMetrics():
                snapshot = decode_snapshot(message.snapshot)
                self._engine_client.snapshots = merge_views(self._engine_client.snapshots, view_of(snapshot))
            case JoinAccepted():
                for snapshot in self._engine_client.snapshots.values():
                    self._send_metrics(snapshot)
            case Rejoin():
                self._link.send(self._join)
            case JoinRejected():
                log.error("the coordinator refuses this API server: %s", message.reason)
                self._rejected = True
