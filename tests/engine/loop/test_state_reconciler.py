"""Desired states on an engine, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.loop.state_reconciler import RETRY_S, StateReconciler
from penstock.wire.messages import DesiredState, ObservedState, StatesObserved
from tests.engine.loop.levels import Level


class Desk:
    def __init__(self) -> None:
        self.level = Level()
        self.replies: list[tuple[int, StatesObserved]] = []
        self.reports: list[StatesObserved] = []
        self.now = 0.0
        self.states = StateReconciler(
            [self.level],
            lambda server, message: self.replies.append((server, message)),
            self.reports.append,
            lambda: 7,
            lambda: self.now,
        )

    def desire(self, generation: int, level: int, server: int = 0, **flags: bool) -> list[ObservedState]:
        """What the API server is answered."""
        return self.send(DesiredState("level", generation, {"level": level}, **flags), server)

    def send(self, state: DesiredState, server: int = 0) -> list[ObservedState]:
        self.states.apply(server, [state])
        answered, message = self.replies.pop()
        assert answered == server
        return message.states

    def reported(self) -> ObservedState:
        """The last report to all."""
        (state,) = self.reports[-1].states
        return state


@pytest.fixture
def desk() -> Desk:
    return Desk()


def made(generation: int, level: int) -> ObservedState:
    return ObservedState("level", generation, None, {"level": level}, 7)


def failed(generation: int, error: str, level: int = 0) -> ObservedState:
    return ObservedState("level", generation, error, {"level": level}, 7)


def test_applied_once_whoever_sends_it(desk: Desk) -> None:
    assert desk.desire(1, 2) == [made(1, 2)]
    assert desk.reports == [StatesObserved([made(1, 2)])], "all are told"
    assert desk.desire(1, 2, server=1) == [made(1, 2)]
    assert desk.level.log == ["prepare 2", "commit 2"]
    assert len(desk.reports) == 1


def test_it_waits_until_it_is_ready(desk: Desk) -> None:
    desk.level.ready = False
    assert desk.desire(1, 2) == []
    desk.states.advance()
    assert desk.reports == []
    desk.level.ready = True
    desk.states.advance()
    assert desk.reported() == made(1, 2)


def test_while_it_waits_what_was_observed_before_is_told(desk: Desk) -> None:
    desk.desire(1, 2)
    desk.level.ready = False
    assert desk.desire(2, 3) == [made(1, 2)]


def test_it_keeps_what_it_had_until_the_generation_holds(desk: Desk) -> None:
    desk.desire(1, 2)
    assert "settle" not in desk.level.log
    for _ in range(2):
        desk.desire(1, 2, settled=True)
    desk.desire(1, 2)  # of an API server that has not heard yet
    assert desk.level.log == ["prepare 2", "commit 2", "settle"]
    desk.desire(2, 1, rollback=True)
    assert desk.level.log[3:] == ["prepare 1", "commit 1", "settle"]


def test_a_generation_that_holds_while_it_is_applied(desk: Desk) -> None:
    desk.level.ready = False
    desk.desire(1, 14)
    desk.desire(1, 14, settled=True)
    desk.level.ready = True
    desk.states.advance()
    assert desk.reported() == made(1, 14)
    assert desk.level.log == ["prepare 14", "commit 14", "settle"]


def test_a_later_generation_takes_the_place_of_one_that_is_applied(desk: Desk) -> None:
    desk.level.ready = False
    desk.desire(1, 2)
    desk.level.ready = True
    assert desk.desire(2, 1, server=1) == [made(2, 1)]
    assert desk.level.log == ["prepare 2", "abort 2", "prepare 1", "commit 1"]


def test_an_earlier_generation_changes_nothing(desk: Desk) -> None:
    desk.desire(5, 2)
    assert desk.desire(4, 1) == [made(5, 2)]
    assert desk.level.level == 2


@pytest.mark.parametrize(
    ("level", "error", "log"),
    [
        (13, "MemoryError: no room", []),
        (14, "14 is impossible", ["prepare 14", "abort 14"]),
        (15, "MemoryError: too late", ["prepare 15"]),
    ],
)
def test_what_cannot_be_applied_leaves_it_as_it_was(
    desk: Desk, level: int, error: str, log: list[str]
) -> None:
    assert desk.desire(1, level) == [failed(1, error)]
    assert desk.reported() == failed(1, error)
    desk.now += 10 * RETRY_S
    desk.states.advance()
    assert desk.level.log == log, "it is given up, or holds: the supervisor says which"
    assert desk.desire(2, 0, rollback=True) == [made(2, 0)]


def test_what_holds_is_tried_until_it_is_applied(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert desk.desire(1, 13, rollback=True) == [failed(1, "MemoryError: no room")]
    desk.now += RETRY_S / 2
    desk.states.advance()
    assert len(desk.reports) == 1
    desk.now += RETRY_S
    desk.states.advance()
    assert desk.reports[1:] == desk.reports[:1]
    monkeypatch.setattr(desk.level, "prepare", lambda value: setattr(desk.level, "prepared_level", 13))
    desk.now += RETRY_S
    desk.states.advance()
    assert desk.reported() == made(1, 13)


def test_what_failed_and_holds_all_the_same_is_tried_again(desk: Desk) -> None:
    desk.desire(1, 14)
    assert desk.desire(1, 14, settled=True) == [made(1, 14)]


def test_a_change_that_cannot_be_undone_does_not_end_the_engine(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk.level.ready = False
    desk.desire(1, 2)

    def abort() -> None:
        desk.level.prepared_level = None
        raise MemoryError("no room")

    monkeypatch.setattr(desk.level, "abort", abort)
    desk.level.ready = True
    assert desk.desire(2, 1) == [made(2, 1)]
    assert "level cannot be undone" in caplog.text
    assert "no room" in caplog.text


def test_an_empty_value_is_the_default(desk: Desk) -> None:
    desk.desire(1, 2)
    assert desk.send(DesiredState("level", 2, {}, rollback=True)) == [made(2, 0)]


def test_a_state_that_there_is_not(desk: Desk) -> None:
    assert desk.send(DesiredState("colour", 3, {})) == [
        ObservedState("colour", 3, "this engine has no state 'colour'")
    ]


def test_another_head_begins_from_the_default_and_with_any_generation(desk: Desk) -> None:
    desk.states.forget()
    assert desk.level.log == [], "there is nothing to forget"
    desk.desire(5, 2)
    desk.states.forget()
    desk.states.advance()
    assert desk.level.level == 0
    assert desk.desire(1, 3) == [made(1, 3)]


@pytest.mark.parametrize("value", [{}, {"level": None}, {"other": 1}])
def test_a_value_that_it_cannot_understand(desk: Desk, value: dict[str, Any]) -> None:
    def prepare(given: dict[str, Any]) -> None:
        raise ValueError(f"not {given}")

    desk.level.prepare = prepare  # type: ignore[method-assign]
    (observed,) = desk.send(DesiredState("level", 1, value))
    assert observed.error == f"not {value or {'level': 0}}"
