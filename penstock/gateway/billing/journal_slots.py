"""Files of slots in which a worker notes its requests before their lines are in the billing file.

A worker maps a file and writes to it as to memory, so what it has noted outlives it, also where it is killed.
A request takes a slot, which has two texts: the line that it has if its worker is lost, and the one that it
has when it has ended. The state says which one counts; it changes after the text is written. Whoever writes
the billing file frees a slot when its line is there, and nobody else does.

The worker holds a lock on the file while it lives.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import uuid
from typing import NamedTuple
from zlib import crc32

import numpy as np

SLOTS = 1024
TEXT = 2048
"""Bytes of a text with its length and its checksum."""
MAX_LINE = TEXT - 6
FREE, BEGUN, ENDED = range(3)
SUFFIX = ".slots"
_MAGIC = b"penstock billing journal 1\n"
_STATES = mmap.ALLOCATIONGRANULARITY
"""Where the states begin, one byte each."""
_TEXTS = _STATES + mmap.ALLOCATIONGRANULARITY
_SIZE = _TEXTS + SLOTS * 2 * TEXT
_HEAD = struct.Struct("<HI")


class Line(NamedTuple):
    """A line that is due."""

    slot: int
    text: bytes
    lost: bool
    """Its worker ended before the request did."""


class JournalSlots:
    """One file. ``file`` is its descriptor, which is open while this object is used."""

    def __init__(self, path: str, file: int) -> None:
        """Raises OSError, and ValueError if it is no such file."""
        self.path = path
        self.file = file
        if os.fstat(file).st_size != _SIZE or os.pread(file, len(_MAGIC), 0) != _MAGIC:
            raise ValueError("it is no billing journal of this version")
        self._map = mmap.mmap(file, _SIZE)
        self.states = np.frombuffer(self._map, np.uint8, SLOTS, _STATES)

    @classmethod
    def create(cls, folder: str) -> JournalSlots:
        """A file in ``folder`` that is this process's. Raises OSError."""
        name = os.path.join(folder, uuid.uuid4().hex)
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(file, _MAGIC)
            _fill(file)  # not to run out of room later, which would be a signal
            fcntl.flock(file, fcntl.LOCK_EX)
            os.rename(name, name + SUFFIX)
            return cls(name + SUFFIX, file)
        except BaseException:
            os.close(file)
            os.unlink(name)
            raise

    @classmethod
    def open(cls, path: str) -> JournalSlots:
        """Raises OSError, ValueError."""
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            return cls(path, file)
        except BaseException:
            os.close(file)
            raise

    def close(self) -> None:
        """Give up the file; the lock ends."""
        del self.states
        self._map.close()  # it has the descriptor, too
        os.close(self.file)

    def is_orphaned(self) -> bool:
        """Whether the worker has ended. If so, the file is this process's from here on."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    # -- of the worker

    def begin(self, slot: int, line: bytes) -> None:
        """Take a free slot; ``line`` is due if the worker is lost."""
        self._write(slot, 0, line)
        self.states[slot] = BEGUN

    def update(self, slot: int, line: bytes) -> None:
        """``line``, of the same request, is due if the worker is lost."""
        self._write(slot, 1, line)

    def end(self, slot: int, line: bytes) -> None:
        """``line`` is due."""
        self._write(slot, 1, line)
        self.states[slot] = ENDED

    def _write(self, slot: int, text: int, line: bytes) -> None:
        at = _TEXTS + (2 * slot + text) * TEXT
        self._map[at : at + _HEAD.size + len(line)] = _HEAD.pack(len(line), crc32(line)) + line

    # -- of the writer of the billing file

    def due(self, *, orphaned: bool) -> list[Line]:
        """Lines that are due; of an orphaned file also those of requests that had not ended. A text that is
        not whole yet, as its state was seen first, is due later."""
        states = self.states.copy()
        found = [
            Line(slot, self._read(slot, 1), lost=False) for slot in np.flatnonzero(states == ENDED).tolist()
        ]
        if orphaned:
            found += [
                Line(slot, self._lost(slot), lost=True) for slot in np.flatnonzero(states == BEGUN).tolist()
            ]
        return [line for line in found if line.text]

    def free(self, slot: int) -> None:
        self.states[slot] = FREE

    def _lost(self, slot: int) -> bytes:
        """The line of a request whose worker is lost: the later one, if it is whole and of this request."""
        begun, updated = self._read(slot, 0), self._read(slot, 1)
        return updated if updated.partition(b",")[0] == begun.partition(b",")[0] else begun

    def _read(self, slot: int, text: int) -> bytes:
        """Empty: it is not whole."""
        at = _TEXTS + (2 * slot + text) * TEXT
        size, checksum = _HEAD.unpack_from(self._map, at)
        line = self._map[at + _HEAD.size : at + _HEAD.size + min(size, MAX_LINE)]
        return line if crc32(line) == checksum else b""


def _fill(file: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, _SIZE)
    else:
        os.pwrite(file, bytes(_SIZE - len(_MAGIC)), len(_MAGIC))
