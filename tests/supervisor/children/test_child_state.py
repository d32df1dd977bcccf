"""The transition table of a child, walked from every state with every event."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.child_state import (
    TRANSITIONS,
    Child,
    ChildEvent,
    ChildState,
    ExitCause,
    IllegalChildTransitionError,
)

METHODS: dict[ChildEvent, Callable[[Child], None]] = {
    ChildEvent.SPAWN: lambda child: child.spawn(child.epoch + 1, 10.0),
    ChildEvent.READY: lambda child: child.ready({"device": "cpu"}),
    ChildEvent.RETIRE: lambda child: child.retire(),
    ChildEvent.EXIT: lambda child: child.exit(),
    ChildEvent.SCHEDULE_RESTART: lambda child: child.schedule_restart(20.0),
    ChildEvent.CANCEL_RESTART: lambda child: child.cancel_restart(),
}


def paths() -> dict[ChildState, list[ChildEvent]]:
    """The events that lead to each state from the first one."""
    found: dict[ChildState, list[ChildEvent]] = {ChildState.GONE: []}
    waiting = [ChildState.GONE]
    for state in waiting:
        for event, successor in TRANSITIONS[state].items():
            if successor not in found:
                found[successor] = [*found[state], event]
                waiting.append(successor)
    return found


def child_in(state: ChildState) -> Child:
    child = Child(ProcessName("engine", 0))
    for event in paths()[state]:
        METHODS[event](child)
    assert child.state is state
    return child


def test_every_state_can_be_reached_and_every_event_has_a_method() -> None:
    assert paths().keys() == TRANSITIONS.keys() == set(ChildState)
    assert METHODS.keys() == set(ChildEvent)


@pytest.mark.parametrize("event", ChildEvent)
@pytest.mark.parametrize("state", ChildState)
def test_a_method_follows_the_table(state: ChildState, event: ChildEvent) -> None:
    child = child_in(state)
    if event in TRANSITIONS[state]:
        METHODS[event](child)
        assert child.state is TRANSITIONS[state][event]
        assert child.alive == (child.state not in (ChildState.GONE, ChildState.WAITING))
        return
    before = repr(child)
    with pytest.raises(
        IllegalChildTransitionError, match=f"engine 0 is {state.name}, which excludes {event.name}"
    ):
        METHODS[event](child)
    assert repr(child) == before


def test_deadlines_follow_the_state() -> None:
    child = child_in(ChildState.STARTING)
    assert child.deadline == 10.0
    child.ready({})
    assert child.deadline is None
    child.expect_exit(15.0)
    child.exit()
    assert child.deadline is None
    child.schedule_restart(20.0)
    assert child.deadline == 20.0


def test_a_killed_child_expects_no_other_exit_and_a_new_process_forgets_the_cause() -> None:
    child = child_in(ChildState.READY)
    child.expect_exit(15.0)
    assert (child.exiting, child.killed) == (True, False)
    child.mark_killed(ExitCause.KILLED_WITH_GROUP)
    child.mark_killed(ExitCause.KILLED)
    child.expect_exit(16.0)
    assert (child.exit_cause, child.deadline) == (ExitCause.KILLED_WITH_GROUP, None)
    child.exit()
    assert child.killed
    child.spawn(1, 30.0)
    assert not child.exiting
