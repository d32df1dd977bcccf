"""The host's store of sealed pages: one directory, which all processes of a server share.

A picture's pages are one file, named by its key and never changed. Whoever needs it holds a *lease*: a shared
lock of the kernel's, which ends with its process however that ends. Files that nobody holds are removed when
room is needed, those that were not used for the longest time first. There is no process that owns the store:
what must be seen as one step happens under the lock of ``account``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

from numpy.typing import NDArray

from penstock.media.pages import PageFacts, Pages, sealed, unsealed

MAX_FILES = 4096
"""Pictures of a store, so that a look at all of them takes milliseconds."""
MAX_ATTEMPTS = 2
"""Attempts to prepare a picture that ended their workers, after which it is refused."""
MAX_COUNTED = 1024
"""Pictures whose attempts are counted."""
FLIGHTS = 256
"""Files whose locks are taken to write a key: keys that share one wait for each other."""
_UNFINISHED = "new-"
_DESCRIPTION = "description"
_OTHERS = frozenset({"account", _DESCRIPTION})
"""Files that are no pages."""
_ACCOUNT = struct.Struct("<QQB")
"""Bytes, files, and whether these are right: a process that is killed while it changes them leaves 0."""


class StoreFull(Exception):
    """There is no room: what is in the store is in use, or the picture is larger than the store."""


class Lease:
    """A picture's pages, which stay in the store until this is closed or its process ends.

    Arrays of :meth:`pages` stay valid after that.
    """

    def __init__(self, key: bytes, fd: int) -> None:
        """``fd``: of the sealed file, with a shared lock; it is closed with the lease."""
        self.key = key
        self._fd = fd
        self.size = os.fstat(fd).st_size
        """Bytes of the file."""

    def fileno(self) -> int:
        """The descriptor of the file."""
        return self._fd

    def view(self) -> memoryview:
        """The whole file, mapped read-only."""
        return memoryview(mmap.mmap(self._fd, self.size, prot=mmap.PROT_READ))

    def pages(self) -> Pages:
        """The file's arrays, mapped read-only. Raises ValueError for a file that holds none."""
        return unsealed(self.view())

    def close(self) -> None:
        """End the lease. Once is enough; more do no harm."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            _touch(fd)
            fcntl.flock(fd, fcntl.LOCK_UN)  # a map has a copy of the descriptor
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class MediaStore:
    """The store in ``directory``, as one process sees it. ``capacity``: bytes of all sealed files.

    Calls may come from any thread. They wait for each other over all processes, but for no picture's bytes.
    """

    def __init__(self, directory: str, capacity: int) -> None:
        """Raises OSError for a directory that is not there, or not this user's."""
        self.directory = directory
        self.capacity = capacity
        for each in ("locks", "attempts"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(f"{directory}/{each}", 0o700)
        self._account = os.open(f"{directory}/account", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Let go of the directory. Leases go on."""
        os.close(self._account)

    # -- what workers tell all API servers

    def describe(self, description: bytes) -> None:
        """Keep how the processor puts pictures into prompts: API servers that start later need no worker."""
        fd, name = tempfile.mkstemp(dir=f"{self.directory}/locks")
        with open(fd, "wb") as file:
            file.write(description)
        os.rename(name, f"{self.directory}/{_DESCRIPTION}")

    def description(self) -> bytes | None:
        """The latest one; None: no worker has been ready."""
        try:
            with open(f"{self.directory}/{_DESCRIPTION}", "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    # -- reading

    def lease(self, key: bytes) -> Lease | None:
        """A lease of the picture's pages; None if the store has none. Waits for nobody."""
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.fstat(fd).st_nlink:
                raise BlockingIOError
        except BlockingIOError:  # it is being removed
            os.close(fd)
            return None
        lease = Lease(key, fd)
        _touch(fd)
        return lease

    def used_bytes(self) -> int:
        """Bytes of all files, those that are being written included."""
        with self._locked():
            return self._state()[0]

    # -- writing

    def write(self, key: bytes, facts: PageFacts, arrays: Mapping[str, NDArray[Any]]) -> Lease:
        """Seal a picture's pages; those that are there already stay. Raises StoreFull, and KeyError for a
        dtype that pages do not have."""
        return self.put(key, sealed(facts, arrays))

    def put(self, key: bytes, pieces: list[bytes | memoryview]) -> Lease:
        """As :meth:`write`, with the pieces of the file."""
        size = sum(map(len, pieces))
        fd, name = self._reserve(size)
        try:
            with open(fd, "wb", buffering=0, closefd=False) as file:
                for piece in pieces:
                    rest = memoryview(piece)
                    while rest:
                        rest = rest[file.write(rest) :]
            os.fchmod(fd, 0o400)
            with self._locked():
                if (there := self.lease(key)) is not None:
                    self._remove(name, size)
                    return there
                lease = Lease(key, os.open(name, os.O_RDONLY | os.O_CLOEXEC))
                # From here on the lock is a shared one; nobody takes another while the account is locked.
                fcntl.flock(fd, fcntl.LOCK_UN)
                fcntl.flock(lease.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
                os.rename(name, self._path(key))
                return lease
        except BaseException:
            with self._locked(), contextlib.suppress(FileNotFoundError):
                self._remove(name, size)
            raise
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def single_flight(self, key: bytes, *, wait: bool = True) -> Iterator[None]:
        """Be the only one, of all processes, that prepares this key. Waits until that is so; not with
        ``wait`` False, which raises BlockingIOError instead."""
        with self._only_one(f"{key[0] % FLIGHTS:02x}", wait=wait):
            yield

    @contextlib.contextmanager
    def last_room(self) -> Iterator[None]:
        """Be the only one, of all processes, that waits for room while it holds pages: two could wait for
        each other's. Raises BlockingIOError if there is another."""
        with self._only_one("room", wait=False):
            yield

    @contextlib.contextmanager
    def _only_one(self, name: str, *, wait: bool) -> Iterator[None]:
        path = f"{self.directory}/locks/{name}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(fd)

    # -- pictures that end workers

    def begin_attempt(self, key: bytes) -> bool:
        """Count an attempt to prepare a picture, as its only writer. False: earlier ones have ended
        :data:`MAX_ATTEMPTS` workers, and it is to be refused."""
        path = self._attempts(key)
        try:
            if os.stat(path).st_size >= MAX_ATTEMPTS:
                return False
        except FileNotFoundError:
            self._forget_attempts()
        with open(path, "ab", buffering=0) as file:
            # A hole: there may be no room for a byte.
            file.truncate(os.fstat(file.fileno()).st_size + 1)
        return True

    def end_attempt(self, key: bytes) -> None:
        """The worker is alive: the picture may be tried again."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._attempts(key))

    def _attempts(self, key: bytes) -> str:
        return f"{self.directory}/attempts/{key.hex()}"

    def _forget_attempts(self) -> None:
        """Make room for another picture's count."""
        with os.scandir(f"{self.directory}/attempts") as entries:
            there = [entry.path for entry in entries]
        if len(there) >= MAX_COUNTED:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(min(there, key=_changed_at))

    # -- room

    def _path(self, key: bytes) -> str:
        return f"{self.directory}/{key.hex()}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only one who changes the account and adds or removes files."""
        fd = os.open(f"{self.directory}/account", os.O_RDWR | os.O_CLOEXEC)  # a lock is of an opened file
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _state(self) -> tuple[int, int]:
        """Bytes and number of the files, under the lock."""
        data = os.pread(self._account, _ACCOUNT.size, 0)
        if len(data) == _ACCOUNT.size:
            used, files, right = _ACCOUNT.unpack(data)
            if right:
                return used, files
        files_there = self._files()
        used = sum(file.size for file in files_there)
        self._set_state(used, len(files_there))
        return used, len(files_there)

    def _set_state(self, used: int, files: int) -> None:
        os.pwrite(self._account, _ACCOUNT.pack(used, files, 1), 0)

    def _doubt(self) -> None:
        """The account is wrong until it is set."""
        os.pwrite(self._account, b"\0", _ACCOUNT.size - 1)

    def _files(self) -> list[_File]:
        found = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if entry.name not in _OTHERS and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    used_at = 0 if entry.name.startswith(_UNFINISHED) else status.st_mtime_ns
                    found.append(_File(used_at, entry.path, status.st_size))
        return found

    def _reserve(self, size: int) -> tuple[int, str]:
        """A file of ``size`` bytes, all of which the system has set aside, locked by this process; its
        descriptor and name. One without its lock is a killed process's, and goes first."""
        with self._locked():
            used, files = self._state()
            self._doubt()
            if used + size > self.capacity or files >= MAX_FILES:
                used, files = self._evict(size)
            fd, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=self.directory)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                try:
                    _set_size(fd, size)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    used, files = self._evict(self.capacity, but=name)  # the file system is smaller
                    _set_size(fd, size)
            except OSError as error:
                os.unlink(name)
                os.close(fd)
                if error.errno == errno.ENOSPC:
                    raise StoreFull(f"{self.directory} has no room for {size} bytes") from None
                raise
            self._set_state(used + size, files + 1)
            return fd, name

    def _evict(self, size: int, but: str = "") -> tuple[int, int]:
        """Remove what nobody holds until ``size`` more bytes fit, and a few more, so that the next picture
        needs no such look; returns the bytes and number of the files left. Raises StoreFull, unless
        ``but``, a file that stays and does not count, is given."""
        there = sorted(file for file in self._files() if file.path != but)
        used, files = sum(file.size for file in there), len(there)
        spare = self.capacity // 32
        for file in there:
            if used + size + spare <= self.capacity and files < MAX_FILES * 31 // 32:
                break
            if _remove_unheld(file.path):
                used, files = used - file.size, files - 1
        if not but and (used + size > self.capacity or files >= MAX_FILES):
            self._set_state(used, files)
            raise StoreFull(f"{size} bytes do not fit: {used} of {self.capacity} are in use")
        return used, files

    def _remove(self, name: str, size: int) -> None:
        """Remove an own file, under the lock."""
        used, files = self._state()
        self._doubt()
        os.unlink(name)
        self._set_state(used - size, files - 1)


class _File(NamedTuple):
    """Sorted, the next to be removed comes first."""

    used_at: int
    """Nanoseconds; 0: it is being written, or its writer was killed."""
    path: str
    size: int


def _set_size(fd: int, size: int) -> None:
    """Have the system set the bytes aside, so that none is missing when they are written."""
    if hasattr(os, "posix_fallocate") and size:
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)


def _touch(fd: int) -> None:
    """The file is used now: the kernel's own times are too coarse to order by."""
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def _changed_at(path: str) -> float:
    try:
        return os.stat(path)[stat.ST_MTIME]
    except FileNotFoundError:
        return 0.0


def _remove_unheld(path: str) -> bool:
    """Remove a file unless somebody holds a lock of it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
