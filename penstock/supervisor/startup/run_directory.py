"""The run directory: holds the sockets between processes, private to this user."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from penstock.config.errors import ConfigError
from penstock.exit_codes import StartupError
from penstock.metrics.board_file import BOARD_FILE_PREFIX
from penstock.wire.sockets import RENDEZVOUS_PREFIX

MAX_PATH_BYTES = 70
"""Longest path of a run directory: the path of a Unix socket has at most 103 bytes on macOS (107 on Linux),
and socket names take up to 32 of them."""
PID_FILE = "penstock.pid"
"""Holds the supervisor's process id; the supervisor locks it while it runs."""
_PREFIX = "penstock-"
"""Name prefix of temporary run directories."""


class RunDirectory:
    """A directory of mode 0700 that this process holds until the ``with`` block ends.

    Without ``path`` it is temporary: removed at the end, and those that killed instances left behind are
    removed at the start. With ``path`` the directory stays, and only its sockets and rendezvous files are
    removed: those of a killed instance at the start, our own at the end.
    """

    def __init__(
        self, path: str | None, parents: Sequence[str] = (), max_path_bytes: int = MAX_PATH_BYTES
    ) -> None:
        """``parents``: where a temporary one is made if possible. ``max_path_bytes``: of a temporary one."""
        self._max_path_bytes = max_path_bytes
        self._given = path
        self._parents = parents
        self._lock_fd: int | None = None
        self.path = ""

    def __enter__(self) -> Self:
        """Raises ConfigError for a path that cannot be used, StartupError when another instance uses it or
        the disk is full."""
        if self._given is None:
            self.path = _temporary((*self._parents, tempfile.gettempdir(), "/tmp"), self._max_path_bytes)
        else:
            self.path = _prepare(self._given)
        try:
            self._lock_fd = _lock(Path(self.path))
            _remove_sockets(self.path)
        except (StartupError, OSError) as error:
            self._release()
            if isinstance(error, OSError):
                raise StartupError(f"run directory {self.path}: {error.strerror}") from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._given is not None:
            with contextlib.suppress(OSError):
                _remove_sockets(self.path)
        self._release()

    def _release(self) -> None:
        if self._given is None:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock_fd, 0)
            os.close(self._lock_fd)
            self._lock_fd = None


def _temporary(parents: Sequence[str], max_path_bytes: int) -> str:
    for parent in parents:
        short = len(os.fsencode(parent)) + len(f"/{_PREFIX}12345678") <= max_path_bytes
        if short and os.access(parent, os.W_OK):
            try:
                _remove_abandoned(Path(parent))
                return tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            except OSError as error:
                raise StartupError(
                    f"no run directory can be made in {parent}: {error.strerror}; name one with --run-dir"
                ) from None
    raise StartupError("no temporary directory with a short path can be written to; name one with --run-dir")


def _remove_abandoned(parent: Path) -> None:
    """Remove temporary run directories of killed supervisors, which nobody locks any more.

    A directory without a process id is just being made, or not a run directory.
    """
    for path in parent.glob(f"{_PREFIX}????????"):
        with contextlib.suppress(OSError):  # another user's, in use (the lock), or removed meanwhile
            if path.stat().st_uid == os.geteuid() and (path / PID_FILE).read_text():
                with (path / PID_FILE).open("r") as held:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)


def _prepare(given: str) -> str:
    """Make the directory, or check that it can be a run directory."""
    path = Path(given).expanduser().absolute()
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"--run-dir {given}: the path has {len(os.fsencode(path))} bytes, at most {MAX_PATH_BYTES} are "
            "possible (Unix sockets have short names)"
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != os.geteuid():
            raise ConfigError(f"--run-dir {given}: belongs to another user (id {status.st_uid})")
        if not (path / PID_FILE).exists() and any(path.iterdir()):
            raise ConfigError(f"--run-dir {given}: holds other files; give an empty directory or a new name")
        path.chmod(0o700)
    except FileExistsError:
        raise ConfigError(f"--run-dir {given}: is no directory") from None
    except OSError as error:
        raise ConfigError(f"--run-dir {given}: {error.strerror}") from error
    return str(path)


def _lock(path: Path) -> int:
    """Lock the directory until the returned descriptor is closed."""
    fd = os.open(path / PID_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        raise StartupError(
            f"--run-dir {path}: in use by another penstock (process {holder}); "
            "end it or choose another directory"
        ) from None
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove_sockets(path: str) -> None:
    """Remove sockets, the rendezvous files by which ranks find each other, and kept metrics."""
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                is_socket = stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
                if is_socket or entry.name.startswith((RENDEZVOUS_PREFIX, BOARD_FILE_PREFIX)):
                    os.unlink(entry.path)
