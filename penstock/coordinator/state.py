"""What the coordinator knows and whom it tells, without sockets or clocks.

Engines post reports, API servers what they have counted; every API server is told what changed since it was
told last, at most once per ``interval_s``. Engines of one host can be served without: API servers know where
they are, and go by the loads that come with token frames. Where those of other hosts are they learn here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.wire.coordination import (
    COORDINATOR_PROTOCOL_VERSION,
    EngineAddress,
    EngineJoin,
    EngineLoad,
    EngineReport,
    FleetLoad,
    FromCoordinator,
    FromMember,
    JoinAccepted,
    JoinRejected,
    MemberLeave,
    ProcessMetrics,
    Rejoin,
    ServerJoin,
)

Outgoing = tuple[bytes, FromCoordinator]
"""A message and the identity of the member that it is for."""

LEASE_S = 5.0
"""An engine that was silent for so long loses its rank to another one that wants it."""
CONTEST_S = 1.0
"""One that is heard of later than this after another has asked for its rank is alive."""


@dataclass(slots=True)
class _Engine:
    join: EngineJoin
    last_seen: float
    """When it sent something last."""
    report: EngineReport | None = None
    version: int = 0
    """Of the board when ``report`` came."""


@dataclass(slots=True)
class _Server:
    index: int
    sent_version: int = 0
    """Version of the board that it knows."""


@dataclass(slots=True, frozen=True)
class _MetricsEntry:
    metrics: ProcessMetrics
    by: bytes
    """Identity of the API server, which knows them."""
    version: int


@dataclass(slots=True, frozen=True)
class _AddressEntry:
    place: EngineAddress
    version: int


@dataclass(slots=True)
class CoordinatorState:
    """Members by identity; times are seconds of any monotonic clock.

    ``ranks`` is how many engines there may be. ``traits`` are the head's: what engines must have in common
    with it and each other. ``local_ranks`` are the ranks that the head starts itself, in its ``incarnation``.
    """

    interval_s: float = 0.1
    ranks: int = 1024
    traits: dict[str, str] = field(default_factory=dict)
    local_ranks: frozenset[int] = frozenset()
    incarnation: int = 0
    _engines: dict[bytes, _Engine] = field(default_factory=dict)
    _holders: dict[int, bytes] = field(default_factory=dict)
    """The engine of each rank."""
    _contests: dict[bytes, float] = field(default_factory=dict)
    """Engines that want a rank which another one has, and since when."""
    _places: dict[int, _AddressEntry] = field(default_factory=dict)
    """Where engines of other hosts are, or were before they left."""
    _servers: dict[bytes, _Server] = field(default_factory=dict)
    _metrics: dict[tuple[str, int, int], _MetricsEntry] = field(default_factory=dict)
    """By process, incarnation and epoch; those of processes that have ended stay."""
    _version: int = 0
    """Counts changes."""
    _pushed: int = 0
    """Version at the last push."""
    _pushed_at: float = float("-inf")

    def receive(self, identity: bytes, message: FromMember, now: float) -> list[Outgoing]:
        """A message of a member; returns the answers."""
        match message:
            case EngineJoin():
                return [(identity, answer) for answer in self._join_engine(identity, message, now)]
            case ServerJoin():
                return self._join_server(identity, message)
            case MemberLeave():
                self._leave(identity)
                return []
            case EngineReport():
                engine = self._engines.get(identity)
                if engine is None:
                    return [(identity, Rejoin())]
                self._version += 1
                engine.report, engine.version, engine.last_seen = message, self._version, now
                return []
            case ProcessMetrics():
                if identity not in self._servers:
                    return [(identity, Rejoin())]
                self._store_metrics(identity, message)
                return []

    def add_metrics(self, metrics: ProcessMetrics) -> None:
        """What this process itself has counted."""
        self._store_metrics(b"", metrics)

    def _store_metrics(self, identity: bytes, metrics: ProcessMetrics) -> None:
        key = metrics.process, metrics.incarnation, metrics.epoch
        known = self._metrics.get(key)
        if known is None or known.metrics.sequence < metrics.sequence:
            self._version += 1
            self._metrics[key] = _MetricsEntry(metrics, identity, self._version)

    # -- members come and go

    def _join_server(self, identity: bytes, join: ServerJoin) -> list[Outgoing]:
        if join.protocol != COORDINATOR_PROTOCOL_VERSION:
            return [(identity, _other_protocol(join.protocol))]
        if identity in self._servers:
            return []
        self._servers = {key: known for key, known in self._servers.items() if known.index != join.server}
        server = self._servers[identity] = _Server(join.server)
        return [(identity, JoinAccepted()), *self._updates_for(identity, server)]

    def _join_engine(self, identity: bytes, join: EngineJoin, now: float) -> list[FromCoordinator]:
        known = self._engines.get(identity)
        if known is not None and known.join == join:
            known.last_seen = now
            return [JoinAccepted()]
        if join.protocol != COORDINATOR_PROTOCOL_VERSION:
            return [_other_protocol(join.protocol)]
        refusal = self._trait_mismatch(join) or self._rank_error(join)
        if refusal is not None:
            return [JoinRejected(refusal)]
        holder = self._engines.get(self._holders.get(join.rank, b""))
        if holder is not None and holder.join.incarnation == join.incarnation:
            if holder.join.epoch > join.epoch:
                return []  # sent by a process that has ended, and came late
        elif holder is not None and now < holder.last_seen + LEASE_S:
            began = self._contests.setdefault(identity, now)
            if holder.last_seen <= began + CONTEST_S:
                return []  # it is not known yet whether the holder lives
            del self._contests[identity]
            return [
                JoinRejected(
                    f"rank {join.rank} is taken by {_where(holder.join)} (--data-parallel-start-rank)"
                )
            ]
        self._admit(identity, join, now)
        return [JoinAccepted()]

    def _admit(self, identity: bytes, join: EngineJoin, now: float) -> None:
        self._contests.pop(identity, None)
        self._engines.pop(self._holders.get(join.rank, b""), None)
        self._engines[identity] = _Engine(join, now)
        self._holders[join.rank] = identity
        if join.address:
            self._place(EngineAddress(join.rank, join.epoch, join.incarnation, join.address))

    def _place(self, place: EngineAddress) -> None:
        self._version += 1
        self._places[place.rank] = _AddressEntry(place, self._version)

    def _trait_mismatch(self, join: EngineJoin) -> str | None:
        """In what the engine differs from the head, and from the engines that are there."""
        others = next((engine.join for engine in self._engines.values()), None)
        fleet = {**(others.traits if others else {}), **self.traits}
        differences = [
            f"its {name} is {value}, the fleet's is {fleet[name]}"
            for name, value in join.traits.items()
            if fleet.get(name, value) != value
        ]
        return "; ".join(differences) or None

    def _rank_error(self, join: EngineJoin) -> str | None:
        if join.rank >= self.ranks:
            return f"rank {join.rank}: ranks are 0 to {self.ranks - 1} (--data-parallel-size)"
        if join.rank in self.local_ranks and join.incarnation != self.incarnation:
            own = f"{min(self.local_ranks)} to {max(self.local_ranks)}"
            return f"rank {join.rank} is one of the head's own, which are {own} (--data-parallel-size-local)"
        return None

    def _leave(self, identity: bytes) -> None:
        engine = self._engines.get(identity)
        if engine is not None and engine.join.address:
            join = engine.join
            self._place(EngineAddress(join.rank, join.epoch, join.incarnation, ""))
        self.remove_member(identity)

    def remove_member(self, identity: bytes) -> None:
        """The member is gone. Unknown ones are ignored."""
        engine = self._engines.pop(identity, None)
        if engine is not None:
            del self._holders[engine.join.rank]
        self._servers.pop(identity, None)

    # -- news

    def on_send_failed(self, identity: bytes) -> None:
        """A message could not be sent to the API server: the next push tells it everything."""
        if identity in self._servers:
            self._servers[identity].sent_version = 0
            self._pushed = -1

    def take_updates(self, now: float) -> list[Outgoing]:
        """News for every API server, when there are any and the last ones are ``interval_s`` old."""
        if self._pushed == self._version or now < self._pushed_at + self.interval_s:
            return []
        self._pushed, self._pushed_at = self._version, now
        return [
            news for identity, server in self._servers.items() for news in self._updates_for(identity, server)
        ]

    def next_update_at(self) -> float | None:
        """When :meth:`take_updates` has something to say, None: not before a report comes."""
        return None if self._pushed == self._version else self._pushed_at + self.interval_s

    def _updates_for(self, identity: bytes, server: _Server) -> list[Outgoing]:
        engines = [
            _engine_load(engine, engine.report, server.index)
            for engine in self._engines.values()
            if engine.report is not None and engine.version > server.sent_version
        ]
        news: list[Outgoing] = [
            (identity, placed.place)
            for placed in self._places.values()
            if placed.version > server.sent_version
        ]
        news += [(identity, FleetLoad(engines))] if engines else []
        news += [
            (identity, posted.metrics)
            for posted in self._metrics.values()
            if posted.version > server.sent_version and posted.by != identity
        ]
        server.sent_version = self._version
        return news


def _engine_load(engine: _Engine, report: EngineReport, server: int) -> EngineLoad:
    accepted = dict(zip(report.accepted[::2], report.accepted[1::2], strict=True))
    return EngineLoad(
        engine.join.rank,
        engine.join.epoch,
        report.step,
        report.waiting,
        report.running,
        report.kv_used_permille,
        accepted.get(server, 0),
        engine.join.incarnation,
    )


def _other_protocol(version: int) -> JoinRejected:
    return JoinRejected(
        f"it speaks version {version} of the coordinator's protocol, not {COORDINATOR_PROTOCOL_VERSION}"
    )


def _where(join: EngineJoin) -> str:
    return f"the engine at {join.address}" if join.address else "an engine of the head"
