"""What the coordinator knows and whom it tells, without sockets or clocks.

Engines post reports, API servers what they have counted; every API server is told what changed since it was
told last, at most once per ``interval_s``. Nothing here is needed for serving: without a coordinator API
servers go by the loads that come with token frames.
"""

from dataclasses import dataclass, field

from ..wire.coordination import (
    PROTOCOL_VERSION,
    EngineJoin,
    EngineLoad,
    EngineReport,
    FleetLoad,
    FromCoordinator,
    FromMember,
    Joined,
    Leave,
    ProcessMetrics,
    Refused,
    Rejoin,
    ServerJoin,
)

Outgoing = tuple[bytes, FromCoordinator]
"""A message and the identity of the member that it is for."""


@dataclass(slots=True)
class _Engine:
    rank: int
    epoch: int
    report: EngineReport | None = None
    version: int = 0
    """Of the board when ``report`` came."""


@dataclass(slots=True)
class _Server:
    index: int
    told: int = 0
    """Version of the board that it knows."""


@dataclass(slots=True, frozen=True)
class _Posted:
    metrics: ProcessMetrics
    by: bytes
    """Identity of the API server, which knows them."""
    version: int


@dataclass(slots=True)
class Board:
    """Members by identity; times are seconds of any monotonic clock."""

    interval_s: float = 0.1
    _engines: dict[bytes, _Engine] = field(default_factory=dict)
    _servers: dict[bytes, _Server] = field(default_factory=dict)
    _metrics: dict[tuple[str, int], _Posted] = field(default_factory=dict)
    """By process and epoch; those of processes that have ended stay."""
    _version: int = 0
    """Counts changes."""
    _pushed: int = 0
    """Version at the last push."""
    _pushed_at: float = float("-inf")

    def receive(self, identity: bytes, message: FromMember) -> list[Outgoing]:
        """A message of a member; returns the answers."""
        match message:
            case EngineJoin() | ServerJoin():
                return self._join(identity, message)
            case Leave():
                self.forget(identity)
                return []
            case EngineReport():
                engine = self._engines.get(identity)
                if engine is None:
                    return [(identity, Rejoin())]
                self._version += 1
                engine.report, engine.version = message, self._version
                return []
            case ProcessMetrics():
                if identity not in self._servers:
                    return [(identity, Rejoin())]
                self._post(identity, message)
                return []

    def _post(self, identity: bytes, metrics: ProcessMetrics) -> None:
        key = metrics.process, metrics.epoch
        known = self._metrics.get(key)
        if known is None or known.metrics.sequence < metrics.sequence:
            self._version += 1
            self._metrics[key] = _Posted(metrics, identity, self._version)

    def _join(self, identity: bytes, join: EngineJoin | ServerJoin) -> list[Outgoing]:
        if join.protocol != PROTOCOL_VERSION:
            reason = (
                f"it speaks version {join.protocol} of the coordinator's protocol, not {PROTOCOL_VERSION}"
            )
            return [(identity, Refused(reason))]
        if isinstance(join, ServerJoin):
            if identity in self._servers:
                return []
            self._servers = {key: known for key, known in self._servers.items() if known.index != join.server}
            server = self._servers[identity] = _Server(join.server)
            return [(identity, Joined()), *self._news(identity, server)]
        self._engines = {key: known for key, known in self._engines.items() if known.rank != join.rank}
        self._engines[identity] = _Engine(join.rank, join.epoch)
        return []

    def forget(self, identity: bytes) -> None:
        """The member is gone. Unknown ones are ignored."""
        self._engines.pop(identity, None)
        self._servers.pop(identity, None)

    def missed(self, identity: bytes) -> None:
        """A message could not be sent to the API server: the next push tells it everything."""
        if identity in self._servers:
            self._servers[identity].told = 0
            self._pushed = -1

    def push(self, now: float) -> list[Outgoing]:
        """News for every API server, when there are any and the last ones are ``interval_s`` old."""
        if self._pushed == self._version or now < self._pushed_at + self.interval_s:
            return []
        self._pushed, self._pushed_at = self._version, now
        return [news for identity, server in self._servers.items() for news in self._news(identity, server)]

    def next_push(self) -> float | None:
        """When :meth:`push` has something to say, None: not before a report comes."""
        return None if self._pushed == self._version else self._pushed_at + self.interval_s

    def _news(self, identity: bytes, server: _Server) -> list[Outgoing]:
        engines = [
            _told(engine, engine.report, server.index)
            for engine in self._engines.values()
            if engine.report is not None and engine.version > server.told
        ]
        news: list[Outgoing] = [(identity, FleetLoad(engines))] if engines else []
        news += [
            (identity, posted.metrics)
            for posted in self._metrics.values()
            if posted.version > server.told and posted.by != identity
        ]
        server.told = self._version
        return news


def _told(engine: _Engine, report: EngineReport, server: int) -> EngineLoad:
    accepted = dict(zip(report.accepted[::2], report.accepted[1::2], strict=True))
    return EngineLoad(
        engine.rank,
        engine.epoch,
        report.step,
        report.waiting,
        report.running,
        report.kv_used_permille,
        accepted.get(server, 0),
    )
