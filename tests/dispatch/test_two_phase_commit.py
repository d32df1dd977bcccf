"""Changes that all engines make or none, over links that break, with parts that die at any moment.

The real parts (TwoPhaseCommit and Calls of API servers, RpcServer of engines, Register of the supervisor)
run on a network that the test delivers message by message, on an event loop whose clock it turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dispatch.adapter_registry import AdapterRegistry
from penstock.dispatch.connections import EngineState
from penstock.dispatch.engine_client import EngineClient
from penstock.dispatch.engine_rpc import Calls, Receipt
from penstock.dispatch.two_phase_change import Outcome, TwoPhaseChange
from penstock.dispatch.two_phase_commit import COMMIT_TIMEOUT_S, RETRY_S, TwoPhaseCommit
from penstock.engine.loop.rpc import RpcServer
from penstock.engine.loop.two_phase import TwoPhaseParticipant
from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.agreed_state_store import AgreedStateStore
from penstock.wire.control import AgreedStates, ProposeState
from penstock.wire.messages import RpcCall, RpcReply

SERVERS, ENGINES = 2, 2
TIMEOUT_S = 10.0


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
        self.calls = RpcServer(self.run, {"sleep": self.participant}, self.reply, lambda: 0)

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
        self.asked: list[asyncio.Task[TwoPhaseChange]] = []


class World:
    def __init__(self, loop: Clock) -> None:
        self.loop = loop
        self.register = AgreedStateStore()
        self.decided: list[dict[str, Any]] = [{"level": 0}]
        self.keys: set[str] = set()
        """Of decided changes."""
        self.links = {(server, rank): Link() for server in range(SERVERS) for rank in range(ENGINES)}
        self.engines = [Engine(self, rank, 0) for rank in range(ENGINES)]
        self.servers = [Server(self, index) for index in range(SERVERS)]
        self.reports: list[tuple[str, TwoPhaseChange]] = []
        self.changes = 0
        for server, rank in self.links:
            self.connect(server, rank)

    # -- the supervisor

    def propose(self, server: Server, change: ProposeState) -> None:
        if self.register.propose(change):
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

    def answer(self, server: int, rank: int) -> None:
        link = self.links[server, rank]
        if link.replies:
            self.servers[server].view.calls.on_reply(rank, link.replies.popleft())

    def order(self, server: int, _: int) -> None:
        """The next order of the supervisor arrives."""
        orders = self.servers[server].orders
        if orders:
            self.servers[server].agreement.on_agreed_states(orders.popleft())

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
            state.link, state.info = cast(Any, link), cast(Any, "info")
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
        level = agreed.states[0].arguments["level"] if agreed.states else 0
        assert [engine.level for engine in self.engines] == [level] * ENGINES
        assert [engine.held for engine in self.engines] == [None] * ENGINES
        assert agreed.adopted == agreed.revision
        for server in self.servers:
            assert all(task.done() for task in server.asked)
            for task in server.asked:
                if not task.cancelled():
                    task.result()
            for engine in server.view.engines:
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


def act(made: World, name: str, server: int, argument: int) -> None:
    getattr(made, name)(server, argument)
    made.loop.turn()


EVENTS = [
    *("change",) * 2,
    *("deliver",) * 6,
    *("answer",) * 6,
    *("order",) * 4,
    "cut",
    "connect",
    "connect",
    "kill_engine",
    "kill_server",
    "fill",
    "occupy",
    "wait",
]
STEPS = st.lists(
    st.tuples(st.sampled_from(EVENTS), st.integers(0, SERVERS - 1), st.integers(0, ENGINES - 1)), max_size=60
)


def play(steps: list[tuple[str, int, int]]) -> None:
    with world() as made:
        for step in steps:
            act(made, *step)
        made.heal()
        made.check_healed()


@settings(max_examples=60)
@given(STEPS)
def test_whatever_happens_all_engines_get_to_what_is_agreed(steps: list[tuple[str, int, int]]) -> None:
    play(steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=2000)
@given(STEPS)
def test_whatever_happens_in_many_ways(steps: list[tuple[str, int, int]]) -> None:
    play(steps)


def outcome_of(made: World, server: int = 0, place: int = -1) -> TwoPhaseChange:
    return made.servers[server].asked[place].result()


def test_undisturbed() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.flow()
        change = outcome_of(made)
        assert change.outcome is Outcome.DONE
        assert change.receipts() == [Receipt(rank, 0, 0, result=1) for rank in range(ENGINES)]
        assert [engine.made for engine in made.engines] == [[1], [1]]
        act(made, "change", 1, 0)
        made.flow()
        assert outcome_of(made, 1).outcome is Outcome.DONE
        made.check_healed()


def test_two_at_a_time() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        act(made, "change", 1, 0)
        act(made, "deliver", 0, 0)
        act(made, "deliver", 1, 1)
        made.flow()
        outcomes = {outcome_of(made, 0).outcome, outcome_of(made, 1).outcome}
        assert Outcome.DONE not in outcomes
        assert outcomes <= {Outcome.CONFLICT, Outcome.ABORTED}
        made.heal()
        made.check_healed()
        assert [engine.made for engine in made.engines] == [[], []]


def test_one_that_cannot_keeps_all_from_it() -> None:
    with world() as made:
        act(made, "fill", 0, 1)
        act(made, "change", 0, 1)
        made.flow()
        change = outcome_of(made)
        assert change.outcome is Outcome.ABORTED
        assert change.receipts()[1].error == "MemoryError: no room"
        assert [engine.held for engine in made.engines] == [None, None]


def test_an_engine_that_is_started_again_gets_to_what_is_agreed() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.flow()
        act(made, "kill_engine", 0, 0)
        assert made.engines[0].level == 0
        act(made, "connect", 0, 0)
        assert not made.servers[0].view.engines[0].up_to_date  # and gets no streams before
        made.flow()
        made.check_healed()
        assert made.engines[0].made == [1]


def test_who_was_asked_dies_after_the_decision() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        for rank in range(ENGINES):
            act(made, "deliver", 0, rank)
            act(made, "answer", 0, rank)
        assert made.keys == {"1"}
        act(made, "kill_server", 0, 0)
        made.flow()
        assert [engine.made for engine in made.engines] == [[1], [1]]
        made.check_healed()


def test_who_was_asked_dies_before_it() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        for rank in range(ENGINES):
            act(made, "deliver", 0, rank)
        assert [engine.held for engine in made.engines] == [1, 1]
        act(made, "kill_server", 0, 0)
        made.flow()
        assert [engine.made for engine in made.engines] == [[], []]
        made.check_healed()


def test_an_engine_that_does_not_answer() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        act(made, "deliver", 0, 0)
        act(made, "answer", 0, 0)
        act(made, "wait", 0, 0)
        act(made, "wait", 0, 0)
        change = outcome_of(made)
        assert change.outcome is Outcome.ABORTED
        assert [receipt.code for receipt in change.receipts()] == ["aborted", "timeout"]
        made.heal()
        made.check_healed()


def test_an_api_server_that_has_not_heard_keeps_it_from_being_done() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        for _ in range(3):
            for rank in range(ENGINES):
                act(made, "deliver", 0, rank)
                act(made, "answer", 0, rank)
            act(made, "order", 0, 0)
        assert [engine.made for engine in made.engines] == [[1], [1]]
        assert not made.servers[0].asked[0].done()
        act(made, "wait", 0, 0)
        change = outcome_of(made)
        assert change.outcome is Outcome.PARTIAL
        assert [receipt.error for receipt in change.receipts()] == [None, None]


def test_an_api_server_whose_engines_have_not_answered_keeps_it_from_being_done() -> None:
    """Until they have, it gives its engines no streams: a client that was told of the change is refused."""
    with world() as made:
        act(made, "change", 0, 1)
        for _ in range(4):
            for rank in range(ENGINES):
                act(made, "deliver", 0, rank)
                act(made, "answer", 0, rank)
            act(made, "order", 0, 0)
            act(made, "order", 1, 0)
            act(made, "deliver", 1, 0)
            act(made, "answer", 1, 0)
        engines = made.servers[1].view.engines
        assert [engine.target_revision for engine in engines] == [1, 1]
        assert not made.servers[0].asked[0].done()
        act(made, "cut", 1, 1)
        act(made, "order", 0, 0)  # an engine that is gone is not waited for
        assert outcome_of(made).outcome is Outcome.DONE
        made.heal()
        made.check_healed()


def test_the_same_change_again_is_not_made_again() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.flow()
        made.changes = 0  # the same key
        act(made, "change", 1, 1)
        made.flow()
        change = outcome_of(made, 1)
        assert change.outcome is Outcome.DONE
        assert [receipt.repeated for receipt in change.receipts()] == [True, True]
        assert [engine.made for engine in made.engines] == [[1], [1]]


def test_the_same_change_by_both_at_a_time() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.changes = 0
        act(made, "change", 1, 1)
        made.flow()
        assert {outcome_of(made, server).outcome for server in range(SERVERS)} == {Outcome.DONE}
        assert [engine.made for engine in made.engines] == [[1], [1]]


def test_the_same_change_after_another_one() -> None:
    with world() as made:
        for server, level in ((0, 1), (0, 0)):
            act(made, "change", server, level)
            made.flow()
        made.changes = 0
        act(made, "change", 1, 1)
        made.flow()
        change = outcome_of(made, 1)
        assert [(receipt.repeated, receipt.result) for receipt in change.receipts()] == [(True, 1), (True, 1)]
        assert [engine.level for engine in made.engines] == [0, 0]
        made.check_healed()
