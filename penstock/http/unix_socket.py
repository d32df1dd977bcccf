"""A Unix socket by its name in the file system: taken over from a server that died, removed at the end."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from penstock.config.errors import ConfigError
from penstock.exit_codes import StartupError

LONGEST_PATH = 107
"""Bytes of a socket's path: sun_path has 108 on Linux with its zero, see unix(7)."""


@contextlib.contextmanager
def unix_socket(path: str, mode: int) -> Iterator[socket.socket]:
    """A socket bound to ``path`` with the permissions ``mode``; it does not listen yet.

    Its name is removed at the end, unless another server has taken it meanwhile. Raises ConfigError when
    there can be no socket of that name, StartupError when it cannot be had.
    """
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ConfigError(
            f"--uds {path}: the path is longer than the {LONGEST_PATH} bytes a socket's may have"
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
            with contextlib.suppress(OSError):  # somebody removed it
                if _identity(path) == own:
                    os.unlink(path)


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _remove_stale_socket(path: str) -> None:
    """A socket that refuses connections was left by a server that could not clean up."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # there is nothing; where there can be nothing, bind() says so
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
            pass  # so many wait to be accepted that no more may
        except OSError as error:
            raise StartupError(f"cannot listen on {path}: {os.strerror(error.errno or 0)}") from error
    raise StartupError(
        f"cannot listen on {path}: another server does; end it or choose another path with --uds"
    )
