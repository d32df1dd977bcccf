import logging
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.supervisor.actions import Action, Announce, Kill, Name, Say, Send, Show, Spawn
from penstock.supervisor.exits import EXIT_FAILED, EXIT_FATAL, EXIT_OK
from penstock.supervisor.fleet import GRACE_S, LATE_S, Fleet, Phase
from penstock.supervisor.restart import FIRST_DELAY_S
from penstock.wire.control import (
    AgreedState,
    AgreedStates,
    Beat,
    Drain,
    DrainEngine,
    EnginesDraining,
    Failed,
    Progress,
    ProposeState,
    Ready,
    StatesAdopted,
    Stop,
)

ENGINE = Name("engine", 0)
SERVER = Name("api-server", 0)
OTHER = Name("api-server", 1)
STARTUP_S = 100.0
DRAIN_S = 7.0
HANG_S = 20.0


def make(api_servers: int = 1, hang_timeout: float = 0, group: int = 0) -> Fleet:
    """With one engine, or a ``group`` of so many in lock-step."""
    return Fleet(
        engines=group or 1,
        api_servers=api_servers,
        startup_timeout=STARTUP_S,
        drain_timeout=DRAIN_S,
        engine_hang_timeout=hang_timeout,
        lockstep=group > 0,
    )


def serving(api_servers: int = 1, hang_timeout: float = 0, group: int = 0) -> Fleet:
    """All ready at time 1."""
    fleet = make(api_servers, hang_timeout, group)
    fleet.begin(0.0)
    for name in fleet.names():
        fleet.report(name, Ready(), 1.0)
    assert fleet.phase is Phase.SERVING
    return fleet


def said(actions: list[Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, Say)]


def errors(actions: list[Action]) -> list[str]:
    return [a.text for a in actions if isinstance(a, Say) and a.level >= logging.WARNING]


def done(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, Say)]


def test_the_coordinator_is_started_first_and_is_not_needed_for_serving() -> None:
    coordinator = Name("coordinator", 0)
    fleet = Fleet(
        engines=1,
        api_servers=1,
        startup_timeout=STARTUP_S,
        drain_timeout=DRAIN_S,
        engine_hang_timeout=HANG_S,
        coordinator=True,
    )
    assert fleet.begin(0.0) == [Spawn(coordinator, 0), Spawn(ENGINE, 0), Spawn(SERVER, 0)]
    for name in fleet.names():
        fleet.report(name, Ready(), 1.0)
    now = 1.0
    while not (said_now := errors(fleet.died(coordinator, 1, now)))[-1].startswith("serving goes on"):
        assert fleet.phase is Phase.SERVING
        deadline = fleet.next_deadline()
        assert deadline is not None, said_now
        now = deadline
        fleet.tick(now)
    assert fleet.phase is Phase.SERVING


# -- start ---------------------------------------------------------------------------------------------


def test_engines_are_started_first_and_nobody_waits() -> None:
    assert make(2).begin(0.0) == [Spawn(ENGINE, 0), Spawn(SERVER, 0), Spawn(OTHER, 0)]


def test_announces_once_when_the_last_one_is_ready() -> None:
    fleet = make()
    fleet.begin(10.0)
    done_with = Progress(text="ready", fraction=1.0)
    assert fleet.report(SERVER, Ready(), 11.0) == [Show(SERVER, done_with)]
    actions = fleet.report(ENGINE, Ready(info={"device": "cpu"}), 12.5)
    assert actions == [Show(ENGINE, done_with), Announce()]
    assert fleet.info(ENGINE) == {"device": "cpu"}
    assert done(fleet.report(ENGINE, Ready(), 13.0)) == []


def test_progress_is_shown_and_renews_the_time_to_start() -> None:
    fleet = make()
    fleet.begin(0.0)
    fleet.report(SERVER, Ready(), 0.0)
    progress = Progress(text="loading weights", fraction=0.5)
    assert fleet.report(ENGINE, progress, 90.0) == [Show(ENGINE, progress)]
    assert fleet.next_deadline() == 90.0 + STARTUP_S
    assert fleet.tick(STARTUP_S + 1) == []
    assert done(fleet.tick(90.0 + STARTUP_S)) == [Kill(ENGINE)]


