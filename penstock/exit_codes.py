"""Exit codes, of ``penstock serve`` and of its children, and the errors that lead to them."""

from __future__ import annotations

import signal

EXIT_OK = 0
"""Ended by a signal, with the running streams finished or given their time to."""
EXIT_FAILED = 1
"""Did not start, or gave up on a process that keeps failing."""
EXIT_USAGE = 2
"""Options that cannot be run: raised as penstock.config.errors.ConfigError."""
EXIT_FATAL = 3
"""A child's: it would fail the same way again, so it is not restarted."""
EXIT_ORPHANED = 4
"""A child's: its supervisor is gone."""


class StartupError(Exception):
    """``penstock serve`` cannot start here, whatever its options. The message is for the operator."""


def exit_code_of(signum: int) -> int:
    """The shell's convention for a process that a signal ended."""
    return 128 + signum


def describe_exit(returncode: int, *, killed: bool = False) -> str:
    """``returncode`` as subprocess gives it, negative for a signal, in words. ``killed``: by us."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (out of memory?)" if -returncode == signal.SIGKILL and not killed else ""
    return f"was killed by {name}{hint}"
