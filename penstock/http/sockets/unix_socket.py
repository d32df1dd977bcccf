"""The Unix socket of ``--uds``: a stale one is replaced at the start, and it is removed at the end."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from penstock.config.errors import ConfigError
from penstock.exit_codes import StartupError

MAX_PATH_BYTES = 107
"""Maximum bytes of a socket's path: sun_path has 108 on Linux with its final zero, see unix(7)."""


@contextlib.contextmanager
def unix_socket(path: str, mode: int) -> Iterator[socket.socket]:
    """A socket bound to ``path`` with the permissions ``mode``; it does not listen yet.

    The path is removed at the end, unless another server has bound it meanwhile. Raises ConfigError for a
    path that cannot be a socket, StartupError for one that cannot be bound.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"--uds {path}: the path is longer than the {MAX_PATH_BYTES} bytes a socket's may have"
        )
    _remove_stale_socket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.bind(path)
            os.chmod(path, mode)
            own = _identity(path)
        except OSError as error:
            raise StartupError(f"cannot listen on {path}: {os.strerror(error.errno or 0)}") from error
        try:
            yield sock
        finally:
            with contextlib.suppress(OSError):  # it was removed already
                if _identity(path) == own:
                    os.unlink(path)


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _remove_stale_socket(path: str) -> None:
    """Remove a socket that refuses connections: its server was killed and could not clean up."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # no file; bind() reports a directory that does not exist
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--uds {path}: there is a file that is no socket, and it is left as it is")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # the backlog of a running server is full
        except OSError as error:
            raise StartupError(f"cannot listen on {path}: {os.strerror(error.errno or 0)}") from error
    raise StartupError(
        f"cannot listen on {path}: another server does; end it or choose another path with --uds"
    )