def test_a_first_start_that_takes_too_long_ends_everything_and_says_where_it_was() -> None:
    fleet = make()
    fleet.begin(0.0)
    fleet.report(SERVER, Ready(), 0.0)
    fleet.report(ENGINE, Progress(text="loading weights"), 0.0)
    assert done(fleet.tick(STARTUP_S)) == [Kill(ENGINE)]
    actions = fleet.died(ENGINE, -signal.SIGKILL, STARTUP_S)
    assert done(actions) == [Send(SERVER, Stop())]
    [error] = errors(actions)
    assert error.startswith("engine 0 was killed by SIGKILL")
    assert "not ready within 100 s (--startup-timeout); it was at: loading weights" in error
    fleet.died(SERVER, 0, STARTUP_S)
    assert fleet.exit_code == EXIT_FAILED


@pytest.mark.parametrize("order", ["report first", "exit code alone"])
def test_a_fatal_failure_at_start_ends_everything_with_its_message_once(order: str) -> None:
    fleet = make(2)
    fleet.begin(0.0)
    fleet.report(SERVER, Ready(), 0.5)
    told: list[str] = []
    if order == "report first":
        assert fleet.report(ENGINE, Failed(message="no config.json", fatal=True), 1.0) == []
    actions = fleet.died(ENGINE, EXIT_FATAL, 1.0)
    told += errors(actions)
    # The one that is ready is asked, the one that still loads has nothing to lose.
    assert done(actions) == [Send(SERVER, Stop()), Kill(OTHER)]
    told += errors(fleet.died(OTHER, -signal.SIGKILL, 1.0))
    assert fleet.exit_code is None
    told += errors(fleet.died(SERVER, 0, 1.0))
    reason = "no config.json" if order == "report first" else "it would fail the same way again"
    assert told == [f"engine 0 ended with exit code 3: {reason}"]
    assert fleet.exit_code == EXIT_FAILED


def test_a_start_that_may_work_next_time_is_tried_three_times() -> None:
    fleet = make()
    fleet.begin(0.0)
    fleet.report(SERVER, Ready(), 0.0)
    now, epochs = 1.0, []
    for _ in range(2):
        assert done(fleet.died(ENGINE, -signal.SIGSEGV, now)) == []
        deadline = fleet.next_deadline()
        assert deadline is not None
        now = deadline
        epochs += fleet.tick(now)
    assert epochs == [Spawn(ENGINE, 1), Spawn(ENGINE, 2)]
    actions = fleet.died(ENGINE, -signal.SIGSEGV, now)
    assert errors(actions) == ["engine 0 was killed by SIGSEGV", "engine 0 keeps failing to start; giving up"]
    assert done(actions) == [Send(SERVER, Stop())]


def test_a_machine_that_refuses_processes_is_a_failed_start() -> None:
    fleet = make()
    fleet.begin(0.0)
    actions = fleet.could_not_start(ENGINE, "Cannot allocate memory", 0.0)
    assert errors(actions) == ["engine 0 could not be started: Cannot allocate memory"]
    assert fleet.tick(FIRST_DELAY_S) == [Spawn(ENGINE, 1)]


def test_a_signal_during_the_start_stops_at_once() -> None:
    fleet = make()
    fleet.begin(0.0)
    fleet.report(SERVER, Ready(), 0.5)
    assert done(fleet.signalled(signal.SIGINT, 1.0)) == [Kill(ENGINE), Send(SERVER, Stop())]
    assert errors(fleet.died(ENGINE, -signal.SIGKILL, 1.0)) == []
    fleet.died(SERVER, 0, 1.0)
    assert fleet.exit_code == EXIT_OK


# -- deaths while serving ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [ENGINE, SERVER])
def test_a_death_is_told_once_with_its_cause_and_answered_by_a_restart(name: Name) -> None:
    fleet = serving()
    fleet.report(name, Failed(message="CUDA is unhappy", fatal=False), 5.0)
    actions = fleet.died(name, 1, 5.0)
    assert errors(actions) == [f"{name} ended with exit code 1: CUDA is unhappy"]
    assert done(actions) == []
    assert fleet.tick(5.0 + FIRST_DELAY_S / 2) == []
    assert fleet.tick(5.0 + FIRST_DELAY_S) == [Spawn(name, 1)]
    actions = fleet.report(name, Ready(), 6.0)
    assert said(actions) == [f"{name} is ready again"]
    assert done(actions) == []
    assert fleet.restarts(name) == 1
    # The reason of the first death is not told again at the second.
    assert errors(fleet.died(name, -signal.SIGSEGV, 7.0)) == [f"{name} was killed by SIGSEGV"]


