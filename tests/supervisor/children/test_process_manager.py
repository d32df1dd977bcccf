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
    WriteLog,
)
from penstock.supervisor.children.child_state import EXIT_GRACE_S
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
)


def test_engines_are_started_first_and_nobody_waits() -> None:
    assert make(2).start(0.0) == [Spawn(ENGINE, 0), Spawn(SERVER, 0), Spawn(OTHER, 0)]


def test_announces_once_when_the_last_one_is_ready() -> None:
    manager = make()
    manager.start(10.0)
    done_with = Progress(text="ready", fraction=1.0)
    assert done(manager.report(SERVER, Ready(), 11.0)) == [ShowProgress(SERVER, done_with)]
    actions = manager.report(ENGINE, Ready(info={"device": "cpu"}), 12.5)
    assert done(actions) == [ShowProgress(ENGINE, done_with), AnnounceReady()]
    assert manager.info(ENGINE) == {"device": "cpu"}
    assert done(manager.report(ENGINE, Ready(), 13.0)) == []


def test_attached_engines_may_come_one_by_one() -> None:
    """Clients are served from the first one on; the others may take their time."""
    manager = make(engines=2, coordinator=True, serves_with_one_engine=True)
    manager.start(0.0)
    second, coordinator = ProcessName("engine", 1), ProcessName("coordinator", 0)
    assert AnnounceReady() not in manager.report(second, Ready(), 1.0)
    assert AnnounceReady() not in manager.report(SERVER, Ready(), 2.0)
    assert AnnounceReady() in manager.report(coordinator, Ready(), 3.0)
    manager.report(ENGINE, Progress(text="waiting"), 90.0)
    assert Kill(ENGINE) not in manager.tick(STARTUP_S + 1)
    late = manager.report(ENGINE, Ready(), 150.0)
    assert [action.text for action in late if isinstance(action, WriteLog)] == ["engine 0 is ready"]
    assert AnnounceReady() not in late


def test_progress_is_shown_and_renews_the_time_to_start() -> None:
    manager = make()
    manager.start(0.0)
    manager.report(SERVER, Ready(), 0.0)
    progress = Progress(text="loading weights", fraction=0.5)
    assert manager.report(ENGINE, progress, 90.0) == [ShowProgress(ENGINE, progress)]
    assert manager.next_deadline() == 90.0 + STARTUP_S
    assert manager.tick(STARTUP_S + 1) == []
    assert done(manager.tick(90.0 + STARTUP_S)) == [Kill(ENGINE)]


def test_a_first_start_that_takes_too_long_ends_everything_and_says_where_it_was() -> None:
    manager = make()
    manager.start(0.0)
    manager.report(SERVER, Ready(), 0.0)
    manager.report(ENGINE, Progress(text="loading weights"), 0.0)
    assert done(manager.tick(STARTUP_S)) == [Kill(ENGINE)]
    actions = manager.exited(ENGINE, -signal.SIGKILL, STARTUP_S)
    assert done(actions) == [Send(SERVER, Stop())]
    [error] = errors(actions)
    assert error.startswith("engine 0 was killed by SIGKILL")
    assert "not ready within 100 s (--startup-timeout); it was at: loading weights" in error
    manager.exited(SERVER, 0, STARTUP_S)
    assert manager.exit_code == EXIT_FAILED


@pytest.mark.parametrize("order", ["report first", "exit code alone"])
def test_a_fatal_failure_at_start_ends_everything_with_its_message_once(order: str) -> None:
    manager = make(2)
    manager.start(0.0)
    manager.report(SERVER, Ready(), 0.5)
    told: list[str] = []
    if order == "report first":
        assert manager.report(ENGINE, ProcessFailed(message="no config.json", fatal=True), 1.0) == []
    actions = manager.exited(ENGINE, EXIT_FATAL, 1.0)
    told += errors(actions)
    # The one that is ready is asked, the one that still loads has nothing to lose.
    assert done(actions) == [Send(SERVER, Stop()), Kill(OTHER)]
    told += errors(manager.exited(OTHER, -signal.SIGKILL, 1.0))
    assert manager.exit_code is None
    told += errors(manager.exited(SERVER, 0, 1.0))
    reason = "no config.json" if order == "report first" else "it would fail the same way again"
    assert told == [f"engine 0 ended with exit code 3: {reason}"]
    assert manager.exit_code == EXIT_FAILED


