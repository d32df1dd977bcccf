from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.exit_codes import EXIT_FAILED, EXIT_FATAL
from penstock.supervisor.children.actions import (
    Action,
    AnnounceReady,
    Kill,
    ProcessName,
    Send,
    ShowProgress,
    Spawn,
)
from penstock.supervisor.children.child_state import EXIT_GRACE_S
from penstock.supervisor.children.process_manager import HEARTBEAT_CHECK_INTERVAL_S
from penstock.wire.control import Heartbeat, ProcessFailed, Progress, Ready, Stop
from tests.supervisor.children.managers import (
    DRAIN_S,
    ENGINE,
    HANG_S,
    OTHER,
    SERVER,
    STARTUP_S,
    done,
    errors,
    make,
    serving,
    watched,
)


def test_engines_are_started_first_and_nobody_waits() -> None:
    assert make(2).start(0.0) == [Spawn(ENGINE, 0), Spawn(SERVER, 0), Spawn(OTHER, 0)]


def test_announces_once_when_the_last_one_is_ready() -> None:
    fleet = make()
    fleet.start(10.0)
    done_with = Progress(text="ready", fraction=1.0)
    assert done(fleet.report(SERVER, Ready(), 11.0)) == [ShowProgress(SERVER, done_with)]
    actions = fleet.report(ENGINE, Ready(info={"device": "cpu"}), 12.5)
    assert actions == [ShowProgress(ENGINE, done_with), AnnounceReady()]
    assert fleet.info(ENGINE) == {"device": "cpu"}
    assert done(fleet.report(ENGINE, Ready(), 13.0)) == []


def test_progress_is_shown_and_renews_the_time_to_start() -> None:
    fleet = make()
    fleet.start(0.0)
    fleet.report(SERVER, Ready(), 0.0)
    progress = Progress(text="loading weights", fraction=0.5)
    assert fleet.report(ENGINE, progress, 90.0) == [ShowProgress(ENGINE, progress)]
    assert fleet.next_deadline() == 90.0 + STARTUP_S
    assert fleet.tick(STARTUP_S + 1) == []
    assert done(fleet.tick(90.0 + STARTUP_S)) == [Kill(ENGINE)]


def test_a_first_start_that_takes_too_long_ends_everything_and_says_where_it_was() -> None:
    fleet = make()
    fleet.start(0.0)
    fleet.report(SERVER, Ready(), 0.0)
    fleet.report(ENGINE, Progress(text="loading weights"), 0.0)
    assert done(fleet.tick(STARTUP_S)) == [Kill(ENGINE)]
    actions = fleet.exited(ENGINE, -signal.SIGKILL, STARTUP_S)
    assert done(actions) == [Send(SERVER, Stop())]
    [error] = errors(actions)
    assert error.startswith("engine 0 was killed by SIGKILL")
    assert "not ready within 100 s (--startup-timeout); it was at: loading weights" in error
    fleet.exited(SERVER, 0, STARTUP_S)
    assert fleet.exit_code == EXIT_FAILED


@pytest.mark.parametrize("order", ["report first", "exit code alone"])
def test_a_fatal_failure_at_start_ends_everything_with_its_message_once(order: str) -> None:
    fleet = make(2)
    fleet.start(0.0)
    fleet.report(SERVER, Ready(), 0.5)
    told: list[str] = []
    if order == "report first":
        assert fleet.report(ENGINE, ProcessFailed(message="no config.json", fatal=True), 1.0) == []
    actions = fleet.exited(ENGINE, EXIT_FATAL, 1.0)
    told += errors(actions)
    # The one that is ready is asked, the one that still loads has nothing to lose.
    assert done(actions) == [Send(SERVER, Stop()), Kill(OTHER)]
    told += errors(fleet.exited(OTHER, -signal.SIGKILL, 1.0))
    assert fleet.exit_code is None
    told += errors(fleet.exited(SERVER, 0, 1.0))
    reason = "no config.json" if order == "report first" else "it would fail the same way again"
    assert told == [f"engine 0 ended with exit code 3: {reason}"]
    assert fleet.exit_code == EXIT_FAILED


def test_a_child_that_says_it_failed_and_stays_is_killed() -> None:
    fleet = serving()
    fleet.report(ENGINE, ProcessFailed(message="x", fatal=False), 5.0)
    assert fleet.tick(5.0 + EXIT_GRACE_S - 0.1) == []
    assert done(fleet.tick(5.0 + EXIT_GRACE_S)) == [Kill(ENGINE)]
    assert errors(fleet.exited(ENGINE, -signal.SIGKILL, 11.0)) == ["engine 0 was killed by SIGKILL: x"]