def test_an_exit_that_nobody_asked_for_is_a_death() -> None:
    assert errors(serving().died(SERVER, 0, 5.0)) == ["api-server 0 ended with exit code 0"]


def fail_for_good(fleet: Fleet, name: Name, now: float) -> tuple[list[Action], float]:
    """Dies, and fails to start until that is given up; returns what the last failure led to, and when."""
    fleet.died(name, 1, now)
    for _ in range(2):
        now += 40.0
        assert done(fleet.tick(now)) != []
        fleet.died(name, 1, now)
    now += 40.0
    fleet.tick(now)
    return fleet.died(name, 1, now), now


def test_a_restart_that_keeps_failing_is_given_up_while_others_serve() -> None:
    fleet = serving(2)
    actions, now = fail_for_good(fleet, SERVER, 5.0)
    assert done(actions) == []
    assert errors(actions)[1:] == [
        "api-server 0 keeps failing to start; giving up",
        "serving goes on without api-server 0, with api-server 1",
    ]
    assert fleet.next_deadline() is None
    assert fleet.phase is Phase.SERVING
    actions, now = fail_for_good(fleet, OTHER, now)
    assert done(actions) == [Send(ENGINE, Stop())]
    fleet.died(ENGINE, 0, now)
    assert fleet.exit_code == EXIT_FAILED


def test_the_last_of_a_role_that_keeps_failing_drains_and_exits_with_1() -> None:
    fleet = serving(2)
    actions, now = fail_for_good(fleet, ENGINE, 5.0)
    assert done(actions) == [Send(SERVER, Drain()), Send(OTHER, Drain())]
    fleet.died(SERVER, 0, now)
    fleet.died(OTHER, 0, now)
    assert fleet.exit_code == EXIT_FAILED


def test_a_child_that_says_it_failed_and_stays_is_killed() -> None:
    fleet = serving()
    fleet.report(ENGINE, Failed(message="x", fatal=False), 5.0)
    assert fleet.tick(5.0 + GRACE_S - 0.1) == []
    assert done(fleet.tick(5.0 + GRACE_S)) == [Kill(ENGINE)]


def test_a_child_that_hangs_up_and_stays_is_killed() -> None:
    fleet = serving()
    assert fleet.hung_up(SERVER, 5.0) == []
    assert done(fleet.tick(5.0 + GRACE_S)) == [Kill(SERVER)]
    assert errors(fleet.died(SERVER, -signal.SIGKILL, 11.0)) == [
        "api-server 0 was killed by SIGKILL (out of memory?)"
    ]


def test_a_child_that_breaks_the_channel_is_killed_and_the_reason_told() -> None:
    fleet = serving()
    assert fleet.misbehaved(ENGINE, "not a control message: b'x'", 5.0) == [Kill(ENGINE)]
    [error] = errors(fleet.died(ENGINE, -signal.SIGKILL, 5.0))
    assert error.endswith("not a control message: b'x'")


def test_a_restart_that_takes_too_long_is_tried_again() -> None:
    fleet = serving()
    fleet.died(ENGINE, 1, 5.0)
    fleet.tick(6.0)
    assert done(fleet.tick(6.0 + STARTUP_S)) == [Kill(ENGINE)]
    fleet.died(ENGINE, -signal.SIGKILL, 107.0)
    assert fleet.phase is Phase.SERVING
    assert done(fleet.tick(110.0)) == [Spawn(ENGINE, 2)]


def test_an_engine_that_falls_silent_is_killed_and_started_again() -> None:
    fleet = serving(hang_timeout=HANG_S)
    assert fleet.next_deadline() == 1.0 + HANG_S
    assert fleet.report(ENGINE, Beat(), 15.0) == []
    assert fleet.tick(1.0 + HANG_S) == []
    assert done(fleet.tick(15.0 + HANG_S)) == [Kill(ENGINE)]
    [error] = errors(fleet.died(ENGINE, -signal.SIGKILL, 35.0))
    assert "not heard of for 20 s (--engine-hang-timeout)" in error
    assert fleet.tick(36.0) == [Spawn(ENGINE, 1)]


