"""The coordinator process: passes messages between its socket and the :class:`CoordinatorState`.

The supervisor starts one per fleet, and sends its configuration over the control channel. It owns the socket
that engines and API servers connect to. It reads their joins, reports and metrics, and writes loads, metrics
and engine addresses to API servers; metrics that they show it keeps in the run directory. It ends on Stop, or
when the supervisor is gone. While it is away, API servers use the loads in token frames and the engine
addresses that they know.
"""

from __future__ import annotations

import logging
import math
import re
import time
from pathlib import Path

import zmq

from penstock.config.errors import ConfigError
from penstock.coordinator.state import CoordinatorState, Outgoing
from penstock.coordinator.vllm_handshake import VllmHandshake
from penstock.logging_setup import RateLimitedLog
from penstock.metrics.board_file import BoardFile
from penstock.metrics.families import MESSAGES_REFUSED
from penstock.metrics.gc_policy import GarbageCollector, GcPauses
from penstock.metrics.snapshot import Series, Snapshot, encode_snapshot, process_name, process_series
from penstock.wire.channel import ControlChannel
from penstock.wire.control import HEARTBEAT_INTERVAL_S, Launch, Stop
from penstock.wire.coordination import (
    FromCoordinator,
    MetricsQuery,
    ProcessMetrics,
    check_identity,
    decode_from_member,
)
from penstock.wire.messages import WireError, encode
from penstock.wire.parts import Part
from penstock.wire.sockets import PeerGone, RouterSocket, coordinator_address, resolve_address
from penstock.wire.vllm.addresses import bind_address, split_address
from penstock.wire.vllm.model_kind import has_experts

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
"""Minimum seconds between two reports of this process's own metrics."""
MESSAGES_PER_TURN = 256
"""Messages handled before updates are sent: a flood must not put them off."""
MEMBER_QUEUE = 16
"""Messages of one member that wait to be handled; ZMQ reads no more of it."""
_IDENTITY = re.compile(rb"(engine|api-server)-[0-9]{1,4}(?=-)")


def run(control: ControlChannel) -> int:
    """Run the coordinator of ``control.launch``; returns the exit code.

    Raises SupervisorGone, and OSError and zmq.ZMQError for an address that cannot be resolved, is not this
    host's, or is in use.
    """
    launch = control.launch
    config = launch.config
    addresses = [coordinator_address(launch.run_dir)]
    if config.coordinator is not None:
        addresses.append(resolve_address(config.coordinator))
    socket = RouterSocket(*addresses, key=launch.key, receive_queue=MEMBER_QUEUE, reconnecting=True)
    handshake: VllmHandshake | None = None
    try:
        handshake = _open_handshake(launch)
        wakeups = () if handshake is None else handshake.wakeups
        state = CoordinatorState(
            ranks=launch.engine_count,
            traits=launch.traits,
            local_ranks=frozenset(launch.local_ranks),
            incarnation=launch.incarnation,
        )
        if handshake is not None:
            handshake.is_attached = state.has_engine
        file = BoardFile(launch.run_dir, launch.incarnation)
        file.load(state.board)
        coordinator = Coordinator(socket, state, file)
        collector = GarbageCollector(config.gc_policy)
        collector.start()
        control.ready()
        own_metrics = CoordinatorMetrics(launch, collector.pauses)
        heartbeat_at = 0.0
        while not any(isinstance(command, Stop) for command in control.receive()):
            if (now := time.monotonic()) >= heartbeat_at:
                heartbeat_at = now + HEARTBEAT_INTERVAL_S
                control.heartbeat()
            metrics = own_metrics.next_report(now, coordinator.refused)
            if metrics is not None:
                state.add_metrics(metrics)
            due = coordinator.run_once(time.monotonic())
            retry = None if handshake is None else handshake.run_once()
            wait_s = min(wait for wait in (due, retry, HEARTBEAT_INTERVAL_S) if wait is not None)
            if socket.wait(wait_s, control.fileno(), *wakeups):
                collector.on_busy()
            else:
                collector.on_idle()
    finally:
        if handshake is not None:
            handshake.close()
        socket.close()
    return 0


