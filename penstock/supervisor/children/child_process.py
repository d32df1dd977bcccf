"""One running child: the process and the supervisor's end of its control channel."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Sequence

from penstock.supervisor.signals import termination_signals_blocked
from penstock.wire.channel import ChildChannel, ChildGone
from penstock.wire.control import Launch

_STDERR = 2


class ChildProcess:
    """A child process from its start to its exit."""

    def __init__(
        self, popen: subprocess.Popen[bytes], channel: ChildChannel, on_end: Callable[[], None]
    ) -> None:
        self._popen = popen
        self.channel = channel
        self._on_end = on_end

    @classmethod
    def start(
        cls, launch: Launch, command: Sequence[str], on_end: Callable[[], None] = lambda: None
    ) -> ChildProcess:
        """Starts ``command`` with the descriptor of its control channel as last argument, and sends
        ``launch``.

        Must run in the main thread, see
        :func:`penstock.supervisor.children.parent_death.exit_with_supervisor`. The child inherits standard
        error, also as its standard output, and nothing on standard input. ``on_end`` is called when it has
        exited. Raises OSError when no process can be started.
        """
        channel, theirs = ChildChannel.pair()
        inherited = [fd for fd in (theirs.fileno(), launch.listen_fd, launch.handover_fd) if fd is not None]
        try:
            with termination_signals_blocked(), theirs:
                popen = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    stdout=_STDERR,
                )
        except OSError:
            channel.close()
            raise
        with contextlib.suppress(ChildGone):  # it has exited already; its exit code says why
            channel.send(launch)
        return cls(popen, channel, on_end)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        """Reaps the process and returns its exit code, negative for a signal; None while it runs."""
        return self._popen.poll()

    def kill(self) -> None:
        """Sends SIGKILL; nothing when the process has exited."""
        self._popen.kill()

    def close(self) -> None:
        """Reaps a killed process and closes the channel."""
        self._popen.wait()
        self.channel.close()
        self._on_end()