def test_a_supervisor_that_was_stopped_itself_blames_nobody() -> None:
    fleet = serving(hang_timeout=HANG_S)
    assert fleet.tick(1.0 + HANG_S + LATE_S + 0.1) == []
    assert fleet.tick(1.0 + 2 * HANG_S + LATE_S) == []
    assert done(fleet.tick(1.0 + 2 * HANG_S + LATE_S + 0.1)) == [Kill(ENGINE)]


def test_api_servers_and_starting_engines_need_not_be_heard() -> None:
    fleet = make(hang_timeout=HANG_S)
    fleet.begin(0.0)
    fleet.report(SERVER, Ready(), 0.0)
    assert fleet.tick(STARTUP_S - 0.1) == []


# -- engines in lock-step ------------------------------------------------------------------------------

GROUP = [Name("engine", rank) for rank in range(3)]


def fall(fleet: Fleet, first: Name, now: float) -> list[Action]:
    """One dies, and the others are killed; what the last death leads to."""
    others = [name for name in GROUP if name != first]
    assert done(fleet.died(first, -signal.SIGSEGV, now)) == [Kill(name) for name in others]
    assert fleet.died(others[0], -signal.SIGKILL, now) == []
    return fleet.died(others[1], -signal.SIGKILL, now)


def test_engines_in_lock_step_fall_and_are_started_again_together() -> None:
    fleet = serving(group=3)
    actions = fleet.died(GROUP[1], -signal.SIGSEGV, 5.0)
    assert done(actions) == [Kill(GROUP[0]), Kill(GROUP[2])]
    assert errors(actions) == ["engine 1 was killed by SIGSEGV"]
    assert fleet.died(GROUP[0], -signal.SIGKILL, 5.1) == []
    fleet.report(GROUP[2], Failed(message="the others have left", fatal=True), 5.1)
    actions = fleet.died(GROUP[2], 1, 5.2)
    assert said(actions) == ["the group of engine 0, engine 1, engine 2 is started again in 0.1 s"]
    assert fleet.tick(5.2 + FIRST_DELAY_S) == [Spawn(name, 1) for name in GROUP]
    for name in GROUP:
        fleet.report(name, Ready(), 6.0)
    fall(fleet, GROUP[0], 6.5)
    assert fleet.next_deadline() == 6.5 + 2 * FIRST_DELAY_S
    assert fleet.phase is Phase.SERVING


def test_a_group_of_which_one_never_gets_ready_is_given_up() -> None:
    fleet = serving(group=3)
    fall(fleet, GROUP[0], 5.0)
    now = 5.0
    for _ in range(3):
        now += 40.0
        assert done(fleet.tick(now)) == [Spawn(name, fleet_epoch(now)) for name in GROUP]
        fleet.report(GROUP[0], Ready(), now)
        fleet.report(GROUP[1], Ready(), now)
        actions = fall(fleet, GROUP[2], now)
    assert "the group of engine 0, engine 1, engine 2 keeps failing to start; giving up" in errors(actions)
    assert done(actions) == [Send(SERVER, Drain())]


def fleet_epoch(now: float) -> int:
    """Of a group that falls every 40 seconds from 5 on."""
    return int((now - 5.0) / 40.0)


def test_a_rank_that_would_fail_again_ends_the_server_when_its_group_is_gone() -> None:
    fleet = make(group=3)
    fleet.begin(0.0)
    fleet.report(SERVER, Ready(), 0.5)
    fleet.report(GROUP[2], Failed(message="no config.json", fatal=True), 1.0)
    assert errors(fleet.died(GROUP[2], EXIT_FATAL, 1.0)) == [
        "engine 2 ended with exit code 3: no config.json"
    ]
    fleet.died(GROUP[0], -signal.SIGKILL, 1.0)
    assert done(fleet.died(GROUP[1], -signal.SIGKILL, 1.0)) == [Send(SERVER, Stop())]
    fleet.died(SERVER, 0, 1.0)
    assert fleet.exit_code == EXIT_FAILED


def test_a_rank_that_hangs_takes_its_group_along() -> None:
    fleet = serving(hang_timeout=HANG_S, group=3)
    for name in GROUP[:2]:
        fleet.report(name, Beat(), 15.0)
    assert done(fleet.tick(1.0 + HANG_S)) == [Kill(GROUP[2])]
    assert "not heard of for 20 s" in errors(fall_of_killed(fleet, GROUP[2], 22.0))[0]


