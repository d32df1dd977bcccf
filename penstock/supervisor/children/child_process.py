"""One running child: the process and the supervisor's end of its control channel."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Sequence

from penstock.wire.channel import ChildChannel, ChildGone
from penstock.wire.control import Launch

_BLOCKED_AT_START = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STDERR = 2


class ChildProcess:
    """A child from its start to its death."""

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
        """Starts ``command`` with the descriptor of its control channel as last argument, and launches it.

        Must run in the main thread, see
        :func:`penstock.supervisor.children.parent_death.exit_with_supervisor`. The child inherits standard
        error, also as its standard output, and nothing on standard input. ``on_end`` is called when it has
        ended. Raises OSError when no process can be started.
        """
        channel, theirs = ChildChannel.pair()
        shared = [fd for fd in (theirs.fileno(), launch.listen_fd, launch.handover_fd) if fd is not None]
        # The child starts with these blocked and sets its handlers first; ours stay pending meanwhile.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_AT_START)
        try:
            with theirs:
                popen = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=shared,
                    stdin=subprocess.DEVNULL,
                    stdout=_STDERR,
                )
        except OSError:
            channel.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with contextlib.suppress(ChildGone):  # dead already; its exit code says why
            channel.send(launch)
        return cls(popen, channel, on_end)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it lives. Reaps the process."""
        return self._popen.poll()

    def kill(self) -> None:
        """SIGKILL. Harmless when the process is dead."""
        self._popen.kill()

    def close(self) -> None:
        """Reaps a killed process and closes the channel."""
        self._popen.wait()
        self.channel.close()
        self._on_end()
