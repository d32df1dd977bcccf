"""A fleet for tests of changes that all engines make: links that break, and parts that die at any moment.

The real parts (TwoPhaseCommit and Calls of API servers, RpcServer of engines, the supervisor's store) run on
a network that the test delivers message by message, on an event loop whose clock it turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from concurrent.futures import Executor, Future
from typing import Any, cast

from penstock.adapters.errors import AdapterError
from penstock.dispatch.adapter_changes import AdapterChange, AdapterChanges
from penstock.dispatch.adapter_registry import AdapterRegistry
from penstock.dispatch.connections import EngineState
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import Calls
from penstock.dispatch.two_phase_change import Outcome, TwoPhaseChange
from penstock.dispatch.two_phase_commit import COMMIT_TIMEOUT_S, RETRY_S, TwoPhaseCommit
from penstock.engine.loop.rpc import RpcServer
from penstock.engine.loop.two_phase import TwoPhaseParticipant
from penstock.engine.lora.adapter_state import AdapterState
from penstock.engine.lora.adapter_table import AdapterTable, LoadedAdapter
from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.agreed_state_store import AgreedStateStore
from penstock.wire.control import AgreedStates, ProposeState
from penstock.wire.messages import Adapter, EngineInfo, LoraInfo, RpcCall, RpcReply

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


class Engine:
    """One process of an engine: a level, and what became of it."""

    name = "sleep"

    def __init__(self, world: World, rank: int, epoch: int) -> None:
        self.world = world
        self.rank, self.epoch = rank, epoch
        self.level = 0
        self.made: list[int] = []
        """Levels in the order of the changes."""
        self.held: int | None = None
        self.full = False
        """It cannot prepare anything."""
        self.busy = False
        """It is not prepared yet."""
        self.participant = TwoPhaseParticipant(self)
        self.unreadable = world.unreadable[rank]
        self.loaded: set[str] = set()
        """Digests in memory."""
        self.table = AdapterTable(self, MAX_ADAPTERS)
        self.adapters = AdapterState(self.table, Inline())
        participants = {"sleep": self.participant, "adapters": TwoPhaseParticipant(self.adapters)}
        self.calls = RpcServer(self.run, participants, self.reply, lambda: 0)

    # -- adapters

    def read(self, adapter: Adapter) -> None:
        if adapter.digest in self.unreadable:
            raise AdapterError("its files are gone")

    def add(self, loaded: LoadedAdapter) -> None:
        assert loaded.adapter.digest not in self.loaded
        self.loaded.add(loaded.adapter.digest)

    def remove(self, loaded: LoadedAdapter) -> None:
        self.loaded.remove(loaded.adapter.digest)

    # -- the level

    def run(self, method: str, arguments: dict[str, Any]) -> Any:
        raise ValueError(method)

    def reply(self, server: int, reply: RpcReply) -> None:
        self.world.links[server, self.rank].replies.append(reply)

    def prepare(self, arguments: dict[str, Any]) -> None:
        if self.full:
            raise MemoryError("no room")
        assert self.held is None
        self.held = arguments["level"]

    def prepared(self, *, decided: bool) -> bool:
        return not self.busy

    def commit(self) -> None:
        assert self.held is not None
        self.level, self.held = self.held, None
        self.made.append(self.level)
        assert self.level in [change["level"] for change in self.world.decided], "made, but not decided"

    def result(self) -> int:
        return self.level

    def abort(self) -> None:
        assert self.held is not None
        self.held = None


class Link:
    """Of an API server to an engine; what is on it is lost when it breaks."""

    def __init__(self) -> None:
        self.up = True
        self.calls: deque[RpcCall] = deque()
        self.replies: deque[RpcReply] = deque()


class View:
    """What an TwoPhaseCommit needs of a EngineClient."""

    def __init__(self, world: World, server: int) -> None:
        self.engines = [EngineState(rank) for rank in range(ENGINES)]
        self.adapters = AdapterRegistry()
        self.calls = Calls(lambda rank, call: world.links[server, rank].calls.append(call))

    def members(self) -> list[int]:
        return list(range(ENGINES))

    def on_engine_available(self) -> None:
        pass


class Server:
    def __init__(self, world: World, index: int) -> None:
        self.name = ProcessName("api-server", index)
        self.orders: deque[AgreedStates] = deque()
        self.view = View(world, index)
        self.agreement = TwoPhaseCommit(
            cast(EngineClient, self.view),
            lambda change: world.propose(self, change),
            lambda revision: world.confirm(self, revision),
        )
        self.changes = AdapterChanges(cast(EngineClient, self.view), self.agreement)
        self.asked: list[asyncio.Task[Any]] = []


class World:
    def __init__(self, loop: Clock) -> None:
        self.loop = loop
        self.register = AgreedStateStore()
        self.decided: list[dict[str, Any]] = [{"level": 0}]
        self.keys: set[str] = set()
        """Of decided changes."""
        self.links = {(server, rank): Link() for server in range(SERVERS) for rank in range(ENGINES)}
        self.unreadable: list[set[str]] = [set() for _ in range(ENGINES)]
        """By engine, digests of adapters whose files are gone on its host."""
        self.engines = [Engine(self, rank, 0) for rank in range(ENGINES)]
        self.servers = [Server(self, index) for index in range(SERVERS)]
        self.reports: list[tuple[str, TwoPhaseChange]] = []
        self.changes = 0
        for server, rank in self.links:
            self.connect(server, rank)

    # -- the supervisor

    def propose(self, server: Server, change: ProposeState) -> None:
        if self.register.propose(change):
            if change.name == "sleep":
                self.decided.append(change.arguments)
            self.keys.add(change.key)
            self.tell()
        else:
            server.orders.append(self.register.agreed)

    def confirm(self, server: Server, revision: int) -> None:
        self.register.confirm(server.name, revision)
        if self.register.advance_adopted([other.name for other in self.servers]):
            self.tell()

    def tell(self) -> None:
        for server in self.servers:
            server.orders.append(self.register.agreed)

    # -- what may happen

    def change(self, server: int, level: int) -> None:
        """A client asks for a change."""
        self.changes += 1
        key = str(self.changes)

        async def change() -> TwoPhaseChange:
            made = await asked.agreement.change("sleep", {"level": level}, key, TIMEOUT_S)
            self.reports.append((key, made))
            self.check(key, made, level)
            return made

        asked = self.servers[server]
        asked.asked.append(asyncio.ensure_future(change(), loop=self.loop))

    def load(self, server: int, number: int, *, replace: bool = True) -> asyncio.Task[AdapterChange]:
        """A client asks for adapter ``number``: of three names, each of several digests."""
        adapter = Adapter(f"a{number % 3}", f"/a{number}", digest=f"d{number}")
        self.changes += 1
        changes = self.servers[server].changes
        return self._ask(server, changes.load(adapter, str(self.changes), TIMEOUT_S, replace=replace))

    def unload(self, server: int, number: int) -> asyncio.Task[AdapterChange]:
        self.changes += 1
        return self._ask(
            server, self.servers[server].changes.unload(f"a{number % 3}", str(self.changes), TIMEOUT_S)
        )

    def _ask(self, server: int, asking: Any) -> asyncio.Task[AdapterChange]:
        task: asyncio.Task[AdapterChange] = asyncio.ensure_future(asking, loop=self.loop)
        self.servers[server].asked.append(task)
        self.loop.turn()
        return task

    def lose_files(self, number: int, rank: int) -> None:
        self.unreadable[rank].add(f"d{number}")

    def check(self, key: str, change: TwoPhaseChange, level: int) -> None:
        """What a client is told is true."""
        if change.outcome is Outcome.DONE:
            assert key in self.keys
            for engine, receipt in zip(self.engines, change.receipts(), strict=True):
                assert (receipt.error, receipt.result) == (None, level)
                assert receipt.epoch != engine.epoch or level in engine.made
            assert all(server.agreement._revision for server in self.servers)
        if change.outcome in (Outcome.ABORTED, Outcome.CONFLICT):
            assert key not in self.keys
        if change.outcome is Outcome.PARTIAL:
            assert key in self.keys

    def deliver(self, server: int, rank: int) -> None:
        """The next call of a link arrives."""
        link = self.links[server, rank]
        if link.calls:
            self.engines[rank].calls.handle(server, link.calls.popleft())
            self.engines[rank].adapters.tidy()

    def answer(self, server: int, rank: int) -> None:
        link = self.links[server, rank]
        if link.replies:
            self.servers[server].view.calls.on_reply(rank, link.replies.popleft())

    def order(self, server: int, _: int) -> None:
        """The next order of the supervisor arrives."""
        orders = self.servers[server].orders
        if orders:
            self.servers[server].agreement.on_agreed_states(orders.popleft())

    def exchange(self, server: int) -> None:
        """An API server's calls reach the engines, and their answers reach it."""
        for rank in range(ENGINES):
            self.deliver(server, rank)
            self.answer(server, rank)
        self.loop.turn()

    def commit(self, server: int) -> None:
        """An API server hears of a decision and has the engines commit."""
        self.order(server, 0)
        self.loop.turn()
        self.exchange(server)

    def cut(self, server: int, rank: int) -> None:
        link = self.links[server, rank]
        if link.up:
            self.links[server, rank] = Link()
            self.links[server, rank].up = False
            view = self.servers[server].view
            view.engines[rank].info = None
            view.engines[rank].link = None
            view.engines[rank].clear()
            view.calls.on_disconnected(rank)
            self.engines[rank].calls.drop_server(server)

    def connect(self, server: int, rank: int) -> None:
        link, view, engine = self.links[server, rank], self.servers[server].view, self.engines[rank]
        state = view.engines[rank]
        if not state.up:
            link.up = True
            state.link, state.info = cast(Any, link), INFO
            state.epoch = engine.epoch
            view.calls.on_connected(rank, engine.epoch)

    def kill_engine(self, _: int, rank: int) -> None:
        for server in range(SERVERS):
            self.cut(server, rank)
        self.engines[rank] = Engine(self, rank, self.engines[rank].epoch + 1)

    def kill_server(self, server: int, _: int) -> None:
        """It dies, and another one takes its place, which has not been told anything before it is ready."""
        for rank in range(ENGINES):
            self.cut(server, rank)
        for task in (*self.servers[server].asked, *self.servers[server].agreement._committing.values()):
            task.cancel()
        self.register.forget(self.servers[server].name)
        self.servers[server] = Server(self, server)
        if self.register.agreed.revision:
            self.servers[server].orders.append(self.register.agreed)

    def fill(self, _: int, rank: int) -> None:
        self.engines[rank].full = not self.engines[rank].full

    def occupy(self, _: int, rank: int) -> None:
        self.engines[rank].busy = not self.engines[rank].busy
        self.engines[rank].calls.answer_pending()

    def wait(self, *_: int) -> None:
        self.loop.now += TIMEOUT_S + 0.1

    # -- the end

    def flow(self) -> None:
        """Deliver all there is until nothing comes any more."""
        for _ in range(60):
            quiet = not any(link.calls or link.replies or not link.up for link in self.links.values())
            if quiet and not any(server.orders for server in self.servers):
                return
            for server, rank in self.links:
                self.connect(server, rank)
                for act in (self.deliver, self.answer, self.order):
                    for _ in range(5):
                        act(server, rank)
            self.loop.turn()

    def heal(self) -> None:
        for engine in self.engines:
            engine.full = engine.busy = False
            engine.calls.answer_pending()
        for _ in range(3):
            self.flow()
            self.loop.now += max(COMMIT_TIMEOUT_S, RETRY_S, TIMEOUT_S) + 1
            self.loop.turn()
        self.flow()

    def close(self) -> None:
        for server in self.servers:
            for task in (*server.asked, *server.agreement._committing.values()):
                task.cancel()
        self.loop.turn()

    def check_healed(self) -> None:
        """Everybody has got to what is agreed, and holds nothing else."""
        agreed = self.register.agreed
        states = {state.name: state.arguments for state in agreed.states}
        level = states["sleep"]["level"] if "sleep" in states else 0
        assert [engine.level for engine in self.engines] == [level] * ENGINES
        assert [engine.held for engine in self.engines] == [None] * ENGINES
        assert agreed.adopted == agreed.revision
        for server in self.servers:
            assert all(task.done() for task in server.asked)
            for task in server.asked:
                if not task.cancelled():
                    task.result()
            for engine in server.view.engines:
                assert engine.adapters == self.engines[engine.rank].table.digests()
                assert (engine.up_to_date, engine.target_revision) == (True, agreed.revision)
                assert engine.asleep == (level > 0)


@contextlib.contextmanager
def world() -> Any:
    loop = Clock()
    asyncio.set_event_loop(loop)
    try:
        made = World(loop)
        yield made
        made.close()
    finally:
        asyncio.set_event_loop(None)
        loop.close()
