"""A program and all that it starts end with the process that has started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from penstock.engine.attach.launch.keeper import STOP
from penstock.module_command import module_command

WAIT_S = 20.0
SLEEPS = "import time; time.sleep(100)"
TREE = f"""
import subprocess, sys, time
sleeper = [sys.executable, "-c", {SLEEPS!r}]
children = [subprocess.Popen(sleeper), subprocess.Popen(sleeper, start_new_session=True)]
print(*(child.pid for child in children), flush=True)
time.sleep(100)
"""
"""One child in the program's session, and one in its own."""


def keep(code: str) -> subprocess.Popen[bytes]:
    command = [*module_command("penstock.engine.attach.launch.keeper"), sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tree() -> tuple[subprocess.Popen[bytes], list[int]]:
    """A keeper, and the program's children."""
    keeper = keep(TREE)
    assert keeper.stdout is not None
    return keeper, [int(pid) for pid in keeper.stdout.readline().split()]


def close(keeper: subprocess.Popen[bytes]) -> None:
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    keeper.stdin.close()
    keeper.stdout.close()


def test_all_end_when_its_parent_is_gone() -> None:
    keeper, pids = tree()
    close(keeper)
    keeper.wait(WAIT_S)
    assert not any(map(alive, pids))


def test_all_end_when_the_program_does() -> None:
    keeper, pids = tree()
    [program] = psutil.Process(keeper.pid).children()
    program.kill()
    assert keeper.wait(WAIT_S) == 128 + signal.SIGKILL
    assert not any(map(alive, pids))
    close(keeper)


def test_the_program_may_end_by_itself_first() -> None:
    code = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    keeper = keep(f"{code}print('ready', flush=True)\ntime.sleep(100)")
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == b"ready\n"
    keeper.stdin.write(STOP)
    keeper.stdin.flush()
    assert keeper.wait(WAIT_S) == 7
    close(keeper)


def test_one_that_does_not_end_by_itself_is_killed() -> None:
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    keeper = keep(f"{code}print('ready', flush=True)\ntime.sleep(100)")
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == b"ready\n"
    keeper.stdin.write(STOP)
    keeper.stdin.flush()
    assert keeper.wait(WAIT_S) == 128 + signal.SIGKILL
    close(keeper)


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_the_programs(code: int) -> None:
    keeper = keep(f"raise SystemExit({code})")
    assert keeper.wait(WAIT_S) == code
    close(keeper)


def test_signals_of_a_terminal_are_the_servers_alone() -> None:
    """The keeper stays; a program does not inherit that it ignores them."""
    keeper, pids = tree()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(keeper.pid, number)
    assert keeper.poll() is None
    [program] = psutil.Process(keeper.pid).children()
    program.terminate()
    assert keeper.wait(WAIT_S) == 128 + signal.SIGTERM
    assert not any(map(alive, pids))
    close(keeper)