def test_a_child_that_hangs_up_and_stays_is_killed() -> None:
    fleet = serving()
    assert fleet.channel_closed(SERVER, 5.0) == []
    assert done(fleet.tick(5.0 + EXIT_GRACE_S)) == [Kill(SERVER)]
    assert errors(fleet.exited(SERVER, -signal.SIGKILL, 11.0)) == ["api-server 0 was killed by SIGKILL"]


def test_one_that_somebody_else_has_killed_may_have_used_too_much() -> None:
    [error] = errors(serving().exited(SERVER, -signal.SIGKILL, 5.0))
    assert error == "api-server 0 was killed by SIGKILL (out of memory?)"


def test_a_child_that_breaks_the_channel_is_killed_and_the_reason_told() -> None:
    fleet = serving()
    assert fleet.protocol_error(ENGINE, "not a control message: b'x'", 5.0) == [Kill(ENGINE)]
    [error] = errors(fleet.exited(ENGINE, -signal.SIGKILL, 5.0))
    assert error.endswith("not a control message: b'x'")


def test_an_engine_that_falls_silent_is_killed_and_started_again() -> None:
    fleet = serving(hang_timeout=HANG_S)
    assert watched(fleet, 1.0, 15.0) == []
    assert fleet.report(ENGINE, Heartbeat(), 15.0) == []
    assert watched(fleet, 15.0, 14.9 + HANG_S) == []
    assert done(fleet.tick(15.0 + HANG_S)) == [Kill(ENGINE)]
    [error] = errors(fleet.exited(ENGINE, -signal.SIGKILL, 35.0))
    assert "not heard of for 20 s (--engine-hang-timeout)" in error
    assert fleet.tick(36.0) == [Spawn(ENGINE, 1)]


@pytest.mark.parametrize("stopped", [HANG_S - 5.0, HANG_S, HANG_S + 0.5, 10 * HANG_S])
def test_time_in_which_the_supervisor_was_stopped_itself_is_nobody_s_silence(stopped: float) -> None:
    fleet = serving(hang_timeout=HANG_S)
    assert watched(fleet, 1.0, 6.0) == []
    again = 6.0 + stopped
    assert fleet.tick(again) == []
    left = 1.0 + HANG_S - 6.0 - HEARTBEAT_CHECK_INTERVAL_S
    assert watched(fleet, again, again + left - 0.1) == []
    assert done(watched(fleet, again + left - 0.1, again + left + 2 * HEARTBEAT_CHECK_INTERVAL_S)) == [
        Kill(ENGINE)
    ]


def test_a_word_that_came_while_the_supervisor_was_stopped_gives_no_more_than_the_timeout() -> None:
    fleet = serving(hang_timeout=HANG_S)
    fleet.report(ENGINE, Heartbeat(), 100.0)
    assert fleet.tick(100.0) == []
    assert done(watched(fleet, 100.0, 100.0 + HANG_S)) == [Kill(ENGINE)]


def test_api_servers_and_starting_engines_need_not_be_heard() -> None:
    fleet = make(hang_timeout=HANG_S)
    fleet.start(0.0)
    fleet.report(SERVER, Ready(), 0.0)
    assert fleet.tick(STARTUP_S - 0.1) == []


# -- whatever happens --------------------------------------------------------------------------------

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
    fleet, alive, now = make(2, HANG_S, group), dict[ProcessName, int](), 0.0
    doomed: list[ProcessName] = []

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
                carry_out(fleet.exited(name, -signal.SIGKILL, now))

    carry_out(fleet.start(now))
    for kind, which, wait in events:
        now += wait
        name = fleet.names()[which % len(fleet.names())]
        if kind == "signal":
            carry_out(fleet.signalled(signal.SIGTERM, now))
        elif kind == "wait":
            carry_out(fleet.tick(now))
        elif kind == "replace":
            carry_out(fleet.start_rolling_restart(now))
        elif name in alive:
            match kind:
                case "ready":
                    carry_out(fleet.report(name, Ready(), now))
                case "progress":
                    carry_out(fleet.report(name, Progress(text="x"), now))
                case "beat":
                    carry_out(fleet.report(name, Heartbeat(), now))
                case "failed" | "fatal":
                    carry_out(fleet.report(name, ProcessFailed(message="x", fatal=kind == "fatal"), now))
                case "hang up":
                    carry_out(fleet.channel_closed(name, now))
                case "die":
                    del alive[name]
                    carry_out(fleet.exited(name, 1, now))
        bury()
    carry_out(fleet.signalled(signal.SIGTERM, now))
    bury()
    until = now + DRAIN_S + 2 * EXIT_GRACE_S
    while now < until and (deadline := fleet.next_deadline()) is not None:
        now = max(now, deadline)
        carry_out(fleet.tick(now))
        bury()
    assert fleet.exit_code is not None
    assert not alive
