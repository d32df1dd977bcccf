"""An engine's membership in the fleet: it joins the coordinator, and reports what it has to do when that
changes."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Protocol

from penstock.engine.base import Load
from penstock.wire.control import Launch
from penstock.wire.coordination import (
    COORDINATOR_PROTOCOL_VERSION,
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

REPORT_INTERVAL_S = 0.1
"""At most so often while the engine is busy."""
JOIN_INTERVAL_S = 1.0
"""How often it says that it is there."""
PROGRESS_INTERVAL_S = 10.0
"""How often an engine that waits for the coordinator says so."""
MAX_HANDSHAKE_FAILURES = 3
"""After so many failures in a row, each a second apart, it is the key: one may be a coordinator that ends."""


class CoordinatorSocket(Protocol):
    """What :class:`penstock.wire.sockets.CoordinatorLink` is to a membership."""

    def send(self, part: bytes) -> bool: ...

    def receive(self) -> bytes | None: ...

    def refused(self) -> bool: ...

    def wait(self, timeout_s: float) -> bool: ...

    def close(self) -> None: ...


class EngineMembership:
    """Knows what the coordinator was told. A coordinator that is away costs nothing but the news."""

    def __init__(self, link: CoordinatorSocket, join: EngineJoin, where: str = "") -> None:
        """``where`` the coordinator is, for messages."""
        self._link = link
        self._where = where
        self._message = encode(join)
        self._reported: object = None
        self._next_report = self._next_join = float("-inf")
        self.joined = False
        """Whether the coordinator has taken it, as of what was read."""

    @classmethod
    def from_launch(cls, launch: Launch, address: str, info: EngineInfo) -> EngineMembership | None:
        """Of the engine that ``launch`` asks for and that listens on ``address``; None when there is no
        coordinator."""
        if launch.coordinator is None:
            return None
        identity = engine_identity(launch.index, launch.epoch, launch.incarnation)
        link = CoordinatorLink(launch.coordinator, identity, launch.key)
        join = EngineJoin(
            COORDINATOR_PROTOCOL_VERSION,
            launch.index,
            launch.epoch,
            launch.incarnation,
            address if host_and_port(address) else "",
            launch.traits | traits_of(info),
        )
        return cls(link, join, launch.coordinator)

    def close(self) -> None:
        self._link.send(encode(MemberLeave()))
        self._link.close()

    def wait_until_joined(self, progress: Callable[[str, float | None], None]) -> None:
        """Until the coordinator has taken this engine. Raises JoinRejectedError."""
        handshakes, next_news = 0, time.monotonic()
        while not self.joined:
            self._link.send(self._message)
            if self._link.wait(JOIN_INTERVAL_S):
                self._read()
                continue
            handshakes = handshakes + 1 if self._link.refused() else 0
            if handshakes == MAX_HANDSHAKE_FAILURES:
                raise JoinRejectedError(
                    f"--coordinator {self._where}: has another key (--cluster-key-file), or is no coordinator"
                )
            if time.monotonic() >= next_news:
                next_news = time.monotonic() + PROGRESS_INTERVAL_S
                progress(f"waiting for the coordinator at {self._where}", None)

    def poll(self, now: float, load: Load, accepted: dict[int, int], step: int, *, idle: bool) -> None:
        """Read what came, and report what changed: at once when ``idle``, otherwise when it is time.

        ``accepted``: Submits taken from each API server's connection; ``step``: frames published. Raises
        JoinRejectedError.
        """
        self._read()
        if now >= self._next_join and self._link.send(self._message):
            self._next_join = now + JOIN_INTERVAL_S
        kv_used_permille = round(load.kv_used * 1000)
        figures = load.waiting, load.running, kv_used_permille, dict(accepted)
        if figures == self._reported or not (idle or now >= self._next_report):
            return
        flat = [number for pair in accepted.items() for number in pair]
        report = EngineReport(step, load.waiting, load.running, kv_used_permille, flat)
        if self._link.send(encode(report)):
            self._reported, self._next_report = figures, now + REPORT_INTERVAL_S

    def _read(self) -> None:
        while (part := self._link.receive()) is not None:
            try:
                message = decode_from_coordinator(part)
            except WireError as error:
                log.error("coordinator: %s", error)
                continue
            match message:
                case JoinAccepted():
                    self.joined = True
                case Rejoin():
                    self._next_join, self._reported = float("-inf"), None
                case JoinRejected():
                    raise JoinRejectedError(f"the fleet does not take this engine: {message.reason}")


def traits_of(info: EngineInfo) -> dict[str, str]:
    """What engines of one fleet must have in common, as far as an engine knows when it has started."""
    return {
        "max_model_len": str(info.max_model_len),
        "vocab_size": str(info.vocab_size),
        "dtype": info.dtype,
    }


def listening_address(launch: Launch) -> str:
    """Where the engine of ``launch`` listens: in the run directory, or, when API servers are on another host,
    at a free port of the address by which this host reaches the coordinator. Raises OSError."""
    if launch.index in launch.local_ranks:
        return engine_address(launch.run_dir, launch.index)
    assert launch.coordinator is not None
    coordinator = host_and_port(launch.coordinator)
    assert coordinator is not None
    return tcp_address(launch.config.engine_host or _host_towards(*coordinator), "*")


def _host_towards(host: str, port: int) -> str:
    """This host's own address on the way to another. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
