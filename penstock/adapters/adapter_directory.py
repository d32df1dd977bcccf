"""Reads files of an adapter's directory, which may be anything and may change at any time.

The directory is opened once; a file that is a symbolic link, a pipe or a device is refused, and one that
changes while it is read. Nothing is mapped: a mapped file that another process truncates ends this one by
SIGBUS.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from types import TracebackType

from penstock.adapters.errors import AdapterError

READ_BYTES = 1 << 22
"""Bytes of one read."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# A directory on the way need not be readable, such as one with mode 0711: O_PATH on Linux, O_SEARCH on macOS.
_ON_THE_WAY = getattr(os, "O_PATH", getattr(os, "O_SEARCH", os.O_RDONLY)) | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_REASONS = {
    errno.ENOENT: "it does not exist",
    errno.ENOTDIR: "it is not a directory, or a part of it is a symbolic link",
    # As in the cache of the Hugging Face hub.
    errno.ELOOP: "it is a symbolic link; it must be a regular file, such as hf download --local-dir writes",
    errno.EACCES: "this server may not read it",
    errno.ENXIO: "it is not a regular file",
}


class AdapterDirectory:
    """An open directory."""

    def __init__(self, path: str, *, follow_links: bool) -> None:
        """``follow_links``: whether parts of ``path``, which is absolute, may be symbolic links. Raises
        AdapterError."""
        if not os.path.isabs(path) or "\0" in path:
            raise AdapterError(f"{path!r}: it must be the absolute path of a directory")
        try:
            self._fd = os.open(path, _DIRECTORY) if follow_links else _open_without_links(path)
        except (OSError, ValueError) as error:
            raise AdapterError(f"{path}: {_reason(error)}") from None

    def __enter__(self) -> AdapterDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def __contains__(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    @contextmanager
    def open(self, name: str, max_bytes: int) -> Iterator[AdapterFile]:
        """Open the regular file ``name``. Raises AdapterError."""
        try:
            fd = os.open(name, _FILE, dir_fd=self._fd)
        except OSError as error:
            raise AdapterError(f"{name}: {_reason(error)}") from None
        try:
            yield AdapterFile(fd, name, max_bytes)
        except OSError as error:
            raise AdapterError(f"{name}: {_reason(error)}") from None
        finally:
            os.close(fd)


class AdapterFile:
    """An open file, which is read once, from its beginning to its end."""

    def __init__(self, fd: int, name: str, max_bytes: int) -> None:
        """Raises AdapterError."""
        self.name = name
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise AdapterError(f"{name}: it is not a regular file")
        self.size = status.st_size
        if self.size > max_bytes:
            raise AdapterError(f"{name}: it has {self.size} bytes; the maximum is {max_bytes}")
        self._fd = fd
        self._modified = status.st_mtime_ns

    def read(self, size: int) -> bytearray:
        """The next ``size`` bytes. Raises AdapterError when there are fewer, and OSError."""
        data = bytearray(size)
        self.read_into(memoryview(data))
        return data

    def read_into(self, data: memoryview) -> None:
        """Fill ``data`` with the next bytes. Raises AdapterError when there are fewer, and OSError."""
        done = 0
        while done < len(data):
            count = os.readv(self._fd, [data[done : done + READ_BYTES]])
            if count == 0:
                raise self._changed()
            done += count

    def check_end(self) -> None:
        """Raises AdapterError if there is more to read, or the file has changed since it was opened."""
        if os.read(self._fd, 1) or os.fstat(self._fd).st_mtime_ns != self._modified:
            raise self._changed()

    def _changed(self) -> AdapterError:
        return AdapterError(f"{self.name}: it has changed while it was read")


def _open_without_links(path: str) -> int:
    """Raises OSError: ENOTDIR for a part that is a symbolic link."""
    fd = os.open("/", _ON_THE_WAY)
    for part in PurePosixPath(path).parts[1:]:
        try:
            child = os.open(part, _ON_THE_WAY | os.O_NOFOLLOW, dir_fd=fd)
        finally:
            os.close(fd)
        fd = child
    return fd


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return _REASONS.get(error.errno or 0, str(error.strerror))
    return str(error)