def _open_handshake(launch: Launch) -> VllmHandshake | None:
    """Where vLLM's engines connect to be attached; None: none are. Raises ConfigError, OSError."""
    config = launch.config
    if config.attach is None:
        return None
    host, port = bind_address(config.attach)
    in_group = config.data_parallel_size > 1 and has_experts(Path(launch.model_dir))
    try:
        handshake = VllmHandshake(
            host, port, ranks=config.data_parallel_size, run_dir=launch.run_dir, in_group=in_group
        )
    except zmq.ZMQError as error:
        raise ConfigError(str(error)) from None
    log.info(
        "vLLM's engines connect with --data-parallel-address %s --data-parallel-rpc-port %d",
        split_address(config.attach)[0],
        handshake.port,
    )
    return handshake


class CoordinatorMetrics:
    """Snapshots of this process's own metrics."""

    def __init__(self, launch: Launch, pauses: GcPauses) -> None:
        self._process = process_name("coordinator", launch.index)
        self._launch = launch
        self._pauses = pauses
        self._sequence = 0
        self._reported_at = -math.inf

    def next_report(self, now: float, refused: int = 0) -> ProcessMetrics | None:
        """The metrics, once in :data:`REPORT_INTERVAL_S`; None in between. Needs no timer: engines' joins
        wake the process as often. ``refused``: messages that could not be used."""
        if now < self._reported_at + REPORT_INTERVAL_S:
            return None
        self._reported_at = now
        self._sequence += 1
        snapshot = Snapshot(
            process=self._process,
            epoch=self._launch.epoch,
            sequence=self._sequence,
            series=[
                *process_series(self._process, self._launch.restarts, self._pauses),
                Series(MESSAGES_REFUSED.name, (self._process,), refused),
            ],
            incarnation=self._launch.incarnation,
        )
        return ProcessMetrics(
            process=snapshot.process,
            epoch=snapshot.epoch,
            sequence=snapshot.sequence,
            snapshot=encode_snapshot(snapshot),
            incarnation=snapshot.incarnation,
        )


class Coordinator:
    """Carries messages between the socket and the state."""

    def __init__(self, socket: RouterSocket, state: CoordinatorState, file: BoardFile | None = None) -> None:
        """``file`` keeps the metrics that API servers show; None: they are not kept."""
        self._socket = socket
        self._state = state
        self._file = file
        self._saved = -1
        """Version of the state in the file."""
        self._warn = RateLimitedLog(log, logging.ERROR)
        self.refused = 0
        """Messages that could not be used."""

    def run_once(self, now: float) -> float | None:
        """Handle waiting messages, send updates that are due. Returns the seconds until the next update is
        due; None: there is none."""
        drained = False
        for _ in range(MESSAGES_PER_TURN):
            message = self._socket.receive()
            if message is None:
                drained = True
                break
            self._handle(*message, now)
        self._send(self._state.take_updates(now), now)
        due = self._state.next_update_at() if drained else now
        return None if due is None else max(0.0, due - now)

    def _handle(self, identity: bytes, parts: list[Part], now: float) -> None:
        try:
            if len(parts) != 1:
                raise WireError(f"a message of {len(parts)} parts, not one")
            message = decode_from_member(parts[0])
            check_identity(identity, message)
            replies = self._state.receive(identity, message, now)
            if isinstance(message, MetricsQuery) and not message.fresh:
                self._save()
            self._send(replies, now)
        except WireError as error:
            self.refused += 1
            self._warn(_subject(identity), "%s is refused a message: %.300s", _name(identity), error)

    def _save(self) -> None:
        if self._file is not None and self._saved != self._state.version:
            self._saved = self._state.version
            self._file.save(self._state.board)

    def _send(self, messages: list[Outgoing], now: float) -> None:
        full: set[bytes] = set()
        for identity, message in messages:
            if identity not in full and not self._send_one(identity, message, now):
                full.add(identity)

    def _send_one(self, identity: bytes, message: FromCoordinator, now: float) -> bool:
        """False: nothing more can be sent to it."""
        try:
            if self._socket.send(identity, [encode(message)]):
                return True
            self._state.on_send_failed(identity, now)
        except PeerGone:
            self._state.remove_member(identity)
        return False


def _name(identity: bytes) -> str:
    return identity[:80].decode(errors="backslashreplace")


def _subject(identity: bytes) -> str:
    """Role and number of a member, the same for all its processes and connections."""
    match = _IDENTITY.match(identity)
    return match[0].decode() if match else ""
