"""The coordinator's state: members, their loads and metrics, and the updates for each API server. No I/O.

It is bounded whatever members say: engines by the number of ranks, API servers by :data:`MAX_SERVERS`,
metrics by the bounds of :class:`penstock.metrics.board.MetricsBoard`.

Engines report their loads, API servers their metrics; every API server gets what has changed since its last
update, at most once per ``interval_s``. API servers of the engines' own host can do without: they know the
engines' addresses, and token frames carry the loads. The addresses of engines on other hosts come from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.coordinator.metrics_rounds import MetricsRounds
from penstock.metrics.board import MetricsBoard, role_and_index
from penstock.metrics.snapshot import decode_snapshot
from penstock.wire.coordination import (
    BUILD,
    COORDINATOR_PROTOCOL_VERSION,
    ENGINE_TRAITS,
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
    MetricsAnswer,
    MetricsQuery,
    MetricsSent,
    ProcessMetrics,
    Rejoin,
    ServerJoin,
)
from penstock.wire.messages import WireError

Outgoing = tuple[bytes, FromCoordinator]
"""Identity of the member that a message is for, and the message."""

LEASE_S = 5.0
"""An engine that has sent nothing for this many seconds loses its rank to another that asks for it."""
CONTEST_S = 1.0
"""An engine that sends something later than this after another has asked for its rank is alive (seconds)."""
MAX_SERVERS = 1024
"""Connected API servers, and the bound of their numbers; beyond it the one that has been silent for longest
is dropped."""
PAUSE_S = 1.0
"""An API server whose queue was full gets its next updates after this time (seconds)."""
MAX_REASON = 1000
"""Maximum characters of a rejection."""


@dataclass(slots=True)
class _Engine:
    join: EngineJoin
    last_seen: float
    """Time of its last message."""
    report: EngineReport | None = None
    version: int = 0
    """Version of the state that has ``report``."""


@dataclass(slots=True)
class _Server:
    index: int
    sent_version: int = -1
    """Version of the state that it was sent last."""
    paused_until: float = float("-inf")


@dataclass(slots=True, frozen=True)
class _AddressEntry:
    address: EngineAddress
    version: int


@dataclass(slots=True)
class CoordinatorState:
    """Members by identity; times are seconds of any monotonic clock.

    ``ranks``: maximum number of engines. ``traits``: the head's, which all engines must share.
    ``local_ranks``: the ranks that the head starts itself, in its ``incarnation``.
    """

    interval_s: float = 0.1
    ranks: int = 1024
    traits: dict[str, str] = field(default_factory=dict)
    local_ranks: frozenset[int] = frozenset()
    incarnation: int = 0
    _engines: dict[bytes, _Engine] = field(default_factory=dict)
    _holders: dict[int, bytes] = field(default_factory=dict)
    """Identity of each rank's engine."""
    _contests: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    """Contested ranks: the engine that asks for one while another has it, and the time when it first did."""
    _addresses: dict[int, _AddressEntry] = field(default_factory=dict)
    """Addresses of engines on other hosts by rank; empty ones after they left."""
    _servers: dict[bytes, _Server] = field(default_factory=dict)
    """The one that has been silent for longest first."""
    board: MetricsBoard = field(default_factory=MetricsBoard)
    version: int = 0
    """Counts changes."""
    _pushed_at: float = float("-inf")
    _rounds: MetricsRounds = field(default_factory=MetricsRounds)

    def receive(self, identity: bytes, message: FromMember, now: float) -> list[Outgoing]:
        """Handle a message of a member; return the replies. Raises WireError for metrics that are invalid or
        find no room."""
        match message:
            case EngineJoin():
                return [(identity, reply) for reply in self._join_engine(identity, message, now)]
            case ServerJoin():
                return self._join_server(identity, message)
            case MemberLeave():
                self._leave(identity)
                return []
            case EngineReport():
                engine = self._engines.get(identity)
                if engine is None:
                    return [(identity, Rejoin())]
                self.version += 1
                engine.report, engine.version, engine.last_seen = message, self.version, now
                return []
            case ProcessMetrics():
                if identity not in self._servers:
                    return [(identity, Rejoin())]
                self._store_metrics(identity, message)
                return []
            case MetricsQuery():
                server = self._servers.get(identity)
                if server is None:
                    return [(identity, Rejoin())]
                if message.fresh:
                    self._rounds.add_query(identity, message.number)
                    return []
                return self._answer(identity, message.number)
            case MetricsSent():
                self._rounds.on_sent(identity, message.number)
                return []

    def has_engine(self, rank: int) -> bool:
        """Whether the engine of ``rank`` is a member."""
        return rank in self._holders

    def add_metrics(self, metrics: ProcessMetrics) -> None:
        """Metrics of the coordinator process itself."""
        self.version += 1
        self.board.add_or_log(decode_snapshot(metrics.snapshot), metrics.snapshot, self.version)

    def _store_metrics(self, identity: bytes, metrics: ProcessMetrics) -> None:
        try:
            self._check_process(metrics)
            self._post(identity, metrics)
        except ValueError as error:
            raise WireError(str(error)) from None

    def _post(self, identity: bytes, metrics: ProcessMetrics) -> None:
        """Raises ValueError."""
        snapshot = decode_snapshot(metrics.snapshot)
        if (snapshot.process, snapshot.incarnation) != (metrics.process, metrics.incarnation):
            raise ValueError(f"metrics of {snapshot.process[:80]!r} under another name")
        if self.board.add_snapshot(snapshot, metrics.snapshot, self.version + 1, identity):
            self.version += 1

    def _check_process(self, metrics: ProcessMetrics) -> None:
        """Raises ValueError if the fleet has no such process."""
        role, index = role_and_index(metrics.process)
        if index >= (self.ranks if role == "engine" else MAX_SERVERS):
            raise ValueError(f"metrics of {metrics.process}, which is no process of this fleet")
        own = role != "engine" or index in self.local_ranks
        if own and metrics.incarnation not in (self.incarnation, 0):
            raise ValueError(f"metrics of {metrics.process} of another run of the head")

    # -- members come and go

    def _join_server(self, identity: bytes, join: ServerJoin) -> list[Outgoing]:
        if (refusal := self._other_release(join.protocol, join.build)) is not None:
            return [(identity, JoinRejected(refusal))]
        if join.server >= MAX_SERVERS:
            return [(identity, JoinRejected(f"API servers are 0 to {MAX_SERVERS - 1}"))]
        if join.incarnation != self.incarnation:
            return [(identity, JoinRejected("it is not of this head's run"))]
        known = self._servers.pop(identity, None)
        self._servers[identity] = known or _Server(join.server)
        if known is not None:
            return []
        if len(self._servers) > MAX_SERVERS:
            del self._servers[next(iter(self._servers))]
        return [(identity, JoinAccepted(self.incarnation))]

    def _join_engine(self, identity: bytes, join: EngineJoin, now: float) -> list[FromCoordinator]:
        known = self._engines.get(identity)
        if known is not None and known.join == join:
            known.last_seen = now
            return [JoinAccepted(self.incarnation)]
        refusal = self._other_release(join.protocol, join.traits.get(BUILD, ""))
        refusal = refusal or self._trait_mismatch(join) or self._rank_error(join)
        if refusal is not None:
            return [JoinRejected(refusal[:MAX_REASON])]
        holder = self._engines.get(self._holders.get(join.rank, b""))
        if holder is not None and holder.join.incarnation == join.incarnation:
            if holder.join.epoch > join.epoch:
                return []  # a late message of a process that has ended
        elif holder is not None and now < holder.last_seen + LEASE_S:
            return self._contest(identity, join, holder, now)
        self._admit(identity, join, now)
        return [JoinAccepted(self.incarnation)]

    def _contest(
        self, identity: bytes, join: EngineJoin, holder: _Engine, now: float
    ) -> list[FromCoordinator]:
        """An engine asks for a rank that another one has: nothing until it is known whether that is alive."""
        contender, began = self._contests.get(join.rank, (identity, now))
        if contender != identity:
            if now < began + LEASE_S:
                return []
            began = now  # the other one asks no more
        self._contests[join.rank] = identity, began
        if holder.last_seen <= began + CONTEST_S:
            return []
        del self._contests[join.rank]
        where = _where(holder.join)
        return [JoinRejected(f"rank {join.rank} is taken by {where} (--data-parallel-start-rank)")]

    def _admit(self, identity: bytes, join: EngineJoin, now: float) -> None:
        self._contests.pop(join.rank, None)
        self.remove_member(identity)  # under another rank
        self._engines.pop(self._holders.get(join.rank, b""), None)
        self._engines[identity] = _Engine(join, now)
        self._holders[join.rank] = identity
        if join.address:
            self._store_address(EngineAddress(join.rank, join.epoch, join.incarnation, join.address))

    def _store_address(self, address: EngineAddress) -> None:
        self.version += 1
        self._addresses[address.rank] = _AddressEntry(address, self.version)

    def _other_release(self, protocol: int, build: str) -> str | None:
        """How a member differs whose release is another one; None: it is the same, or not known here. What
        else differs follows from that."""
        head = self.traits.get(BUILD, "")
        if head and build and build != head:
            return f"its {BUILD} is {build}, the fleet's is {head}: install the same one on all hosts"
        if protocol == COORDINATOR_PROTOCOL_VERSION:
            return None
        return (
            f"it speaks protocol {protocol} of the coordinator, not {COORDINATOR_PROTOCOL_VERSION}; "
            f"its {BUILD} is {build or 'not told'}, the head's {head or 'not known'}"
        )

    def _trait_mismatch(self, join: EngineJoin) -> str | None:
        """What the engine does not tell, or how it differs from the head and from the engines that have
        joined; None: it does not."""
        missing = [name for name in (*self.traits, *ENGINE_TRAITS) if name not in join.traits]
        if missing:
            return f"it does not tell its {', '.join(missing)}"
        others = next((engine.join for engine in self._engines.values()), None)
        fleet = {**(others.traits if others else {}), **self.traits}
        differences = [
            f"its {name} is {value or 'not set'}, the fleet's is {fleet[name] or 'not set'}"
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
        if (join.rank in self.local_ranks) == bool(join.address):
            where = "on the head's host has none" if join.address else "on another host has one"
            return f"its address is {join.address!r}, an engine {where}"
        return None

    def _leave(self, identity: bytes) -> None:
        engine = self._engines.get(identity)
        if engine is not None and engine.join.address:
            join = engine.join
            self._store_address(EngineAddress(join.rank, join.epoch, join.incarnation, ""))
        self.remove_member(identity)

    def remove_member(self, identity: bytes) -> None:
        """The member is gone. Unknown ones are ignored."""
        engine = self._engines.pop(identity, None)
        if engine is not None:
            del self._holders[engine.join.rank]
        self._servers.pop(identity, None)

    # -- updates for API servers

    def on_send_failed(self, identity: bytes, now: float) -> None:
        """A message could not be sent to the API server: its next update, after a pause, has everything."""
        if identity in self._servers:
            server = self._servers[identity]
            server.sent_version, server.paused_until = -1, now + PAUSE_S

    def take_updates(self, now: float) -> list[Outgoing]:
        """Answer to queries and request for metrics that are due; and updates for every API server that
        lacks some, if the last ones are ``interval_s`` old."""
        requests, answers = self._rounds.advance(list(self._servers), now)
        updates: list[Outgoing] = [*requests]
        for identity, number in answers:
            updates += self._answer(identity, number)
        if now < self._pushed_at + self.interval_s:
            return updates
        for identity, server in self._servers.items():
            if server.sent_version < self.version and now >= server.paused_until:
                self._pushed_at = now
                updates += self._updates_for(identity, server)
        return updates

    def next_update_at(self) -> float | None:
        """When :meth:`take_updates` returns updates; None: not before something changes."""
        times = []
        lacking = [each.paused_until for each in self._servers.values() if each.sent_version < self.version]
        if lacking:
            times.append(max(self._pushed_at + self.interval_s, min(lacking)))
        if (advance_at := self._rounds.advance_at()) is not None:
            times.append(advance_at)
        return min(times, default=None)

    def _answer(self, identity: bytes, number: int) -> list[Outgoing]:
        server = self._servers.get(identity)
        if server is None:
            return []
        return [*self._updates_for(identity, server), (identity, MetricsAnswer(number))]

    def _updates_for(self, identity: bytes, server: _Server) -> list[Outgoing]:
        engines = [
            _engine_load(engine, engine.report, server.index)
            for engine in self._engines.values()
            if engine.report is not None and engine.version > server.sent_version
        ]
        updates: list[Outgoing] = [
            (identity, entry.address)
            for entry in self._addresses.values()
            if entry.version > server.sent_version
        ]
        updates += [(identity, FleetLoad(engines))] if engines else []
        updates += [
            (identity, posted.message())
            for posted in self.board
            if posted.version > server.sent_version and posted.by != identity
        ]
        server.sent_version = self.version
        return updates


def _engine_load(engine: _Engine, report: EngineReport, server: int) -> EngineLoad:
    accepted = dict(zip(report.accepted[::2], report.accepted[1::2], strict=True))
    return EngineLoad(
        rank=engine.join.rank,
        epoch=engine.join.epoch,
        step=report.step,
        waiting=report.waiting,
        running=report.running,
        kv_used=report.kv_used,
        accepted=accepted.get(server, 0),
        incarnation=engine.join.incarnation,
    )


def _where(join: EngineJoin) -> str:
    return f"the engine at {join.address}" if join.address else "an engine of the head"
