"""Which API servers live: each holds a lock on a file of its own beside the database.

The kernel frees the lock of a process that dies, whatever ends it. Who gets the lock knows that the owner is
dead, and may end what it has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

_FOLDER = "owners"


class Owner:
    """This process's place among the owners, until :meth:`close`."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError."""
        self._folder = directory / _FOLDER
        self._folder.mkdir(mode=0o700, exist_ok=True)
        while True:
            self.id = secrets.token_hex(8)
            self._path = self._folder / self.id
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(self._fd).st_nlink:
                    return
            os.close(self._fd)  # another process took it for a dead one's before it was locked

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        os.close(self._fd)

    def others(self) -> list[str]:
        """Ids of other owners, living or dead."""
        return [name for name in os.listdir(self._folder) if name != self.id]

    @contextlib.contextmanager
    def burying(self, id: str) -> Iterator[bool]:
        """Whether another owner is dead; if it is, the block ends what it has left, and its file goes."""
        try:
            fd = os.open(self._folder / id, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            yield True
            return
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
            with contextlib.suppress(FileNotFoundError):
                (self._folder / id).unlink()
        finally:
            os.close(fd)
