"""An engine's membership in the fleet: joins the coordinator, and reports the load when it changes."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from penstock.engine.base import Load
from penstock.logging_setup import RateLimitedLog
from penstock.wire.control import Launch
from penstock.wire.coordination import (
    COORDINATOR_PROTOCOL_VERSION,
    ENGINE_TRAITS,
    EngineJoin,
    EngineReport,
    JoinAccepted,
    JoinRejected,
    JoinRejectedError,
    MemberLeave,
    Rejoin,
    decode_from_coordinator,
)
from penstock.wire.messages import EngineInfo, WireError, encode
from penstock.wire.sockets import CoordinatorLink, engine_address, engine_identity, host_and_port, tcp_address

log = logging.getLogger(__name__)
_warn = RateLimitedLog(log, logging.ERROR)

REPORT_INTERVAL_S = 0.1
"""Minimum seconds between two reports while the engine is busy."""
JOIN_INTERVAL_S = 1.0
"""Seconds between two EngineJoin messages, which also renew the lease on the rank."""
PROGRESS_INTERVAL_S = 10.0
"""Seconds between two progress messages of an engine that waits for the coordinator."""
MAX_HANDSHAKE_FAILURES = 3
"""After this many failures in a row, one a second, the key is wrong; a single one may be a coordinator that
is ending."""


class EngineMembership:
    """Keeps the coordinator informed. The engine runs on while the coordinator is away."""

    def __init__(self, link: CoordinatorLink, join: EngineJoin, where: str = "") -> None:
        """``where``: the coordinator's address, for messages."""
        self._link = link
        self._where = where
        self._join = encode(join)
        self._reported: object = None
        """The figures of the last report."""
        self._next_report = self._next_join = float("-inf")
        self.joined = False
        """Whether the coordinator has accepted the engine."""
        self._head = 0

    @classmethod
    def from_launch(cls, launch: Launch, address: str, info: EngineInfo) -> EngineMembership | None:
        """For the engine of ``launch``, which listens on ``address``; None when there is no coordinator."""
        if launch.coordinator is None:
            return None
        identity = engine_identity(launch.index, launch.epoch, launch.incarnation)
        link = CoordinatorLink(launch.coordinator, identity, launch.key)
        join = EngineJoin(
            protocol=COORDINATOR_PROTOCOL_VERSION,
            rank=launch.index,
            epoch=launch.epoch,
            incarnation=launch.incarnation,
            address=address if host_and_port(address) else "",
            traits=launch.traits | traits_of(info),
        )
        return cls(link, join, launch.coordinator)

    def close(self) -> None:
        self._link.send(encode(MemberLeave()))
        self._link.close()

    def wait_until_joined(self, progress: Callable[[str, float | None], None]) -> None:
        """Wait until the coordinator has accepted this engine. Raises JoinRejectedError."""
        failures, next_progress = 0, time.monotonic()
        while not self.joined:
            self._link.send(self._join)
            if self._link.wait(JOIN_INTERVAL_S):
                self._read()
                continue
            failures = failures + 1 if self._link.refused() else 0
            if failures == MAX_HANDSHAKE_FAILURES:
                raise JoinRejectedError(
                    f"--coordinator {self._where}: has another key (--cluster-key-file), or is no coordinator"
                )
            if time.monotonic() >= next_progress:
                next_progress = time.monotonic() + PROGRESS_INTERVAL_S
                progress(f"waiting for the coordinator at {self._where}", None)

    def poll(self, now: float, load: Load, accepted: dict[int, int], step: int, *, idle: bool) -> None:
        """Read messages, and report the load if it has changed: at once when ``idle``, otherwise when a
        report is due.

        ``accepted``: Submits received on each API server's connection; ``step``: steps published. Raises
        JoinRejectedError.
        """
        self._read()
        if now >= self._next_join:
            self._link.reconnect_if_silent(now)
            if self._link.send(self._join):
                self._next_join = now + JOIN_INTERVAL_S
        figures = load.waiting, load.running, load.kv_used, dict(accepted)
        if figures == self._reported or not (idle or now >= self._next_report):
            return
        flat = [number for pair in accepted.items() for number in pair]
        report = EngineReport(
            step=step,
            waiting=load.waiting,
            running=load.running,
            kv_used=load.kv_used,
            accepted=flat,
        )
        if self._link.send(encode(report)):
            self._reported, self._next_report = figures, now + REPORT_INTERVAL_S

    def current_head(self) -> int:
        """Incarnation of the head that has accepted this engine last, 0: none has. Raises
        JoinRejectedError."""
        self._read()
        return self._head

    def _read(self) -> None:
        while (part := self._link.receive()) is not None:
            try:
                message = decode_from_coordinator(part)
            except WireError as error:
                _warn("coordinator", "the coordinator sent what cannot be understood: %.300s", error)
                continue
            match message:
                case JoinAccepted():
                    self.joined = True
                    self._head = message.incarnation
                case Rejoin():
                    self._next_join, self._reported = float("-inf"), None
                case JoinRejected():
                    raise JoinRejectedError(f"the fleet does not take this engine: {message.reason}")


def traits_of(info: EngineInfo) -> dict[str, str]:
    """The properties of a started engine that all engines of a fleet must share."""
    return {name: str(getattr(info, name)) for name in ENGINE_TRAITS}


def listening_address(launch: Launch) -> str:
    """Where the engine of ``launch`` listens: in the run directory or, for API servers on another host, on a
    free port of the address from which this host reaches the coordinator. Raises OSError."""
    if launch.index in launch.local_ranks:
        return engine_address(launch.run_dir, launch.index)
    assert launch.coordinator is not None
    coordinator = host_and_port(launch.coordinator)
    assert coordinator is not None
    return tcp_address(launch.config.engine_host or _host_towards(*coordinator), "*")


def _host_towards(host: str, port: int) -> str:
    """This host's address on the route to another host. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
