"""Reserves a port on one machine of a cluster for the API servers of one supervisor."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from penstock.exit_codes import StartupError


@contextlib.contextmanager
def claim_port(address: str, port: int, incarnation: int) -> Iterator[None]:
    """Reserve a port that API servers of one supervisor share (SO_REUSEPORT), until the end of the block.

    The kernel would let any process of this user share it. ``incarnation`` is the supervisor's. Raises
    StartupError when another supervisor's API servers have the port, OSError.
    """
    path = Path(tempfile.gettempdir(), f"penstock-port-{os.geteuid()}-{address}-{port}")
    mark = b"%016x" % incarnation
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(fd, mark, 0)
        fcntl.flock(fd, fcntl.LOCK_SH)  # waits for a process that has just locked it and writes
        if os.pread(fd, len(mark), 0) != mark:
            raise StartupError(f"cannot listen on {address}, port {port}: API servers of another fleet do")
        yield
    finally:
        os.close(fd)