def fall_of_killed(fleet: Fleet, name: Name, now: float) -> list[Action]:
    actions = fleet.died(name, -signal.SIGKILL, now)
    assert done(actions) == [Kill(other) for other in GROUP if other != name]
    return actions


def test_ranks_that_die_at_the_same_time_are_each_told_and_killed_once() -> None:
    fleet = serving(group=3)
    assert done(fleet.misbehaved(GROUP[0], "nonsense", 5.0)) == [Kill(GROUP[0])]
    assert done(fleet.died(GROUP[1], -signal.SIGSEGV, 5.0)) == [Kill(GROUP[2])]
    assert len(errors(fleet.died(GROUP[0], -signal.SIGKILL, 5.0))) == 1
    assert done(fleet.died(GROUP[2], -signal.SIGKILL, 5.0)) == []
    assert fleet.tick(6.0) == [Spawn(name, 1) for name in GROUP]


def test_a_group_that_the_machine_refuses_in_part_is_tried_again_as_a_whole() -> None:
    fleet = make(group=3)
    fleet.begin(0.0)
    assert done(fleet.could_not_start(GROUP[0], "no memory", 0.0)) == [Kill(GROUP[1]), Kill(GROUP[2])]
    assert done(fleet.could_not_start(GROUP[1], "no memory", 0.0)) == []
    fleet.died(GROUP[2], -signal.SIGKILL, 0.1)
    assert fleet.tick(1.0) == [Spawn(name, 1) for name in GROUP]


# -- states that all engines agree on --------------------------------------------------------------------


SLEEP = ProposeState(name="sleep", key="a", base=0, arguments={"level": 1})
AGREED = [AgreedState(name="sleep", key="a", version=1, arguments={"level": 1})]


def agreed(adopted: int = 0) -> AgreedStates:
    return AgreedStates(revision=1, adopted=adopted, states=AGREED)


def test_a_decision_is_told_to_all_api_servers_and_again_when_all_act_by_it() -> None:
    fleet = serving(2)
    actions = fleet.report(OTHER, SLEEP, 2.0)
    assert done(actions) == [Send(SERVER, agreed()), Send(OTHER, agreed())]
    assert said(actions) == ["agreed: sleep {'level': 1}"]
    assert fleet.report(SERVER, StatesAdopted(revision=1), 3.0) == []
    everyone = [Send(SERVER, agreed(1)), Send(OTHER, agreed(1))]
    assert fleet.report(OTHER, StatesAdopted(revision=1), 3.0) == everyone


def test_who_comes_too_late_is_told_what_is_agreed() -> None:
    fleet = serving(2)
    fleet.report(OTHER, SLEEP, 2.0)
    late = ProposeState(name="sleep", key="b", base=0, arguments={"level": 2})
    assert fleet.report(SERVER, late, 2.0) == [Send(SERVER, agreed())]


def test_one_that_dies_is_not_waited_for_and_told_when_it_is_back() -> None:
    fleet = serving(2)
    fleet.report(OTHER, SLEEP, 2.0)
    fleet.report(OTHER, StatesAdopted(revision=1), 2.0)
    assert done(fleet.died(SERVER, -signal.SIGKILL, 3.0)) == [Send(OTHER, agreed(1))]
    fleet.tick(3.0 + FIRST_DELAY_S)
    assert done(fleet.report(SERVER, Ready(), 5.0)) == [Send(SERVER, agreed(1))]


# -- the end -------------------------------------------------------------------------------------------


def test_a_signal_drains_api_servers_then_stops_engines_and_exits_with_0() -> None:
    fleet = serving(2)
    actions = fleet.signalled(signal.SIGTERM, 10.0)
    assert done(actions) == [Send(SERVER, Drain()), Send(OTHER, Drain())]
    assert said(actions) == ["SIGTERM: shutting down, finishing running streams for up to 7 s"]
    assert fleet.died(OTHER, 0, 11.0) == []
    assert fleet.died(SERVER, 0, 12.0) == [Send(ENGINE, Stop())]
    assert fleet.exit_code is None
    assert fleet.died(ENGINE, 0, 12.1) == []
    assert fleet.exit_code == EXIT_OK
    assert fleet.next_deadline() is None