def test_a_child_that_says_it_failed_and_stays_is_killed() -> None:
    manager = serving()
    manager.report(ENGINE, ProcessFailed(message="x", fatal=False), 5.0)
    assert manager.tick(5.0 + EXIT_GRACE_S - 0.1) == []
    assert done(manager.tick(5.0 + EXIT_GRACE_S)) == [Kill(ENGINE)]
    assert errors(manager.exited(ENGINE, -signal.SIGKILL, 11.0)) == ["engine 0 was killed by SIGKILL: x"]


def test_a_child_that_hangs_up_and_stays_is_killed() -> None:
    manager = serving()
    assert manager.channel_closed(SERVER, 5.0) == []
    assert done(manager.tick(5.0 + EXIT_GRACE_S)) == [Kill(SERVER)]
    assert errors(manager.exited(SERVER, -signal.SIGKILL, 11.0)) == ["api-server 0 was killed by SIGKILL"]


def test_one_that_somebody_else_has_killed_may_have_used_too_much() -> None:
    [error] = errors(serving().exited(SERVER, -signal.SIGKILL, 5.0))
    assert error == "api-server 0 was killed by SIGKILL (out of memory?)"


def test_a_child_that_breaks_the_channel_is_killed_and_the_reason_told() -> None:
    manager = serving()
    assert manager.protocol_error(ENGINE, "not a control message: b'x'", 5.0) == [Kill(ENGINE)]
    [error] = errors(manager.exited(ENGINE, -signal.SIGKILL, 5.0))
    assert error.endswith("not a control message: b'x'")


def test_a_child_that_becomes_ready_as_it_is_killed_is_not_ready() -> None:
    """Its report was on its way: the API server that it was to replace has exited by then."""
    manager = serving(2)
    manager.start_rolling_restart(10.0)
    new = ProcessName("api-server", 2)
    assert Kill(new) in manager.signalled(signal.SIGTERM, 11.0)
    manager.exited(SERVER, 0, 11.1)
    assert done(manager.report(new, Ready(), 11.1)) == []


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
    """Every action is for a living process, and a shutdown leaves none."""
    manager, alive, now = make(2, HANG_S, group), dict[ProcessName, int](), 0.0
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
        assert manager.exit_code is None or not alive

    def bury() -> None:
        while doomed:
            name = doomed.pop()
            if alive.pop(name, None) is not None:
                carry_out(manager.exited(name, -signal.SIGKILL, now))

    carry_out(manager.start(now))
    for kind, which, wait in events:
        now += wait
        name = manager.names()[which % len(manager.names())]
        if kind == "signal":
            carry_out(manager.signalled(signal.SIGTERM, now))
        elif kind == "wait":
            carry_out(manager.tick(now))
        elif kind == "replace":
            carry_out(manager.start_rolling_restart(now))
        elif name in alive:
            match kind:
                case "ready":
                    carry_out(manager.report(name, Ready(), now))
                case "progress":
                    carry_out(manager.report(name, Progress(text="x"), now))
                case "beat":
                    carry_out(manager.report(name, Heartbeat(), now))
                case "failed" | "fatal":
                    carry_out(manager.report(name, ProcessFailed(message="x", fatal=kind == "fatal"), now))
                case "hang up":
                    carry_out(manager.channel_closed(name, now))
                case "die":
                    del alive[name]
                    carry_out(manager.exited(name, 1, now))
        bury()
    carry_out(manager.signalled(signal.SIGTERM, now))
    bury()
    until = now + DRAIN_S + 2 * EXIT_GRACE_S
    while now < until and (deadline := manager.next_deadline()) is not None:
        now = max(now, deadline)
        carry_out(manager.tick(now))
        bury()
    assert manager.exit_code is not None
    assert not alive
