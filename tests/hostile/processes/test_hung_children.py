"""Children that are stopped, hang, or do not read: the supervisor goes on, and ends when it is told."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress

import psutil
import pytest

from penstock.exit_codes import EXIT_OK
from tests.supervisor.harness import PATIENCE_S, Running, Serve


def stop(running: Running, title: str) -> psutil.Process:
    child = running.child(f"penstock: {title}")
    child.suspend()
    return child


def ends(running: Running) -> None:
    """At SIGTERM, and nothing is left."""
    children = running.children()
    running.process.send_signal(signal.SIGTERM)
    assert running.exit_code() == EXIT_OK
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert alive == []


@pytest.mark.parametrize("title", ["api-server 0", "coordinator 0"])
def test_one_that_is_stopped_is_killed_and_replaced(serve: Serve, title: str) -> None:
    running = serve(api_server_count=2, api_server_hang_timeout=1.5)
    running.until_ready()
    stopped = stop(running, title)
    running.until(rf"ERROR +supervisor +{title} was killed by SIGKILL: not heard of for 1.5 s")
    running.until(f"{title} is ready again")
    assert stopped.pid not in {child.pid for child in running.children()}


def test_a_channel_that_nobody_reads_does_not_stop_the_supervisor(serve: Serve) -> None:
    """More than its socket holds is sent to an API server that reads nothing, about drained engines."""
    running = serve(
        {"api-server": ["toggle", "mute"]}, api_server_count=2, api_server_hang_timeout=0, drain_timeout=0.1
    )
    running.until_ready()
    stopped = stop(running, "api-server 1")
    for _ in range(2):  # the first ones may have been before the stop
        running.until("api-server 0 +has toggled an engine 700 times more")
    running.child("penstock: engine 0").kill()
    running.until("engine 0 is ready again")
    stopped.resume()
    ends(running)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["starting", "serving"])
def test_with_every_child_stopped_it_still_ends(serve: Serve, phase: str) -> None:
    slow_start = {"engine": ["hang"]} if phase == "starting" else {}
    running = serve(slow_start, api_server_count=2, data_parallel_size=2, drain_timeout=0.5)
    if phase == "starting":
        running.until("engine 0: loading weights")
    else:
        running.until_ready()
    for child in running.children():
        child.suspend()
    ends(running)


@pytest.mark.slow
def test_nobody_is_killed_after_everything_was_stopped_for_longer_than_the_timeouts(serve: Serve) -> None:
    """As with Ctrl-Z, or a machine that is suspended."""
    running = serve(
        api_server_count=2, data_parallel_size=2, api_server_hang_timeout=1.5, engine_hang_timeout=1.5
    )
    running.until_ready()
    pids = {child.pid for child in running.children()}
    os.killpg(running.process.pid, signal.SIGSTOP)
    with suppress(psutil.TimeoutExpired):
        psutil.Process(running.process.pid).wait(timeout=6)
    os.killpg(running.process.pid, signal.SIGCONT)
    # As long as it would take to find silence.
    with suppress(psutil.TimeoutExpired):
        psutil.Process(running.process.pid).wait(timeout=3)
    same = {child.pid for child in running.children()} == pids
    ends(running)
    assert same, running.text
    ends(running)
    assert "not heard of" not in running.text


def test_a_child_that_never_reads_is_stopped_and_then_killed(serve: Serve) -> None:
    running = serve({"api-server": ["mute"]}, drain_timeout=0.1)
    running.until_ready()
    running.process.send_signal(signal.SIGTERM)
    running.until("streams still run")
    running.process.send_signal(signal.SIGTERM)  # kills what does not end
    assert running.exit_code() == 128 + signal.SIGTERM
    assert re.search("killing what has not ended", running.text)
