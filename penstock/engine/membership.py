"""An engine's reports to the coordinator: what it has to do, when that changes."""

import logging
from typing import Protocol

from ..wire.control import Launch
from ..wire.coordination import (
    PROTOCOL_VERSION,
    EngineJoin,
    EngineReport,
    Refused,
    Rejoin,
    decode_from_coordinator,
)
from ..wire.messages import WireError, encode
from ..wire.sockets import MemberLink, coordinator_address, engine_identity
from .base import Load

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.1
"""At most so often while the engine is busy."""


class Link(Protocol):
    """What :class:`penstock.wire.sockets.MemberLink` is to a membership."""

    def send(self, part: bytes) -> bool: ...

    def receive(self) -> bytes | None: ...

    def close(self) -> None: ...


class Membership:
    """Knows what the coordinator was told. A coordinator that is away costs nothing but the news."""

    def __init__(self, link: Link, rank: int, epoch: int) -> None:
        self._link = link
        self._join = encode(EngineJoin(PROTOCOL_VERSION, rank, epoch))
        self._told: object = None
        self._next = 0.0
        self._joined = False
        self._refused = False

    @classmethod
    def of(cls, launch: Launch) -> "Membership | None":
        """Of the engine that ``launch`` asks for; None when there is no coordinator."""
        if not launch.has_coordinator:
            return None
        identity = engine_identity(launch.index, launch.epoch)
        return cls(MemberLink(coordinator_address(launch.run_dir), identity), launch.index, launch.epoch)

    def close(self) -> None:
        self._link.close()

    def turn(self, now: float, load: Load, accepted: dict[int, int], step: int, *, idle: bool) -> None:
        """Read what came, and report what changed: at once when ``idle``, otherwise when it is time.

        ``accepted``: Submits taken from each API server's connection; ``step``: frames published.
        """
        self._read()
        kv_used_permille = round(load.kv_used * 1000)
        figures = load.waiting, load.running, kv_used_permille, dict(accepted)
        if self._refused or figures == self._told or not (idle or now >= self._next):
            return
        if not self._joined:
            self._joined = self._link.send(self._join)
        flat = [number for pair in accepted.items() for number in pair]
        report = EngineReport(step, load.waiting, load.running, kv_used_permille, flat)
        if self._link.send(encode(report)):
            self._told, self._next = figures, now + REPORT_INTERVAL_S

    def _read(self) -> None:
        while (part := self._link.receive()) is not None:
            try:
                message = decode_from_coordinator(part)
            except WireError as error:
                log.error("coordinator: %s", error)
                continue
            if isinstance(message, Rejoin):
                self._joined, self._told = False, None
            elif isinstance(message, Refused):
                log.error("the coordinator refuses this engine: %s", message.reason)
                self._refused = True
