from __future__ import annotations

import signal

from penstock.supervisor.children.actions import Action, ProcessName, Send
from penstock.supervisor.children.restart_policy import FIRST_DELAY_S
from penstock.wire.control import (
    ChangeRecord,
    ChangeState,
    DesiredStates,
    DrainEngine,
    EnableThroughputLog,
    EnginesDraining,
    Ready,
    StateReport,
    StatesReport,
)
from penstock.wire.messages import DesiredState
from tests.supervisor.children.managers import ENGINE, OTHER, SERVER, done, errors, make, ready, said, serving


def test_every_api_server_learns_which_engines_are_drained() -> None:
    manager = serving(2)
    drained = EnginesDraining(ranks=[0])
    actions = manager.report(SERVER, DrainEngine(rank=0, draining=True), 5.0)
    assert done(actions) == [Send(SERVER, drained), Send(OTHER, drained)]
    assert said(actions) == ["engine 0 gets no new streams"]
    # One that starts is told when it is ready; the engine's own restart changes nothing.
    manager.exited(OTHER, 1, 6.0)
    manager.exited(ENGINE, 1, 6.0)
    manager.tick(7.0)
    assert done(manager.report(ENGINE, Ready(), 8.0)) == []
    assert done(manager.report(OTHER, Ready(), 8.0)) == [Send(OTHER, drained)]
    actions = manager.report(OTHER, DrainEngine(rank=0, draining=False), 9.0)
    assert done(actions) == [Send(SERVER, EnginesDraining(ranks=[])), Send(OTHER, EnginesDraining(ranks=[]))]


def test_an_engine_that_does_not_exist_cannot_be_drained() -> None:
    actions = serving().report(SERVER, DrainEngine(rank=7, draining=True), 5.0)
    assert done(actions) == []
    assert errors(actions) == ["api-server 0 asked for engine 7, which does not exist"]


def test_engines_of_other_hosts_can_be_drained() -> None:
    manager = ready(make(all_engines=2))
    actions = manager.report(SERVER, DrainEngine(rank=1, draining=True), 2.0)
    assert done(actions) == [Send(SERVER, EnginesDraining(ranks=[1]))]
    [error] = errors(manager.report(SERVER, DrainEngine(rank=2, draining=True), 2.0))
    assert "which does not exist" in error


# -- desired states

SLEEP = ChangeState(name="sleep", key="a", asked="sleep 1", base=0, stages=[{"level": 1}])


def desired(*, settled: bool = False) -> DesiredStates:
    return DesiredStates(
        states=[DesiredState("sleep", 1, {"level": 1}, settled=settled)],
        changes={"sleep": [ChangeRecord("a", "sleep 1", 1, settled=settled)]},
    )


def set_back(error: str, rank: int | None = None) -> DesiredStates:
    return DesiredStates(
        states=[DesiredState("sleep", 2, {}, rollback=True)],
        changes={"sleep": [ChangeRecord("a", "sleep 1", 1, error=error, rank=rank)]},
    )


def test_a_change_is_told_to_all_api_servers_and_again_when_all_have_observed_it() -> None:
    manager = serving(2)
    actions = manager.report(OTHER, SLEEP, 2.0)
    assert done(actions) == [Send(SERVER, desired()), Send(OTHER, desired())]
    assert said(actions) == ["sleep is set to: level 1"]
    assert manager.report(SERVER, StatesReport(states={"sleep": StateReport(1)}), 3.0) == []
    everyone = [Send(SERVER, desired(settled=True)), Send(OTHER, desired(settled=True))]
    assert manager.report(OTHER, StatesReport(states={"sleep": StateReport(1)}), 3.0) == everyone


def test_who_comes_too_late_is_told_what_is_desired() -> None:
    manager = serving(2)
    manager.report(OTHER, SLEEP, 2.0)
    late = ChangeState(name="sleep", key="b", asked="sleep 2", base=0, stages=[{"level": 2}])
    assert manager.report(SERVER, late, 2.0) == [Send(SERVER, desired())]


def test_what_an_engine_cannot_apply_is_set_back() -> None:
    manager = serving(2)
    manager.report(OTHER, SLEEP, 2.0)
    report = StatesReport(states={"sleep": StateReport(1, "no room", 0)})
    actions = manager.report(SERVER, report, 3.0)
    assert done(actions) == [Send(SERVER, set_back("no room", 0)), Send(OTHER, set_back("no room", 0))]
    assert "sleep is set back: engine 0: no room" in errors(actions)


def test_one_that_dies_is_not_waited_for_and_told_when_it_is_back() -> None:
    manager = serving(2)
    manager.report(OTHER, SLEEP, 2.0)
    manager.report(OTHER, StatesReport(states={"sleep": StateReport(1)}), 2.0)
    assert done(manager.exited(SERVER, -signal.SIGKILL, 3.0)) == [Send(OTHER, desired(settled=True))]
    manager.tick(3.0 + FIRST_DELAY_S)
    assert done(manager.report(SERVER, Ready(), 5.0)) == [Send(SERVER, desired(settled=True))]


def test_what_one_asked_for_that_dies_is_set_back() -> None:
    manager = serving(2)
    manager.report(OTHER, SLEEP, 2.0)
    actions = manager.exited(OTHER, -signal.SIGKILL, 3.0)
    assert done(actions) == [Send(SERVER, set_back("the API server that was asked has ended"))]
    assert "sleep is set back: the API server that was asked has ended" in errors(actions)


# -- the log


def told_to_speak(actions: list[Action]) -> list[ProcessName]:
    return [
        action.name
        for action in actions
        if isinstance(action, Send) and action.command == EnableThroughputLog()
    ]


def test_one_api_server_that_serves_speaks_for_all() -> None:
    manager = make(2)
    manager.start(0.0)
    manager.report(ENGINE, Ready(), 1.0)
    assert told_to_speak(manager.report(OTHER, Ready(), 1.0)) == [OTHER]
    assert told_to_speak(manager.report(SERVER, Ready(), 2.0)) == []
    assert told_to_speak(manager.exited(OTHER, 1, 3.0)) == [SERVER]
    assert told_to_speak(manager.exited(SERVER, 1, 3.0)) == []  # there is none
    manager.tick(3.0 + FIRST_DELAY_S)
    assert told_to_speak(manager.report(SERVER, Ready(), 4.0)) == [SERVER]  # another process
    manager.report(OTHER, Ready(), 4.0)
    manager.start_rolling_restart(10.0)
    assert told_to_speak(manager.report(ProcessName("api-server", 2), Ready(), 11.0)) == [OTHER]
