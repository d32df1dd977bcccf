"""One running child: the process and the supervisor's end of its control channel."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from penstock.exit_codes import StartupError
from penstock.supervisor.signals import signals_blocked
from penstock.wire.channel import ChildChannel
from penstock.wire.control import AnyLaunch, ControlError

_STDERR = 2
MAX_REPORTS_PER_S = 1000
"""Reports of one child that are read within a second; later ones wait in its own outbox."""


class Process(Protocol):
    """A process of this one; subprocess.Popen is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class ForkedProcess:
    """A child of this process that another one has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """As subprocess gives it."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the end; the exit code."""
        code = self._reap(0)
        assert code is not None
        return code

    def kill(self) -> None:
        """Send SIGKILL; nothing when the process has exited."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self._returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode


Fork = Callable[[Sequence[int]], ForkedProcess]
"""Forks a child with these descriptors, of which the first is its control channel. May raise OSError."""


class ChildProcess:
    """A child process from its start to its exit."""

    def __init__(self, process: Process, channel: ChildChannel, on_end: Callable[[], None]) -> None:
        self._process = process
        self.channel = channel
        self._on_end = on_end
        self.listening = True
        """Whether its reports are still of use: False once its channel has ended or carried nonsense."""
        self._second = 0.0
        self._reports = 0
        """Reports read since ``_second``."""

    @classmethod
    def start(
        cls,
        launch: AnyLaunch,
        command: Sequence[str] | Fork,
        on_end: Callable[[], None] = lambda: None,
        *,
        environ: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> ChildProcess:
        """Start ``command`` with the descriptor of its control channel as last argument, and send
        ``launch``. A :data:`Fork` in place of the command has no ``environ``.

        Must run in the main thread, see
        :func:`penstock.supervisor.children.parent_death.exit_with_supervisor`. The child inherits standard
        error, also as its standard output, nothing on standard input, and ``pass_fds``. ``on_end`` is called
        when it has exited; ``environ`` is its environment (default: this process's). Raises OSError when no
        process can be started, StartupError for options that take too much room.
        """
        channel, theirs = ChildChannel.pair()
        try:
            channel.send(launch)
        except ControlError as error:
            raise StartupError(f"the options are too long to be passed on: {error}") from None
        given = (theirs.fileno(), launch.listen_fd, launch.handover_fd, *pass_fds)
        inherited = [fd for fd in given if fd is not None]
        try:
            with signals_blocked(), theirs:
                process: Process
                if callable(command):
                    process = command(inherited)
                else:
                    process = subprocess.Popen(
                        [*command, str(theirs.fileno())],
                        pass_fds=inherited,
                        stdin=subprocess.DEVNULL,
                        stdout=_STDERR,
                        env=environ,
                    )
        except BaseException:
            channel.close()
            raise
        return cls(process, channel, on_end)

    def count_reports(self, count: int, now: float) -> None:
        """So many reports were read."""
        if now >= self._second + 1.0:
            self._second, self._reports = now, 0
        self._reports += count

    def paused_until(self, now: float) -> float | None:
        """When reports are read again, after too many of them; None: now."""
        until = self._second + 1.0
        return until if self._reports > MAX_REPORTS_PER_S and now < until else None

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Reap the process and return its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL; nothing when the process has exited."""
        self._process.kill()

    def close(self) -> None:
        """Reap a killed process and close the channel."""
        self._process.wait()
        self.channel.close()
        self._on_end()
