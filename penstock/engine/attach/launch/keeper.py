"""Run a program so that all of its processes end with the process that has started this one.

``python -m penstock.engine.attach.launch.keeper COMMAND…``. vLLM's command starts an engine process, and that
one workers; a signal to the first, or its death, does not reach the others. So this process stands between:
it adopts whatever loses its parent below it, and ends all of it when its standard input closes, as that of a
killed parent does. After the byte ``STOP`` the program may end by itself first.

Imports the standard library alone, and changes nothing that the program could see but its session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

STOP = b"s"
GRACE_S = 2.0
"""Seconds for the program to end by itself after STOP; the supervisor waits 5 s for an engine."""
KILL_S = 5.0
"""Seconds after which processes that survive SIGKILL, in a driver's hands, are left to the system."""
RETRY_S = 0.02
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class ProcessTree:
    """One program and its descendants."""

    def __init__(self, command: list[str]) -> None:
        """Start ``command`` in a session of its own. Raises OSError."""
        self._wakeup, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._theirs = theirs
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _do_nothing)  # no SIG_IGN, which the program would inherit
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.pid = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent
        ).pid
        self.exit_code: int | None = None
        """The program's; None while it runs."""

    def run(self) -> int:
        """Wait for the program, or for the end of standard input; end all processes; return the exit code."""
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.register(0, select.POLLIN)
        while self._reap() and self.exit_code is None:
            ready = {fd for fd, _ in poll.poll()}
            if self._wakeup.fileno() in ready:
                self._wakeup.recv(4096)
            if 0 in ready:
                if os.read(0, 1) == STOP:
                    self._ask_to_end()
                break
        self._kill_all()
        return self.exit_code or 0

    def _ask_to_end(self) -> None:
        """Send SIGTERM, and wait for the program."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while self._reap() and self.exit_code is None and time.monotonic() < deadline:
            time.sleep(RETRY_S)

    def _kill_all(self) -> None:
        """Kill the program's process group, and whatever else has become this process's child."""
        deadline = time.monotonic() + KILL_S
        while True:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            if not self._reap() or time.monotonic() > deadline:
                return
            time.sleep(RETRY_S)

    def _reap(self) -> bool:
        """Collect ended children. Returns whether there are others."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.pid:
                code = os.waitstatus_to_exitcode(status)
                self.exit_code = code if code >= 0 else 128 - code


def _children() -> list[int]:
    """Return the ids of this process's children; empty where the system does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _die_with_parent() -> None:
    """In the program, before it begins: end with the keeper, should that be killed itself."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _do_nothing(signum: int, frame: FrameType | None) -> None: ...


if __name__ == "__main__":
    sys.exit(ProcessTree(sys.argv[1:]).run())
