"""How many connections the limit of open files leaves room for."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

from penstock.config.errors import ConfigError

RESERVED = 12
"""Descriptors that connections leave free, for links to restarted engines and for files."""


def connection_room(per_connection: int = 1) -> int:
    """The connections for which this process has descriptors left. Raises ConfigError if there are none.

    ``per_connection``: descriptors that a connection takes; 2 in a process that opens another one for each.
    """
    left = descriptors_left() - RESERVED
    if left < per_connection:
        limit = descriptor_limit()
        raise ConfigError(
            f"the limit of {limit} open files leaves no room for connections; "
            f"{limit - left + per_connection} at least are needed (ulimit -n)"
        )
    return left // per_connection


def descriptors_left() -> int:
    """Descriptors that this process may still open."""
    return descriptor_limit() - _open_now()


def descriptor_limit() -> int:
    """Descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _open_now() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return 0
