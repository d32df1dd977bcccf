"""A fleet for tests of desired states: links that break, and parts that die at any moment.

The real parts (StateChanges and EngineStates of API servers, StateReconciler of engines with their appliers,
the supervisor's store, and the outboxes of control channels) run on a network that the test delivers message
by message, on an event loop whose clock it turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from penstock.adapters.errors import AdapterError
from penstock.dispatch.adapter_changes import AdapterChanges
from penstock.dispatch.adapter_registry import AdapterRegistry
from penstock.dispatch.connections import EngineState
from penstock.dispatch.desired_states import EngineStates
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import OperationOutcome, OperationResult
from penstock.dispatch.state_changes import ROLLBACK_TIMEOUT_S, StateChanges
from penstock.dispatch.weight_changes import WeightChanges, WeightUpdate
from penstock.engine.base import Engine as EngineProtocol
from penstock.engine.base import Hold, Load
from penstock.engine.loop.pause import MODES, PauseState
from penstock.engine.loop.peers import Peers
from penstock.engine.loop.sleep import SleepState
from penstock.engine.loop.state_reconciler import RETRY_S, StateReconciler
from penstock.engine.loop.stream_gate import StreamGate
from penstock.engine.lora.adapter_state import AdapterState
from penstock.engine.lora.adapter_table import AdapterTable, LoadedAdapter
from penstock.engine.weights.weights_state import WeightsState
from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.desired_state_store import DesiredStateStore
from penstock.wire.adapter_list import ADAPTERS
from penstock.wire.channel import Outbox
from penstock.wire.control import (
    ChangeRecord,
    ChangeState,
    ChildReport,
    DesiredStates,
    StatesReport,
    decode_for_child,
    decode_for_supervisor,
)
from penstock.wire.messages import (
    PAUSE,
    SLEEP,
    WEIGHTS,
    Adapter,
    ApplyStates,
    EngineInfo,
    LoraInfo,
    StatesObserved,
)
from penstock.wire.weights.desired import DesiredWeights, WeightSource

SERVERS, ENGINES = 2, 2
TIMEOUT_S = 10.0
MAX_ADAPTERS = 5
INFO = EngineInfo("fake", 100, 100, 8, lora=LoraInfo(2, 16, MAX_ADAPTERS))


class Clock(asyncio.SelectorEventLoop):
    """Time passes only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def turn(self) -> None:
        """Run what can run."""

        async def turn() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        self.run_until_complete(turn())


