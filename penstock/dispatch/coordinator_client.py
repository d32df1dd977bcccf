"""An API server's membership in the fleet: places and loads of engines and metrics of other processes, by way
of the coordinator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from penstock.dispatch.engine_client import EngineClient
from penstock.metrics.snapshot import (
    ProcessKey,
    Snapshot,
    decode_snapshot,
    encode_snapshot,
    merge_views,
    view_of,
)
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

TURN_S = 1.0
"""How often it joins again, which tells a coordinator that was restarted that it is there, and tells its own
metrics. Also the safety timer of the link's edge-triggered descriptor."""


class CoordinatorClient:
    """Lives as long as the API server; the coordinator may come and go meanwhile.

    What others have counted is kept with the fleet's snapshots.
    """

    def __init__(self, launch: Launch, engine_client: EngineClient) -> None:
        """Of the API server that ``launch`` asks for, in a fleet with a coordinator."""
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
        self._refused = False
        self._told: set[ProcessKey] = set()
        """Ended processes that the coordinator was told of."""
        self._loop.add_reader(self._link.fd, self._receive)
        self._turn()

    def speak(self, snapshot: Callable[[], Snapshot]) -> None:
        """From here on there is something to tell; ``snapshot`` makes one of this process."""
        self._snapshot = snapshot

    def close(self) -> None:
        """Tell the last metrics, and leave."""
        if self._snapshot is not None:
            self._tell(self._snapshot())
        self._loop.remove_reader(self._link.fd)
        if self._timer is not None:
            self._timer.cancel()
        self._link.close()

    def _turn(self) -> None:
        self._timer = self._loop.call_later(TURN_S, self._turn)
        if not self._refused:
            self._link.send(self._join)
            if self._snapshot is not None:
                self._tell(self._snapshot())
            for snapshot in self._engine_client.ended_snapshots():
                self._tell_last(snapshot)
        self._receive()

    def _tell_last(self, snapshot: Snapshot) -> None:
        """Of a process that has ended: once."""
        if snapshot.key not in self._told:
            self._told.add(snapshot.key)
            self._tell(snapshot)

    def _tell(self, snapshot: Snapshot) -> None:
        encoded = encode_snapshot(snapshot)
        process, incarnation, epoch = snapshot.key
        self._link.send(encode(ProcessMetrics(process, epoch, snapshot.sequence, encoded, incarnation)))

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
                self._engine_client.place(message)
            case FleetLoad():
                for load in message.engines:
                    self._engine_client.on_load(load)
            case ProcessMetrics():
                snapshot = decode_snapshot(message.snapshot)
                self._engine_client.snapshots = merge_views(self._engine_client.snapshots, view_of(snapshot))
            case JoinAccepted():
                for snapshot in self._engine_client.snapshots.values():
                    self._tell(snapshot)
            case Rejoin():
                self._link.send(self._join)
            case JoinRejected():
                log.error("the coordinator refuses this API server: %s", message.reason)
                self._refused = True
