"""The coordinator process: one socket, one board.

The supervisor starts it, one per fleet, and tells it on the control channel what to run as. It ends when
the supervisor says Stop or is gone. While it is away API servers go by what token frames say, and engines of
other hosts stay where they are.
"""

from __future__ import annotations

import logging
import math
import time

from penstock.coordinator.state import CoordinatorState, Outgoing
from penstock.metrics.gc_policy import GarbageCollector, GcPauses
from penstock.metrics.snapshot import Snapshot, encode_snapshot, process_name, process_series
from penstock.wire.channel import ControlChannel
from penstock.wire.control import Launch, Stop
from penstock.wire.coordination import FromCoordinator, ProcessMetrics, decode_from_member
from penstock.wire.messages import WireError, encode
from penstock.wire.sockets import PeerGone, RouterSocket, coordinator_address, resolve_address

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
"""Least time between two reports of what this process has counted."""
MESSAGES_PER_TURN = 1024
"""Messages taken before news are due again."""


def run(control: ControlChannel) -> int:
    """Be the coordinator that ``control`` asks for; returns the exit code. Raises OSError and zmq.ZMQError
    for an address that is unknown, not ours, or taken, and SupervisorGone."""
    launch = control.launch
    config = launch.config
    addresses = [coordinator_address(launch.run_dir)]
    if config.coordinator is not None:
        addresses.append(resolve_address(config.coordinator))
    socket = RouterSocket(*addresses, key=launch.key)
    try:
        board = CoordinatorState(
            ranks=launch.engine_count,
            traits=launch.traits,
            local_ranks=frozenset(launch.local_ranks),
            incarnation=launch.incarnation,
        )
        coordinator = Coordinator(socket, board)
        collector = GarbageCollector(config.gc_policy, config.gc_pause_budget_ms / 1000)
        collector.start()
        control.ready()
        figures = CoordinatorMetrics(launch, collector.pauses)
        while not any(isinstance(order, Stop) for order in control.receive()):
            if (metrics := figures.next_report(time.monotonic())) is not None:
                board.add_metrics(metrics)
            if socket.wait(coordinator.run_once(time.monotonic()), control.fileno()):
                collector.on_busy()
            else:
                collector.on_idle()
    finally:
        socket.close()
    return 0


class CoordinatorMetrics:
    """What this process has counted."""

    def __init__(self, launch: Launch, pauses: GcPauses) -> None:
        self._process = process_name("coordinator", launch.index)
        self._launch = launch
        self._pauses = pauses
        self._sequence = 0
        self._told_at = -math.inf

    def next_report(self, now: float) -> ProcessMetrics | None:
        """The metrics to tell, once in :data:`REPORT_INTERVAL_S`. Members that speak wake the process as
        often."""
        if now < self._told_at + REPORT_INTERVAL_S:
            return None
        self._told_at = now
        self._sequence += 1
        epoch, incarnation = self._launch.epoch, self._launch.incarnation
        series = list(process_series(self._process, self._launch.restarts, self._pauses))
        snapshot = encode_snapshot(Snapshot(self._process, epoch, self._sequence, series, incarnation))
        return ProcessMetrics(self._process, epoch, self._sequence, snapshot, incarnation)


class Coordinator:
    """Carries messages between the socket and the board."""

    def __init__(self, socket: RouterSocket, board: CoordinatorState) -> None:
        self._socket = socket
        self._board = board

    def run_once(self, now: float) -> float | None:
        """Take what waits, send what is due. Returns the seconds until something is due, None: nothing."""
        for _ in range(MESSAGES_PER_TURN):
            message = self._socket.receive()
            if message is None:
                break
            self._take(*message, now)
        else:
            return 0.0
        self._send(self._board.take_updates(now))
        due = self._board.next_update_at()
        return None if due is None else max(0.0, due - now)

    def _take(self, identity: bytes, parts: list[bytes], now: float) -> None:
        try:
            for part in parts:
                self._send(self._board.receive(identity, decode_from_member(part), now))
        except WireError as error:
            log.error("peer %r: %s", identity, error)

    def _send(self, messages: list[Outgoing]) -> None:
        for identity, message in messages:
            self._send_one(identity, message)

    def _send_one(self, identity: bytes, message: FromCoordinator) -> None:
        try:
            if not self._socket.send(identity, [encode(message)]):
                self._board.on_send_failed(identity)
        except PeerGone:
            self._board.remove_member(identity)