class Inline(Executor):
    """Runs what it is given at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - of the future
            future.set_exception(error)
        return future


class Clients:
    """API servers with streams, as far as a gate asks."""

    def __iter__(self) -> Iterator[Any]:
        yield SimpleNamespace(server=0, streams={})


class Plan(list[str]):
    """Paths of weights that an engine is about to copy."""

    def close(self) -> None:
        """They are closed."""


class Loader:
    """Copies weights, which are the paths of their files."""

    def __init__(self, unreadable: set[str]) -> None:
        self.unreadable = unreadable
        self.copied: list[str] = []
        self.breaks = False

    def plan(self, sources: Sequence[WeightSource]) -> Plan:
        paths = [source.path for source in sources]
        gone = self.unreadable.intersection(paths)
        if gone:
            raise ValueError(f"{min(gone)} is gone")
        return Plan(paths)

    def load(self, plan: Plan, **how: object) -> int:
        if self.breaks:
            raise OSError("a file cannot be read any more")
        self.copied = list(plan)
        return len(plan)

    def checksum(self) -> str:
        return ",".join(self.copied)


class Engine:
    """One process of an engine: a level, and what became of it."""

    can_sleep = True
    pages = None

    def __init__(self, world: World, rank: int, epoch: int) -> None:
        self.world = world
        self.rank, self.epoch = rank, epoch
        self.level = 0
        self.made: list[int] = []
        """Levels in the order in which it has changed them."""
        self.full = False
        """It can neither go to sleep nor wake up."""
        self.busy = False
        """It has a stream."""
        self.unreadable = world.unreadable[rank]
        self.loaded: set[str] = set()
        """Digests in memory."""
        self.table = AdapterTable(self, MAX_ADAPTERS)
        self.adapters = AdapterState(self.table, Inline())
        self.weights = Loader(world.unreadable[rank])
        self.held = Hold.NOTHING
        gate = StreamGate(cast(EngineProtocol, self), cast(Peers, Clients()))
        self.sleep = SleepState(
            cast(EngineProtocol, self), lambda code, message: None, lambda: not self.busy, gate.is_paused
        )
        self.pause = PauseState(gate)
        self.weights_state = WeightsState(
            cast(EngineProtocol, self), gate, lambda rows: None, lambda generation: None
        )
        appliers = [self.sleep, self.pause, self.adapters, self.weights_state]
        self.states = StateReconciler(appliers, self.reply, self.report, lambda: 0, lambda: world.loop.now)

    # -- adapters

    def read_weights(self, adapter: Adapter) -> None:
        if adapter.digest in self.unreadable:
            raise AdapterError("its files are gone")

    def add_adapter(self, loaded: LoadedAdapter) -> None:
        assert loaded.adapter.digest not in self.loaded
        self.loaded.add(loaded.adapter.digest)

    def remove(self, loaded: LoadedAdapter) -> None:
        self.loaded.remove(loaded.adapter.digest)

    # -- pause and weights

    def hold(self, hold: Hold) -> None:
        self.held = hold

    def can_step(self) -> bool:
        return self.busy and self.held is not Hold.ALL

    def load(self) -> Load:
        return Load(waiting=0, running=int(self.busy), kv_used=0.0)

    def abort(self, server: int, numbers: list[int]) -> None:
        self.busy = False

    def flush(self) -> None:
        return None

    # -- the level

    def has_work(self) -> bool:
        return self.busy

    def call(self, method: str, arguments: dict[str, Any]) -> None:
        if self.full:
            raise MemoryError("no room")
        if method == "sleep":
            assert not self.busy
            self.world.check_barrier()
        self.level = arguments.get("level", 0)
        self.made.append(self.level)

    def reply(self, server: int, observed: StatesObserved) -> None:
        self.world.links[server, self.rank].answers.append(observed)

    def report(self, observed: StatesObserved) -> None:
        for server in range(SERVERS):
            if self.world.links[server, self.rank].up:
                self.reply(server, observed)

    def step(self) -> None:
        self.states.advance()
        self.adapters.tidy()


class Link:
    """Of an API server to an engine; what is on it is lost when it breaks."""

    def __init__(self) -> None:
        self.up = True
        self.states: deque[ApplyStates] = deque()
        self.answers: deque[StatesObserved] = deque()


class View:
    """What StateChanges needs of an EngineClient."""

    def __init__(self, world: World, server: int) -> None:
        self.engines = [EngineState(rank) for rank in range(ENGINES)]
        self.adapters = AdapterRegistry()
        self.states = EngineStates(
            self.engines,
            self.adapters,
            lambda engine, states: world.links[server, engine.rank].states.append(states),
            lockstep=world.lockstep,
        )

    def members(self) -> list[int]:
        return list(range(ENGINES))


class Server:
    """An API server, with its control channel."""

    def __init__(self, world: World, index: int) -> None:
        self.name = ProcessName("api-server", index)
        self.orders, self.reports = Outbox(), Outbox()
        self.is_ready = self.serves = True
        """It has been told what is desired, and may have clients."""
        self.view = View(world, index)
        self.states = StateChanges(cast(EngineClient, self.view), self.reports.put)
        self.changes = AdapterChanges(cast(EngineClient, self.view), self.states)
        self.weights = WeightChanges(self.states, self.view.states, lockstep=world.lockstep)
        self.firm_weights = 0
        """The latest generation of weights that it has been told to hold."""
        self.asked: list[asyncio.Task[Any]] = []


def line_of(outbox: Outbox) -> bytes | None:
    """The next message on a control channel."""
    line = outbox.next_bytes()
    outbox.sent(len(line))
    return line or None


class World:
    def __init__(self, loop: Clock, *, lockstep: bool = False) -> None:
        self.loop = loop
        self.lockstep = lockstep
        self.store = DesiredStateStore()
        self.records: dict[str, ChangeRecord] = {}
        """Of all changes that the supervisor has set, by key."""
        self.links = {(server, rank): Link() for server in range(SERVERS) for rank in range(ENGINES)}
        self.unreadable: list[set[str]] = [set() for _ in range(ENGINES)]
        """By engine, digests of adapters whose files are gone on its host."""
        self.engines = [Engine(self, rank, 0) for rank in range(ENGINES)]
        self.servers = [Server(self, index) for index in range(SERVERS)]
        self.changes = 0
        for server, rank in self.links:
            self.connect(server, rank)

    # -- the supervisor

    def report(self, server: int, _: int = 0) -> None:
        """The next report of an API server arrives at the supervisor."""
        line = line_of(self.servers[server].reports)
        if line is not None:
            self._take(self.servers[server], decode_for_supervisor(line[:-1]))

    def _take(self, server: Server, report: ChildReport) -> None:
        match report:
            case ChangeState():
                if self.store.change(server.name, report):
                    self.tell()
                else:
                    server.orders.put(self.store.table())
            case StatesReport():
                self.store.report(server.name, report.states)
                self.advance()
            case _:
                raise AssertionError(report)

    def advance(self) -> None:
        """Servers that are to be told what is desired are ready, and may have clients once they are."""
        changed, _ = self.store.advance([server.name for server in self.servers if server.is_ready])
        if changed:
            self.tell()

    def tell(self) -> None:
        table = self.store.table()
        for records in table.changes.values():
            self.records |= {record.key: record for record in records}
        for server in self.servers:
            server.orders.put(table)

    def generation(self, name: str = SLEEP) -> int:
        """The generation that the supervisor has set."""
        states = {state.name: state.generation for state in self.store.table().states}
        return states.get(name, 0)

    # -- what may happen

    def change(self, server: int, level: int) -> None:
        """A client asks for a change."""
        self.changes += 1
        key = str(self.changes)
        level %= 3
        value: dict[str, Any] = {"level": level, "mode": "wait"}
        stages = [value | {"hold": True}, value] if level else [value]

        async def change() -> OperationResult:
            made = await self.servers[server].states.change(SLEEP, key, f"sleep {level}", stages, TIMEOUT_S)
            self.check(key, made, level)
            return made

        self._ask(server, change())

    def load(self, server: int, number: int, *, replace: bool = True) -> asyncio.Task[OperationResult]:
        """A client asks for adapter ``number``: of three names, each of several digests."""
        adapter = Adapter(f"a{number % 3}", f"/a{number}", digest=f"d{number}")
        self.changes += 1
        changes = self.servers[server].changes
        return self._ask(server, changes.load(adapter, str(self.changes), TIMEOUT_S, replace=replace))

    def unload(self, server: int, number: int) -> asyncio.Task[OperationResult]:
        self.changes += 1
        return self._ask(
            server, self.servers[server].changes.unload(f"a{number % 3}", str(self.changes), TIMEOUT_S)
        )

    def _ask(self, server: int, asking: Any) -> asyncio.Task[OperationResult]:
        task: asyncio.Task[OperationResult] = asyncio.ensure_future(asking, loop=self.loop)
        self.servers[server].asked.append(task)
        self.loop.turn()
        return task

    def update(self, server: int, number: int) -> asyncio.Task[OperationResult]:
        """A client asks for weights ``number``: an even one replaces the model as a whole."""
        self.changes += 1
        key = str(self.changes)
        weights = DesiredWeights(f"v{number}", [WeightSource(f"/w{number}")], MODES[number % len(MODES)])
        asked = WeightUpdate(weights, whole=number % 2 == 0)

        async def update() -> OperationResult:
            made = await self.servers[server].weights.update(asked, key, TIMEOUT_S)
            if made.outcome is OperationOutcome.DONE:
                for engine, receipt in zip(self.engines, made.receipts, strict=True):
                    repeated = receipt.repeated or receipt.epoch != engine.epoch
                    assert repeated or receipt.result["version"] == weights.version
            return made

        return self._ask(server, update())

    def pause(self, server: int, number: int) -> asyncio.Task[OperationResult]:
        """A client asks for pause in a mode, or with a further number that all go on."""
        self.changes += 1
        value = {"paused": number < len(MODES), "mode": MODES[number % len(MODES)]}
        states = self.servers[server].states
        return self._ask(
            server, states.change(PAUSE, str(self.changes), f"pause {number}", [value], TIMEOUT_S)
        )

    def lose_weights(self, rank: int, number: int) -> None:
        """The files are gone on a host, or back again."""
        self.unreadable[rank] ^= {f"/w{number}"}

    def break_copy(self, rank: int, _: int) -> None:
        loader = self.engines[rank].weights
        loader.breaks = not loader.breaks

    def lose_files(self, number: int, rank: int) -> None:
        self.unreadable[rank].add(f"d{number}")

    def check(self, key: str, change: OperationResult, level: int) -> None:
        """What a client is told is true."""
        record = self.records.get(key)
        match change.outcome:
            case OperationOutcome.DONE:
                assert record is not None
                assert record.settled
                for engine, receipt in zip(self.engines, change.receipts, strict=True):
                    assert receipt.error is None
                    repeated = receipt.repeated or receipt.epoch != engine.epoch
                    assert repeated or receipt.result == {"level": level}
                for server in self.servers:
                    if server.serves:
                        assert server.view.states.find(SLEEP).generation >= record.generation
            case OperationOutcome.ABORTED:
                assert record is not None
                assert record.error
                assert all(receipt.error for receipt in change.receipts)
            case OperationOutcome.CONFLICT:
                assert record is None or record.error
            case OperationOutcome.PARTIAL:
                assert record is not None
                assert not record.error

    def check_barrier(self) -> None:
        """Before an engine gives its memory back, no API server gives any engine a stream."""
        for server in self.servers:
            if server.serves:
                assert not any(engine.accepts_streams for engine in server.view.engines)

    def check_gates(self) -> None:
        """In lock-step, no API server gives an engine streams while another one sleeps."""
        if self.lockstep and any(engine.level for engine in self.engines):
            self.check_barrier()

    def check_weights(self) -> None:
        """No engine computes streams without the weights that its API server knows to hold, and engines in
        lock-step never compute with different ones."""
        for server in self.servers:
            for engine, state in zip(self.engines, server.view.engines, strict=True):
                if server.serves and state.accepts_streams:
                    generation = cast(int, engine.weights_state.result()["generation"])
                    assert generation >= server.firm_weights or engine.held is Hold.ALL
        if self.lockstep:
            computing = [engine for engine in self.engines if engine.held is not Hold.ALL]
            assert len({tuple(engine.weights.copied) for engine in computing}) <= 1

    def deliver(self, server: int, rank: int) -> None:
        """The next states on a link arrive."""
        link = self.links[server, rank]
        if link.states:
            self.engines[rank].states.apply(server, link.states.popleft().states)
            self.engines[rank].step()

    def answer(self, server: int, rank: int) -> None:
        link, view = self.links[server, rank], self.servers[server].view
        if link.answers:
            view.states.on_observed(view.engines[rank], link.answers.popleft())

    def order(self, server: int, _: int = 0) -> None:
        """The next order of the supervisor arrives."""
        line = line_of(self.servers[server].orders)
        if line is not None:
            order = decode_for_child(line[:-1])
            assert isinstance(order, DesiredStates)
            self.servers[server].states.on_desired_states(order)
            self.servers[server].serves = True
            self._note_weights(server, order)

    def _note_weights(self, server: int, order: DesiredStates) -> None:
        firm = [state.generation for state in order.states if state.name == WEIGHTS and state.is_firm]
        self.servers[server].firm_weights = max([self.servers[server].firm_weights, *firm])

    def exchange(self, server: int) -> None:
        """An API server's states reach the engines, and their answers reach it."""
        for rank in range(ENGINES):
            self.deliver(server, rank)
            while self.links[server, rank].answers:
                self.answer(server, rank)
        self.loop.turn()

    def follow(self, server: int) -> None:
        """An API server hears from the supervisor, has its engines follow, and reports."""
        self.order(server)
        self.exchange(server)
        self.exchange(server)
        while self.servers[server].reports:
            self.report(server)
        self.loop.turn()

    def cut(self, server: int, rank: int) -> None:
        link = self.links[server, rank]
        if link.up:
            self.links[server, rank] = Link()
            self.links[server, rank].up = False
            view = self.servers[server].view
            view.engines[rank].info = None
            view.engines[rank].link = None
            view.engines[rank].clear()
            view.states.on_disconnected()

    def connect(self, server: int, rank: int) -> None:
        link, view, engine = self.links[server, rank], self.servers[server].view, self.engines[rank]
        state = view.engines[rank]
        if not state.up:
            link.up = True
            state.link, state.info = cast(Any, link), INFO
            state.epoch = engine.epoch
            view.states.on_connected(state)

    def kill_engine(self, _: int, rank: int) -> None:
        """It dies and starts again: with all others, in lock-step."""
        for number in range(ENGINES) if self.lockstep else (rank,):
            for server in range(SERVERS):
                self.cut(server, number)
            self.engines[number] = Engine(self, number, self.engines[number].epoch + 1)

    def kill_server(self, server: int, _: int = 0) -> None:
        """It dies, and another one takes its place, which begins with what is settled, and is told the rest
        before it has clients."""
        for rank in range(ENGINES):
            self.cut(server, rank)
        for task in self.servers[server].asked:
            task.cancel()
        self.store.forget(self.servers[server].name)
        self.servers[server].is_ready = False
        self.advance()
        settled = self.store.settled()
        self.servers[server] = Server(self, server)
        if settled is not None:
            self.servers[server].states.on_desired_states(settled)
            self._note_weights(server, settled)
            self.servers[server].view.adapters.assume_observed()
        table = self.store.table()
        if table.states:
            self.servers[server].serves = False
            self.servers[server].orders.put(table)

    def fill(self, _: int, rank: int) -> None:
        self.engines[rank].full = not self.engines[rank].full

    def occupy(self, _: int, rank: int) -> None:
        """A stream ends; or begins, if an API server gives the engine one."""
        engine = self.engines[rank]
        accepted = any(server.serves and server.view.engines[rank].accepts_streams for server in self.servers)
        refusal = engine.sleep.refusal() or engine.pause.refusal()
        engine.busy = not engine.busy and accepted and refusal is None
        engine.step()

    def wait(self, *_: int) -> None:
        self.loop.now += TIMEOUT_S + 0.1
        for engine in self.engines:
            engine.step()

    # -- the end

    @property
    def quiet(self) -> bool:
        links = self.links.values()
        return not any(link.states or link.answers or not link.up for link in links) and not any(
            server.orders or server.reports for server in self.servers
        )

    def flow(self) -> None:
        """Deliver all there is until nothing comes any more."""
        for _ in range(60):
            reading = [engine.weights_state for engine in self.engines if engine.weights_state.is_reading]
            for state in reading:  # a thread opens their files
                while state.is_reading:
                    time.sleep(0.0005)
            if self.quiet and not reading:
                return
            for server, rank in self.links:
                self.connect(server, rank)
                for act in (self.deliver, self.answer, self.order, self.report):
                    for _ in range(5):
                        act(server, rank)
            self.loop.turn()

    def heal(self) -> None:
        for engine in self.engines:
            engine.full = engine.busy = engine.weights.breaks = False
            engine.weights.unreadable.difference_update({f"/w{number}" for number in range(8)})
            engine.step()
        for _ in range(4):
            self.flow()
            self.loop.now += max(ROLLBACK_TIMEOUT_S, RETRY_S, TIMEOUT_S) + 1
            self.loop.turn()
            for engine in self.engines:
                engine.step()
        self.flow()

    def close(self) -> None:
        for server in self.servers:
            for task in server.asked:
                task.cancel()
        self.loop.turn()

    def check_healed(self) -> None:
        """Everybody has got to what is desired, and holds nothing else."""
        table = self.store.table()
        states = {state.name: state for state in table.states}
        level = states[SLEEP].value.get("level", 0) if SLEEP in states else 0
        pause = states[PAUSE].value if PAUSE in states else {}
        closed = pause.get("paused") and pause["mode"] != "keep"
        weights = msgspec.convert(states[WEIGHTS].value if WEIGHTS in states else {}, DesiredWeights)
        assert all(state.settled for state in table.states)
        for engine in self.engines:
            assert engine.weights.copied == [source.path for source in weights.sources]
            assert engine.held == (Hold.ALL if pause.get("paused") and not closed else Hold.NOTHING)
        for engine in self.engines:  # one that slept more stays as it is when others are set back
            assert (engine.level >= level) if level else not engine.level
        assert [engine.sleep.refusal() is None for engine in self.engines] == [not level] * ENGINES
        for record in self.records.values():
            assert record.settled or record.error or record.key not in keys_of(table)
        for server in self.servers:
            assert all(task.done() for task in server.asked)
            for task in server.asked:
                if not task.cancelled():
                    task.result()
            for engine in server.view.engines:
                assert engine.adapters == self.engines[engine.rank].table.digests()
                assert engine.up_to_date
                assert list(engine.desired) == table.states
                assert engine.asleep == (self.engines[engine.rank].level > 0)
                assert engine.accepts_streams == (level == 0 and not closed)
                assert engine.paused == bool(pause.get("paused"))
                assert engine.weight_version == weights.version


def keys_of(table: DesiredStates) -> set[str]:
    return {record.key for records in table.changes.values() for record in records}


def list_generation(world: World) -> int:
    """The generation of the list of adapters."""
    return world.generation(ADAPTERS)


@contextlib.contextmanager
def world(*, lockstep: bool = False) -> Iterator[World]:
    loop = Clock()
    asyncio.set_event_loop(loop)
    try:
        made = World(loop, lockstep=lockstep)
        yield made
        made.close()
    finally:
        asyncio.set_event_loop(None)
        loop.close()
