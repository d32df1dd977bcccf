"""Real ``penstock`` processes, forked from one that has imported what they need, which takes them longest."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from setproctitle import setproctitle

from penstock.cli.main import main
from penstock.coordinator import metrics_rounds
from penstock.dispatch.metrics_queries import MetricsQueries

IMPORTED = (
    "penstock.cli.serve",
    "penstock.supervisor.main",
    "penstock.api.process",
    "penstock.engine.loop.process",
    "penstock.engine.synthetic.engine",
    "penstock.coordinator.process",
    "penstock.cli.gateway",
    "penstock.gateway.supervisor",
    "penstock.gateway.process",
)
"""What the commands and their children import before they are ready."""

LATE_S = 2.0
"""Seconds for which a scrape waits for a process: none is left out of it because the machine is busy, and
counts of one scrape can be compared with those of the next."""

SEED = {"PYTHONHASHSEED": "1"}
"""Workers of a gateway are forks, too, where it need not tell them how to hash."""
COMMAND = (sys.executable, "-m", "penstock.cli.main")


class Process:
    """A ``penstock`` process, with what tests use of ``subprocess.Popen``."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """In a session of its own. ``stdout`` is what it writes to standard output and error."""
        self.args = arguments
        message = json.dumps([os.getcwd(), os.environ | SEED, arguments]).encode()
        self._end, theirs = socket.socketpair()
        read, write = os.pipe()
        with theirs, os.fdopen(write, "wb"):
            socket.send_fds(_launcher(), [message], [theirs.fileno(), write])
        self.pid = int(self._end.recv(8))
        self.stdout = os.fdopen(read, encoding="utf-8")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("penstock", timeout or 0.0)
            self.returncode = int(self._end.recv(8))
            self._end.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which is not yet told
                os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    *arguments: str, command: Sequence[str] = COMMAND, **options: Any
) -> Process | subprocess.Popen[str]:
    """``penstock`` with ``arguments``; forked unless there is another ``command`` or are options of Popen."""
    if tuple(command) == COMMAND and not options:
        return Process(arguments)
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, *arguments], start_new_session=True, **pipes, **options)


@functools.cache
def _launcher() -> socket.socket:
    """The connection to the process that forks, which ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | SEED | {"OPENBLAS_NUM_THREADS": "1"},  # numpy's threads would not survive a fork
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's signals are for the tests
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _serve(requests: socket.socket) -> list[str]:
    """Fork for each request; returns in the new process, with its arguments. Nothing is left to do when the
    other end is closed."""
    while True:
        message, fds, _, _ = socket.recv_fds(requests, 1 << 20, 2)
        if not message:
            return []
        if os.fork() == 0:  # the parent of the process, which tells its number and its end
            end, output = fds
            if (pid := os.fork()) == 0:
                os.setsid()
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.closerange(3, max(requests.fileno(), *fds) + 1)
                directory, environ, arguments = json.loads(message)
                os.chdir(directory)
                os.environ.clear()
                os.environ.update(environ)
                return list(arguments)
            os.close(output)
            os.write(end, b"%8d" % pid)
            _end_with_tests(pid, end)
            with contextlib.suppress(BrokenPipeError):
                os.write(end, b"%8d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _end_with_tests(pid: int, end: int) -> None:
    """Wait for the end of a process; it is killed if that of the tests comes first, however they end."""
    if hasattr(os, "pidfd_open"):
        ended = os.pidfd_open(pid)
        if ended not in select.select([ended, end], [], [])[0]:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    setproctitle("penstock launcher")  # it finds its place before the environment is replaced
    for name in IMPORTED:
        importlib.import_module(name)
    metrics_rounds.ROUND_TIMEOUT_S = LATE_S
    MetricsQueries.__init__.__defaults__ = (LATE_S,)
    if given := _serve(socket.socket(fileno=int(sys.argv[1]))):
        sys.argv = ["penstock", *given]
        sys.exit(main())
