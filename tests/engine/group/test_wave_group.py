"""Engines in lock-step: one rank's part by hand, and loops of three ranks over real sockets."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.engine.group.wave_group import WaveGroup
from penstock.engine.group.wave_protocol import WaveProtocolError
from penstock.engine.loop.identity import EngineIdentity
from penstock.engine.loop.process import EngineLoop, LoopParts
from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.wire.channel import ChildChannel, ControlChannel
from penstock.wire.control import Stop
from penstock.wire.messages import (
    PAUSE,
    Abort,
    ApplyStates,
    DesiredState,
    GoAway,
    ObservedState,
    StatesObserved,
    WireError,
    encode,
)
from penstock.wire.sockets import PeerLinks, engine_address, engine_identity
from penstock.wire.waves import StartWave, Vote, WaveMessage, decode_from_peer
from tests.engine.loops import CountingSocket
from tests.engine.peers import DEADLINE_S, ApiServer
from tests.engine.support import submit

RANKS = 3


class Told:
    """Links that keep what they are to send."""

    def __init__(self) -> None:
        self.messages: list[WaveMessage] = []

    def send_to_all(self, part: bytes) -> None:
        self.messages.append(decode_from_peer(part))

    def close(self) -> None: ...


def test_a_vote_follows_the_step_and_what_came_during_it() -> None:
    told = Told()
    group = WaveGroup(0, 2, interval=1, epoch=0, links=told)
    assert not group.advance(False)
    assert group.advance(True)
    assert told.messages == [StartWave(0)]
    assert not group.advance(True), "the other's vote is not known"
    assert told.messages == [StartWave(0), Vote(0, True)]
    assert not group.advance(False)
    assert group.try_handle(engine_identity(1, 0), [encode(Vote(0, False))])
    assert group.advance(False)
    assert told.messages == [StartWave(0), Vote(0, True)]


def test_only_peers_of_the_same_epoch_are_heard() -> None:
    group = WaveGroup(1, 3, interval=1, epoch=7, links=Told())
    assert not group.try_handle(engine_identity(0, 6), [encode(StartWave(0))])
    assert not group.try_handle(engine_identity(1, 7), [encode(StartWave(0))])
    assert not group.advance(False)
    assert group.try_handle(engine_identity(0, 7), [encode(StartWave(0))])
    assert group.advance(False)


def test_a_peer_that_cannot_be_understood_breaks_the_group() -> None:
    group = WaveGroup(0, 2, interval=1, epoch=0, links=Told())
    with pytest.raises(WireError, match="rank 1"):
        group.try_handle(engine_identity(1, 0), [b"\xff"])
    with pytest.raises(WaveProtocolError):
        group.try_handle(engine_identity(1, 0), [encode(StartWave(3))])


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--enable-expert-parallel: .* --data-parallel-size, which is 1"):
        ServeConfig(enable_expert_parallel=True)


# -- loops over sockets --------------------------------------------------------------------------------


class Rank:
    """One rank's loop in a thread, an API server, and the supervisor's end of its control channel."""

    def __init__(self, rank: int, model_dir: Path, run_dir: str, interval: int, **options: Any) -> None:
        self.engine = SyntheticEngine(ServeConfig(engine="synthetic", **options), str(model_dir))
        self.socket = CountingSocket(engine_address(run_dir, rank))
        others = [engine_address(run_dir, other) for other in range(RANKS) if other != rank]
        self.links = PeerLinks(others, engine_identity(rank, 0))
        self.supervisor, theirs = ChildChannel.pair()
        self.control = ControlChannel(theirs.detach())
        self.group = WaveGroup(rank, RANKS, interval=interval, epoch=0, links=self.links)
        self.loop = EngineLoop(self.engine, self.socket, EngineIdentity(rank), LoopParts(group=self.group))
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.server = ApiServer(run_dir, rank=rank)

    def _run(self) -> None:
        try:
            self.loop.run(self.control)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    @property
    def steps(self) -> int:
        """Real and dummy ones; to be read when the loop has ended."""
        return self.loop._stats.steps + self.loop._stats.dummy_steps

    def stop(self) -> None:
        if self.thread.is_alive():
            self.supervisor.send(Stop())

    def join(self) -> None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()

    def close(self) -> None:
        self.links.close()
        self.socket.close()
        self.server.close()
        self.control.close()
        self.supervisor.close()


Group = Callable[..., list[Rank]]


@pytest.fixture
def group(model_dir: Path) -> Iterator[Group]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as run_dir, ExitStack() as stack:

        def start(interval: int = 4, started: int = RANKS, **options: Any) -> list[Rank]:
            settings = {"synthetic_step_ms": 1, "max_model_len": 100_000, **options}
            ranks = [Rank(rank, model_dir, run_dir, interval, **settings) for rank in range(RANKS)]
            for rank in ranks:
                stack.callback(rank.close)
            stack.callback(lambda: [rank.join() for rank in ranks if rank.thread.ident is not None])
            stack.callback(lambda: [rank.stop() for rank in ranks])
            for rank in ranks[:started]:
                rank.thread.start()
                rank.server.hello()
            return ranks

        yield start


def ended(ranks: list[Rank]) -> list[int]:
    """Stops the ranks; the steps of each."""
    for rank in ranks:
        rank.stop()
    for rank in ranks:
        rank.join()
        assert rank.error is None
    return [rank.steps for rank in ranks]


def test_ranks_without_work_make_the_steps_of_the_one_that_has_some(group: Group) -> None:
    ranks = group()
    ranks[1].server.send(submit(1, 30))
    assert len(ranks[1].server.read_ends(1).tokens[1]) == 30
    steps = ended(ranks)
    assert len(set(steps)) == 1
    assert 30 <= steps[0] < 30 + 3 * 4
    assert steps[0] % 4 == 0
    assert [rank.loop._stats.steps for rank in ranks] == [0, 30, 0]
    assert [rank.loop._stats.waves for rank in ranks] == [1, 1, 1]


def test_an_idle_group_sleeps(group: Group) -> None:
    ranks = group()
    ranks[0].server.send(submit(1, 5))
    ranks[0].server.read_ends(1)
    ranks[1].server.ping()
    while any(rank.group._protocol.running for rank in ranks):
        time.sleep(0.001)
    before = [rank.socket.waits for rank in ranks]
    for number in range(3):  # each costs the rank that is asked a turn
        ranks[number % RANKS].server.ping()
    assert sum(rank.socket.waits for rank in ranks) - sum(before) < 40
    steps = ended(ranks)
    assert len(set(steps)) == 1


def test_work_on_all_ranks_with_pauses_between(group: Group) -> None:
    ranks = group(interval=3)
    for burst in range(12):
        asked = [rank for place, rank in enumerate(ranks) if (burst + place) % 3 or burst == 5]
        for place, rank in enumerate(asked):
            rank.server.send(submit(burst, 1 + (burst * 7 + place * 5) % 20))
        for rank in asked:
            rank.server.read_ends(burst)
    assert len(set(ended(ranks))) == 1
    assert ranks[0].loop._stats.waves > 1


def test_a_rank_waits_for_a_vote_without_spinning_and_answers_meanwhile(group: Group) -> None:
    """Rank 2 is bound but frozen: its vote is missing after the first steps."""
    ranks = group(interval=4, started=2)
    ranks[0].server.send(submit(1, 50))
    ranks[0].server.read(lambda: len(ranks[0].server.received.tokens.get(1, ())) == 4)
    waits = ranks[0].socket.waits
    for _ in range(20):
        ranks[0].server.ping()
        assert ranks[0].engine.load().running == 1
    assert len(ranks[0].server.received.tokens[1]) == 4
    assert ranks[0].socket.waits - waits < 200
    ranks[0].server.send(submit(2, 5))
    ranks[0].server.send(Abort([1]))
    ranks[2].thread.start()
    received = ranks[0].server.read_ends(1, 2)
    assert len(received.tokens[1]) == 4
    assert len(received.tokens[2]) == 5
    assert len(set(ended(ranks))) == 1


def test_ranks_that_stop_at_different_times_end_their_wave_together(group: Group) -> None:
    ranks = group(interval=8)
    ranks[0].server.send(submit(1, 90_000))
    ranks[0].server.read(lambda: bool(ranks[0].server.received.tokens))
    ranks[1].stop()
    ranks[2].stop()
    ranks[1].server.read(lambda: bool(ranks[1].server.received.others))
    ranks[0].stop()
    ranks[0].server.read(lambda: bool(ranks[0].server.received.others))
    assert ranks[0].server.received.others == [GoAway("engine is shutting down")]
    assert len(set(ended(ranks))) == 1


def test_a_rank_does_not_wait_for_ever_for_one_that_is_gone(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.loop.process.GROUP_EXIT_TIMEOUT_S", 0.05)
    ranks = group(started=2)
    ranks[0].server.send(submit(1, 90_000))
    ranks[0].server.read(lambda: bool(ranks[0].server.received.tokens))
    for rank in ranks[:2]:
        rank.stop()
        rank.join()
        assert rank.error is None


def test_a_rank_rests_only_when_the_wave_is_over(group: Group) -> None:
    """Also while it has no work and waits for votes, which may come to: go on."""
    ranks = group(interval=2, started=2)
    ranks[0].server.send(submit(1, 1))
    ranks[0].server.read_ends(1)
    while not ranks[0].loop._stats.dummy_steps:
        time.sleep(0.001)
    assert not ranks[0].loop._states.gate.is_idle()
    ranks[2].thread.start()
    while ranks[0].group.in_wave:
        time.sleep(0.001)
    assert ranks[0].loop._states.gate.is_idle()


def test_a_paused_rank_takes_part_in_the_steps_of_others(group: Group) -> None:
    ranks = group(interval=2)
    paused, running = ranks[0].server, ranks[1].server
    paused.send(submit(1, 90_000))
    paused.read(lambda: bool(paused.received.tokens))
    value = {"paused": True, "mode": "keep"}
    paused.send(ApplyStates([DesiredState(PAUSE, 1, value)]))
    paused.read(lambda: any(state.error is None for state in observed(paused)))
    before = len(paused.received.tokens[1])
    running.send(submit(1, 200))
    assert len(running.read_ends(1).tokens[1]) == 200
    paused.send(Abort([1]))
    assert len(paused.read_ends(1).tokens[1]) == before


def observed(server: ApiServer) -> list[ObservedState]:
    told = [message for message in server.received.others if isinstance(message, StatesObserved)]
    return [state for message in told for state in message.states]
