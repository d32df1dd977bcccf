"""How many connections the limit of open files leaves room for.

Without a descriptor for a connection, the system resets it and says nothing to anybody; a server that knows
its room answers with 503 and logs it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
from dataclasses import replace

from penstock.http.connection_settings import Limits

log = logging.getLogger(__name__)

RESERVED = 12
"""Descriptors that are left for everything but connections: connections to be refused, files, sockets."""
FEW = 1024
"""Connections below which the log says at every start how many there may be."""


def limit_to_descriptors(limits: Limits, *, per_connection: int = 1) -> Limits:
    """``limits`` with as many connections as there is room for beside what is open now, and at least one.

    The log has a warning if another number than the default was asked for. ``per_connection``: descriptors
    that a connection takes; 2 in a process that opens another one for each.
    """
    room = (descriptors_left() - RESERVED) // per_connection
    if room >= limits.max_connections:
        return limits
    room = max(1, room)
    asked = limits.max_connections != Limits().max_connections
    log.log(
        logging.WARNING if asked else logging.INFO if room < FEW else logging.DEBUG,
        "%sthe limit of %d open files (ulimit -n) leaves room for %d connections; further ones get 503",
        f"--max-connections {limits.max_connections}: " if asked else "",
        descriptor_limit(),
        room,
    )
    return replace(limits, max_connections=room, max_lingering=min(limits.max_lingering, RESERVED // 3))


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