def test_streams_that_run_too_long_are_stopped_and_then_killed() -> None:
    fleet = serving()
    fleet.signalled(signal.SIGTERM, 10.0)
    assert fleet.tick(10.0 + DRAIN_S - 0.1) == []
    actions = fleet.tick(10.0 + DRAIN_S)
    assert done(actions) == [Send(ENGINE, Stop()), Send(SERVER, Stop())]
    assert len(errors(actions)) == 1
    fleet.died(ENGINE, 0, 17.5)
    actions = fleet.tick(10.0 + DRAIN_S + GRACE_S)
    assert done(actions) == [Kill(SERVER)]
    assert errors(actions) == ["killing what has not ended: api-server 0"]
    fleet.died(SERVER, -signal.SIGKILL, 22.5)
    assert fleet.exit_code == EXIT_OK


@pytest.mark.parametrize(("second", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_streams_truthfully_and_a_third_kills(second: signal.Signals, code: int) -> None:
    fleet = serving()
    fleet.signalled(signal.SIGTERM, 10.0)
    actions = fleet.signalled(second, 10.5)
    assert done(actions) == [Send(ENGINE, Stop()), Send(SERVER, Stop())]
    assert errors(actions) == [f"{second.name} while shutting down: running streams end with an error"]
    assert fleet.signalled(second, 10.5) == []
    assert done(fleet.signalled(signal.SIGINT, 11.0)) == [Kill(ENGINE), Kill(SERVER)]
    fleet.died(ENGINE, -signal.SIGKILL, 11.1)
    assert errors(fleet.died(SERVER, -signal.SIGKILL, 11.1)) == []
    assert fleet.exit_code == code


@pytest.mark.parametrize(("second", "at"), [(signal.SIGINT, 10.05), (signal.SIGHUP, 11.0)])
def test_an_echo_of_the_first_signal_is_none(second: signal.Signals, at: float) -> None:
    fleet = serving()
    fleet.signalled(signal.SIGINT, 10.0)
    assert fleet.signalled(second, at) == []


def test_deaths_during_the_drain_are_told_and_not_answered() -> None:
    fleet = serving(2)
    fleet.signalled(signal.SIGTERM, 10.0)
    actions = fleet.died(SERVER, -signal.SIGSEGV, 10.5)
    assert errors(actions) == ["api-server 0 was killed by SIGSEGV while shutting down"]
    assert done(actions) == []
    fleet.died(OTHER, 0, 11.0)
    fleet.died(ENGINE, 0, 11.0)
    assert fleet.exit_code == EXIT_OK


def test_a_child_that_waits_for_its_restart_is_not_started_during_the_drain() -> None:
    fleet = serving(2)
    fleet.died(SERVER, 1, 9.99)
    assert done(fleet.signalled(signal.SIGTERM, 10.0)) == [Send(OTHER, Drain())]
    assert fleet.tick(10.0 + FIRST_DELAY_S) == []


def test_a_child_that_is_starting_again_is_killed_by_the_drain() -> None:
    fleet = serving(2)
    fleet.died(ENGINE, 1, 9.0)
    assert done(fleet.tick(9.9)) == [Spawn(ENGINE, 1)]
    assert done(fleet.signalled(signal.SIGTERM, 10.0)) == [
        Kill(ENGINE),
        Send(SERVER, Drain()),
        Send(OTHER, Drain()),
    ]


# -- engines without new streams -----------------------------------------------------------------------


def test_every_api_server_learns_which_engines_are_drained() -> None:
    fleet = serving(2)
    drained = EnginesDraining(ranks=[0])
    actions = fleet.report(SERVER, DrainEngine(rank=0, draining=True), 5.0)
    assert done(actions) == [Send(SERVER, drained), Send(OTHER, drained)]
    assert said(actions) == ["engine 0 gets new streams no longer"]
    # One that starts is told when it is ready; the engine's own restart changes nothing.
    fleet.died(OTHER, 1, 6.0)
    fleet.died(ENGINE, 1, 6.0)
    fleet.tick(7.0)
    assert done(fleet.report(ENGINE, Ready(), 8.0)) == []
    assert done(fleet.report(OTHER, Ready(), 8.0)) == [Send(OTHER, drained)]
    actions = fleet.report(OTHER, DrainEngine(rank=0, draining=False), 9.0)
    assert done(actions) == [Send(SERVER, EnginesDraining(ranks=[])), Send(OTHER, EnginesDraining(ranks=[]))]


def test_an_engine_that_does_not_exist_cannot_be_drained() -> None:
    actions = serving().report(SERVER, DrainEngine(rank=7, draining=True), 5.0)
    assert done(actions) == []
    assert errors(actions) == ["api-server 0 asked for engine 7, which there is not"]


# -- replacing API servers -----------------------------------------------------------------------------

NEW = Name("api-server", 2)
RETIRE = Drain(replaced=True)


def test_api_servers_are_replaced_one_by_one() -> None:
    fleet = serving(2)
    actions = fleet.replace(10.0)
    assert done(actions) == [Spawn(NEW, 0)]
    assert said(actions) == ["SIGHUP: replacing 2 API servers one by one"]
    third = Name("api-server", 3)
    actions = fleet.report(NEW, Ready(), 12.0)
    assert done(actions) == [Send(SERVER, RETIRE), Spawn(third, 0)]
    assert said(actions) == ["api-server 2 is ready and replaces api-server 0"]
    assert done(fleet.report(third, Ready(), 14.0)) == [Send(OTHER, RETIRE)]
    assert fleet.next_deadline() is None  # their streams may take any time
    assert said(fleet.died(SERVER, 0, 500.0)) == ["api-server 0 has served all it had"]
    actions = fleet.died(OTHER, -signal.SIGSEGV, 501.0)
    assert errors(actions) == ["api-server 1 was killed by SIGSEGV before it had served all it had"]
    assert done(actions) == []
    # Free numbers are used again, with epochs of their own.
    assert done(fleet.replace(600.0)) == [Spawn(SERVER, 1)]
    assert fleet.restarts(SERVER) == 0


def test_a_replacement_that_fails_changes_nothing() -> None:
    fleet = serving(2)
    fleet.replace(10.0)
    actions = fleet.died(NEW, EXIT_FATAL, 11.0)
    assert done(actions) == []
    assert errors(actions)[1] == "api-server 0 goes on; nothing more is replaced"
    assert fleet.next_deadline() is None
    assert done(fleet.replace(20.0)) == [Spawn(NEW, 1)]


def test_an_api_server_that_dies_before_its_replacement_is_ready_is_not_started_again() -> None:
    fleet = serving(2)
    fleet.replace(10.0)
    third = Name("api-server", 3)
    assert done(fleet.died(SERVER, 1, 11.0)) == [Spawn(third, 0)]  # the next replacement, of the other one
    assert done(fleet.report(NEW, Ready(), 12.0)) == []
    assert done(fleet.report(third, Ready(), 12.0)) == [Send(OTHER, RETIRE)]


def test_only_a_server_that_serves_is_replaced_and_once_at_a_time() -> None:
    fleet = make()
    fleet.begin(0.0)
    assert errors(fleet.replace(0.5)) == ["SIGHUP while starting: passed over"]
    fleet = serving()
    fleet.replace(10.0)
    assert errors(fleet.replace(11.0)) == ["SIGHUP while replacing API servers: passed over"]
    fleet.signalled(signal.SIGTERM, 12.0)
    assert done(fleet.replace(13.0)) == []


def test_the_end_drains_replaced_api_servers_too() -> None:
    fleet = serving()
    fleet.replace(10.0)
    first = Name("api-server", 1)
    fleet.report(first, Ready(), 11.0)
    assert done(fleet.signalled(signal.SIGTERM, 12.0)) == [Send(SERVER, Drain()), Send(first, Drain())]
    assert fleet.died(first, 0, 13.0) == []
    assert fleet.died(SERVER, 0, 14.0) == [Send(ENGINE, Stop())]


def test_a_retiring_api_server_does_not_keep_a_fleet_without_others() -> None:
    fleet = serving()
    fleet.replace(10.0)
    first = Name("api-server", 1)
    fleet.report(first, Ready(), 11.0)
    actions, _ = fail_for_good(fleet, first, 12.0)
    assert done(actions) == [Send(SERVER, Drain())]


# -- whatever happens ----------------------------------------------------------------------------------

_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ready", "failed", "fatal", "progress", "beat", "hang up", "die", "signal", "replace", "wait"]
        ),
        st.integers(0, 4),
        st.floats(0, 50),
    ),
    max_size=60,
)


