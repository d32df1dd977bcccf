"""Sleep, with an engine that notes what it is told."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.loop.sleep import SleepState
from penstock.wire.messages import SLEEPING
from tests.engine.loop.test_inbox import FakeEngine


class Sleeper(FakeEngine):
    """Has one stream until it is ended; has no room to wake up if ``full``."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = True
        self.full = self.paused = False
        self.told: list[Any] = []
        self.state = SleepState(self, self.end_streams, lambda: not self.busy, lambda: self.paused)

    def has_work(self) -> bool:
        return self.busy

    def end_streams(self, code: str, message: str) -> None:
        self.busy = False
        self.told.append(code)

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        if method == "wake_up" and self.full:
            raise MemoryError("no room")
        self.told.append((method, arguments.get("level")))

    def change(self, level: int, **arguments: Any) -> None:
        self.state.prepare({"level": level, **arguments})
        assert self.state.prepared(firm=False)
        self.state.commit()
        assert self.state.result() == {"level": level}


@pytest.fixture
def engine() -> Sleeper:
    return Sleeper()


def test_there_and_back(engine: Sleeper) -> None:
    assert engine.state.refusal() is None
    engine.change(1)
    refusal = engine.state.refusal()
    assert refusal is not None
    assert refusal.code == SLEEPING
    engine.change(0)
    assert engine.state.refusal() is None
    assert engine.told == [SLEEPING, ("sleep", 1), ("wake_up", None)]


def test_held_it_keeps_its_memory_and_takes_nothing_until_the_level_is_set(engine: Sleeper) -> None:
    engine.state.prepare({"level": 1, "hold": True})
    assert engine.state.prepared(firm=False)
    engine.state.commit()
    assert engine.state.result() == {"level": 0}
    assert engine.state.refusal() is not None
    assert engine.told == [SLEEPING]
    engine.change(1)
    assert engine.told == [SLEEPING, ("sleep", 1)]
    engine.change(0)
    assert engine.state.refusal() is None


def test_held_in_vain_it_takes_streams_again(engine: Sleeper) -> None:
    engine.state.prepare({"level": 1, "hold": True})
    engine.state.commit()
    engine.change(0)
    assert engine.state.refusal() is None
    assert engine.told == [SLEEPING]


def test_held_it_sleeps_on(engine: Sleeper) -> None:
    engine.change(1)
    engine.state.prepare({"level": 1, "hold": True})
    engine.state.commit()
    assert engine.state.result() == {"level": 1}
    engine.change(1)
    assert engine.told == [SLEEPING, ("sleep", 1)]


def test_waiting_takes_nothing_new_and_lets_streams_end(engine: Sleeper) -> None:
    engine.state.prepare({"level": 1, "mode": "wait"})
    assert engine.state.refusal() is not None
    assert not engine.state.prepared(firm=False)
    engine.busy = False
    assert engine.state.prepared(firm=False)
    assert engine.told == []


@pytest.mark.parametrize("paused_first", [True, False])
def test_streams_that_a_pause_keeps_are_not_waited_for(engine: Sleeper, paused_first: bool) -> None:
    engine.paused = paused_first
    engine.state.prepare({"level": 1, "mode": "wait"})
    if not paused_first:
        assert not engine.state.prepared(firm=False)
        engine.paused = True
    with pytest.raises(ValueError, match="mode is 'wait', but a pause keeps the streams: resume first"):
        engine.state.prepared(firm=False)
    assert not engine.state.prepared(firm=True)
    engine.state.abort()
    assert engine.state.refusal() is None
    engine.change(1, mode="abort")


def test_given_up_before_it_slept(engine: Sleeper) -> None:
    engine.state.prepare({"level": 1, "mode": "wait"})
    engine.state.abort()
    assert engine.state.refusal() is None
    assert engine.told == []


def test_given_up_before_it_woke(engine: Sleeper) -> None:
    engine.change(2)
    engine.state.prepare({"level": 0})
    assert engine.state.refusal() is not None
    engine.state.abort()
    assert engine.state.refusal() is not None
    assert engine.told == [SLEEPING, ("sleep", 2), ("wake_up", None), ("sleep", 2)]


def test_no_room_to_wake_up(engine: Sleeper) -> None:
    engine.change(1)
    engine.full = True
    with pytest.raises(MemoryError):
        engine.state.prepare({"level": 0})
    assert engine.state.refusal() is not None
    engine.full = False
    engine.change(0)


def test_what_is_there_already_is_not_done_again(engine: Sleeper) -> None:
    engine.change(0)
    engine.change(1)
    engine.change(1)
    engine.change(2)
    assert engine.told == [SLEEPING, ("sleep", 1), ("sleep", 2)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": 3}, "level is 3, not 0 to 2"),
        ({"level": "1"}, "level is '1'"),
        ({}, "level is None"),
        ({"level": 1, "mode": "keep"}, "mode is 'keep', not abort or wait"),
    ],
)
def test_refused(engine: Sleeper, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.state.prepare(arguments)
    assert engine.state.refusal() is None
    assert engine.busy


def test_an_engine_that_cannot_says_so_before_any_stream_is_ended(engine: Sleeper) -> None:
    engine.can_sleep = False
    with pytest.raises(ValueError, match="this engine cannot sleep"):
        engine.state.prepare({"level": 1})
    assert engine.busy
    engine.change(0)


def test_weights_that_are_gone_do_not_come_back_by_sleeping_less(engine: Sleeper) -> None:
    engine.change(2)
    engine.state.prepare({"level": 1})
    with pytest.raises(ValueError, match="sleeps at level 2: wake it first"):
        engine.state.prepared(firm=False)
    engine.state.abort()
    assert engine.state.refusal() is not None
    # set back to less sleep, which others have
    engine.state.prepare({"level": 1})
    assert engine.state.prepared(firm=True)
    engine.state.commit()
    assert engine.state.result() == {"level": 2}
    assert engine.told == [SLEEPING, ("sleep", 2)]
