"""Exit codes of ``penstock serve`` and its children, and how errors and exits are described."""

from __future__ import annotations

import errno
import signal

EXIT_OK = 0
"""Ended by a signal, after running streams had finished or --drain-timeout had passed."""
EXIT_FAILED = 1
"""Did not start, or gave up on a process that kept failing."""
EXIT_USAGE = 2
"""Wrong options: raised as penstock.config.errors.ConfigError."""
EXIT_FATAL = 3
"""A child would fail the same way again, so it is not restarted."""
EXIT_ORPHANED = 4
"""A child's supervisor has ended."""


_EXHAUSTED = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


def is_exhausted(number: int | None) -> bool:
    """Whether an error number says that the machine is out of disk space, descriptors or memory."""
    return number in _EXHAUSTED


class StartupError(Exception):
    """The server cannot start on this machine, though its options are valid. The message is for the
    operator."""


def exit_code_of(signum: int) -> int:
    """The shell's exit code for a process that a signal ended."""
    return 128 + signum


def describe_exit(returncode: int, *, killed: bool = False) -> str:
    """Describe ``returncode``, which is negative for a signal, as subprocess gives it. ``killed``: by us."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (out of memory?)" if -returncode == signal.SIGKILL and not killed else ""
    return f"was killed by {name}{hint}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty, or the error's type."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
