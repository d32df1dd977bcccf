"""The protocol of lock-step engines: by hand, and exhaustively over all interleavings."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from penstock.engine.group.wave_protocol import WaveProtocol, WaveProtocolError
from penstock.wire.waves import LeaveGroup, StartWave, Vote, WaveMessage


def test_a_rank_alone_wakes_and_sleeps() -> None:
    rank = WaveProtocol(0, 1, 2)
    assert rank.before_step(False) == ()
    assert not rank.may_step
    assert rank.before_step(True) == (StartWave(0),)
    assert rank.on_step(True) == ()
    assert rank.on_step(True) == (Vote(0, True),)
    assert rank.may_step
    rank.on_step(False)
    assert rank.on_step(False) == (Vote(1, False),)
    assert not rank.running
    assert rank.sync_round == 2


def test_a_sleeping_peer_joins_and_goes_on_while_another_has_work() -> None:
    rank = WaveProtocol(0, 2, 1)
    rank.receive(1, StartWave(0))
    assert rank.may_step
    assert rank.on_step(False) == (Vote(0, False),)
    assert not rank.may_step, "the verdict is not known yet"
    rank.receive(1, Vote(0, True))
    assert rank.may_step
    rank.on_step(False)
    rank.receive(1, Vote(1, False))
    assert not rank.running


def test_work_between_vote_and_verdict_begins_the_next_wave() -> None:
    rank = WaveProtocol(0, 2, 1)
    rank.before_step(True)
    rank.on_step(False)
    assert rank.before_step(True) == (), "the wave is still on"
    rank.receive(1, Vote(0, False))
    assert rank.before_step(True) == (StartWave(1),)
    assert rank.waves == 2


def test_a_wake_that_overtakes_another_ranks_vote_is_remembered() -> None:
    rank = WaveProtocol(0, 3, 1)
    rank.receive(1, StartWave(0))
    rank.on_step(False)
    rank.receive(1, Vote(0, False))
    rank.receive(1, StartWave(1))  # rank 1 has the vote of rank 2 already
    assert not rank.may_step
    rank.receive(2, Vote(0, False))
    assert rank.may_step
    assert rank.sync_round == 1


def test_late_wakes_change_nothing() -> None:
    rank = WaveProtocol(0, 2, 1)
    rank.before_step(True)
    rank.receive(1, StartWave(0))
    rank.on_step(False)
    rank.receive(1, Vote(0, False))
    rank.receive(1, StartWave(0))
    assert not rank.running


@pytest.mark.parametrize("message", [StartWave(1), StartWave(5), Vote(1, True), Vote(7, False)])
def test_messages_from_a_future_that_cannot_be_break_the_group(message: WaveMessage) -> None:
    with pytest.raises(WaveProtocolError, match="rank 1 sent"):
        WaveProtocol(0, 2, 1).receive(1, message)


def test_a_second_vote_breaks_the_group() -> None:
    rank = WaveProtocol(0, 3, 1)
    rank.receive(1, StartWave(0))
    rank.receive(1, Vote(0, True))
    with pytest.raises(WaveProtocolError):
        rank.receive(1, Vote(0, True))


# -- all interleavings ---------------------------------------------------------------------------------

SUBMIT, ABORT = "submit", "abort"


@dataclass
class World:
    """Ranks, the channels between them, and API servers that submit and abort: one state of the model.

    Atomic transitions: an API server sends its next message to any rank, a rank takes one message of an
    API server or of a peer, or makes a step. A step is collective: a rank that enters step s holds the
    others' layers up until they enter s as well, modelled as "no rank enters step s + 1 before all have
    entered s".
    """

    ranks: list[WaveProtocol]
    plans: list[tuple[str, ...]]
    """What each API server has yet to send."""
    work: list[int]
    """Steps of work left on each rank."""
    entered: list[int]
    """Steps entered by each rank since the beginning."""
    stops: bool = False
    """Whether ranks are told to stop, once all is submitted, each at any time."""
    stopped: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    wires: dict[tuple[str, int, int], deque[object]] = field(default_factory=dict)
    """(kind, from, to) to messages on their way; kind is "server" or "peer"."""
    accepted: int = 0
    done: int = 0

    def key(self) -> object:
        ranks = tuple(
            (
                rank.sync_round,
                rank.running,
                rank.steps,
                rank._woken,
                tuple(tuple(sorted(votes.items())) for votes in rank._votes),
                tuple(sorted(rank._left)),
            )
            for rank in self.ranks
        )
        wires = tuple(sorted((at, tuple(queue)) for at, queue in self.wires.items() if queue))
        gone = tuple(sorted(self.gone))
        return ranks, tuple(self.plans), tuple(self.work), tuple(self.entered), gone, repr(wires)

    def broadcast(self, sender: int, messages: object) -> None:
        for message in messages:  # type: ignore[attr-defined]
            for peer in range(len(self.ranks)):
                if peer != sender:
                    self.wires.setdefault(("peer", sender, peer), deque()).append(message)

    def successors(self) -> Iterator[World]:
        for server, plan in enumerate(self.plans):
            for rank in range(len(self.ranks)) if plan else ():
                after = copy.deepcopy(self)
                after.plans[server] = plan[1:]
                after.wires.setdefault(("server", server, rank), deque()).append(plan[0])
                yield after
        for at, queue in self.wires.items():
            if queue:
                after = copy.deepcopy(self)
                after.deliver(*at)
                yield after
        for rank in range(len(self.ranks)):
            if rank in self.gone:
                continue
            if self.ranks[rank].may_step and self.entered[rank] == min(self.entered):
                after = copy.deepcopy(self)
                after.step(rank)
                yield after
            if self.stops and rank not in self.stopped and not any(self.plans):
                after = copy.deepcopy(self)
                after.stop(rank)
                yield after
            if self.ranks[rank].may_exit:
                after = copy.deepcopy(self)
                after.gone.add(rank)
                yield after

    def stop(self, rank: int) -> None:
        """Its streams end by an error."""
        self.stopped.add(rank)
        self.done += self.work[rank]
        self.work[rank] = 0
        self.broadcast(rank, self.ranks[rank].leave())

    def deliver(self, kind: str, sender: int, rank: int) -> None:
        message = self.wires[kind, sender, rank].popleft()
        if rank in self.gone:
            assert kind == "server" or isinstance(message, LeaveGroup), "a rank was needed that is gone"
        elif kind == "peer":
            self.ranks[rank].receive(sender, message)  # type: ignore[arg-type]
        elif rank in self.stopped:
            pass  # API servers know
        elif message == SUBMIT:
            self.work[rank] += 1
            self.accepted += 1
        elif self.work[rank]:
            self.work[rank] -= 1  # aborted
            self.done += 1
        if rank not in self.gone:
            self.settle(rank)

    def step(self, rank: int) -> None:
        self.entered[rank] += 1
        if self.work[rank]:
            self.work[rank] -= 1
            self.done += 1
        self.broadcast(rank, self.ranks[rank].on_step(self.work[rank] > 0))
        self.settle(rank)

    def settle(self, rank: int) -> None:
        """What the engine loop does before it waits or steps."""
        self.broadcast(rank, self.ranks[rank].before_step(self.work[rank] > 0))

    def check(self) -> None:
        assert max(self.entered) - min(self.entered) <= 1, "ranks are out of step"
        for rank, entered in zip(self.ranks, self.entered, strict=True):
            assert entered == rank.sync_round * rank.interval + rank.steps, "an agreement at another step"
        assert max(rank.sync_round for rank in self.ranks) - min(rank.sync_round for rank in self.ranks) <= 1

    def at_rest(self) -> bool:
        asleep = not any(rank.running for rank in self.ranks)
        ended = len(self.gone) == len(self.ranks) or not self.stops
        still = not any(self.work) and not any(self.plans) and not any(self.wires.values())
        return asleep and ended and still


def explore(
    ranks: int, interval: int, plans: list[tuple[str, ...]], *, stops: bool = False
) -> tuple[int, int]:
    """Visit every reachable state. Returns how many there are, and how many of them are at rest."""
    group = [WaveProtocol(rank, ranks, interval) for rank in range(ranks)]
    start = World(group, plans, [0] * ranks, [0] * ranks, stops)
    numbers = {start.key(): 0}
    came_from: list[list[int]] = [[]]
    resting = []
    frontier = deque([(0, start)])
    while frontier:
        number, state = frontier.popleft()
        state.check()
        stuck = True
        for after in state.successors():
            stuck = False
            key = after.key()
            if key not in numbers:
                numbers[key] = len(numbers)
                came_from.append([])
                frontier.append((numbers[key], after))
            came_from[numbers[key]].append(number)
        if stuck:
            assert state.at_rest(), f"stuck, with work left or awake: {state}"
            assert state.accepted == state.done
            resting.append(number)
    reaching = set(resting)
    todo = list(resting)
    while todo:
        for number in came_from[todo.pop()]:
            if number not in reaching:
                reaching.add(number)
                todo.append(number)
    assert len(reaching) == len(numbers), "a state from which the group never comes to rest"
    return len(numbers), len(resting)


def test_two_ranks_never_lose_work_or_step() -> None:
    states, resting = explore(2, 2, [(SUBMIT, ABORT), (SUBMIT,)])
    assert states > 500
    assert resting


def test_three_ranks_and_two_api_servers_never_lose_work_or_step() -> None:
    states, resting = explore(3, 1, [(SUBMIT,), (SUBMIT,)])
    assert states > 1000
    assert resting


def test_ranks_that_stop_leave_no_other_behind() -> None:
    states, resting = explore(2, 2, [(SUBMIT,), (SUBMIT,)], stops=True)
    assert states > 500
    assert resting


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_ranks_that_stop_leave_no_other_behind() -> None:
    explore(3, 1, [(SUBMIT,)], stops=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_ranks_with_aborts_never_lose_work_or_step() -> None:
    explore(3, 1, [(SUBMIT, ABORT), (SUBMIT,)])


def test_the_model_finds_a_lost_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A protocol that forgets the wake that comes before a verdict must not pass."""
    receive = WaveProtocol.receive

    def forgetful(rank: WaveProtocol, peer: int, message: WaveMessage) -> None:
        receive(rank, peer, message)
        rank._woken = False

    monkeypatch.setattr(WaveProtocol, "receive", forgetful)
    with pytest.raises(AssertionError, match="stuck"):
        explore(3, 1, [(SUBMIT,), (SUBMIT,)])


def test_the_model_finds_a_rank_that_leaves_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A protocol in which a sleeping rank just goes must not pass."""
    early = property(lambda rank: rank.rank in rank._left and not rank.running)
    monkeypatch.setattr(WaveProtocol, "may_exit", early)
    with pytest.raises(AssertionError, match="gone"):
        explore(2, 2, [(SUBMIT,), (SUBMIT,)], stops=True)