@pytest.mark.parametrize("group", [0, 3])
@given(_EVENTS)
def test_no_process_is_ever_lost(group: int, events: list[tuple[str, int, float]]) -> None:
    """Every action is about a process that lives, and the fleet ends when it is asked to, without any."""
    fleet, alive, now = make(2, HANG_S, group), dict[Name, int](), 0.0
    doomed: list[Name] = []

    def carry_out(actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Spawn(name, epoch):
                    assert name not in alive
                    alive[name] = epoch
                    if group and name.role == "engine":
                        assert {at for other, at in alive.items() if other.role == "engine"} == {epoch}
                case Kill(name):
                    assert name in alive
                    doomed.append(name)
                case Send(name, _):
                    assert name in alive
        assert fleet.exit_code is None or not alive

    def bury() -> None:
        while doomed:
            name = doomed.pop()
            if alive.pop(name, None) is not None:
                carry_out(fleet.died(name, -signal.SIGKILL, now))

    carry_out(fleet.begin(now))
    for kind, which, wait in events:
        now += wait
        name = fleet.names()[which % len(fleet.names())]
        if kind == "signal":
            carry_out(fleet.signalled(signal.SIGTERM, now))
        elif kind == "wait":
            carry_out(fleet.tick(now))
        elif kind == "replace":
            carry_out(fleet.replace(now))
        elif name in alive:
            match kind:
                case "ready":
                    carry_out(fleet.report(name, Ready(), now))
                case "progress":
                    carry_out(fleet.report(name, Progress(text="x"), now))
                case "beat":
                    carry_out(fleet.report(name, Beat(), now))
                case "failed" | "fatal":
                    carry_out(fleet.report(name, Failed(message="x", fatal=kind == "fatal"), now))
                case "hang up":
                    carry_out(fleet.hung_up(name, now))
                case "die":
                    del alive[name]
                    carry_out(fleet.died(name, 1, now))
        bury()
    carry_out(fleet.signalled(signal.SIGTERM, now))
    bury()
    for _ in range(4):
        deadline = fleet.next_deadline()
        if deadline is not None:
            now = max(now, deadline)
            carry_out(fleet.tick(now))
            bury()
    assert fleet.exit_code is not None
    assert not alive


# -- several hosts


def headless() -> Fleet:
    """Engines 2 and 3, for the API servers of another host; ready at time 1."""
    fleet = Fleet(
        engines=2,
        api_servers=0,
        startup_timeout=STARTUP_S,
        drain_timeout=DRAIN_S,
        engine_hang_timeout=HANG_S,
        first_rank=2,
        all_engines=4,
    )
    fleet.begin(0.0)
    assert fleet.names() == [Name("engine", 2), Name("engine", 3)]
    for name in fleet.names():
        fleet.report(name, Ready(), 1.0)
    assert fleet.phase is Phase.SERVING
    return fleet


def test_a_host_without_api_servers_drains_its_engines() -> None:
    fleet = headless()
    first, second = fleet.names()
    assert done(fleet.signalled(signal.SIGTERM, 2.0)) == [Send(first, Drain()), Send(second, Drain())]
    assert done(fleet.died(first, EXIT_OK, 3.0)) == []
    assert done(fleet.tick(2.0 + DRAIN_S)) == [Send(second, Stop())]
    fleet.died(second, EXIT_OK, 10.0)
    assert fleet.exit_code == EXIT_OK


def test_an_engine_that_is_refused_is_not_tried_again() -> None:
    fleet = headless()
    first, second = fleet.names()
    fleet.report(first, Failed(message="the fleet does not take this engine", fatal=True), 2.0)
    assert "serving goes on without engine 2, with engine 3" in errors(fleet.died(first, EXIT_FATAL, 2.0))
    fleet.report(second, Failed(message="the fleet does not take this engine", fatal=True), 3.0)
    fleet.died(second, EXIT_FATAL, 3.0)
    assert fleet.exit_code == EXIT_FAILED


def test_engines_of_other_hosts_can_be_drained() -> None:
    fleet = Fleet(
        engines=1,
        api_servers=1,
        startup_timeout=STARTUP_S,
        drain_timeout=DRAIN_S,
        engine_hang_timeout=HANG_S,
        all_engines=2,
    )
    fleet.begin(0.0)
    for name in fleet.names():
        fleet.report(name, Ready(), 1.0)
    actions = fleet.report(SERVER, DrainEngine(rank=1, draining=True), 2.0)
    assert done(actions) == [Send(SERVER, EnginesDraining(ranks=[1]))]
    assert "which there is not" in errors(fleet.report(SERVER, DrainEngine(rank=2, draining=True), 2.0))[0]
