"""``--billing-file``: a line for each request, exactly once. A thread of the supervisor writes it.

It takes the lines from the journals of the workers, in the folder beside the file: those of ended requests,
and when a worker has ended those of its requests that had not. A line leaves its journal when it is on the
disk. So whichever process ends, and however, each request gets its line: from this gateway, or from the next
one with this file. What a gateway that was killed had written, but not taken out of the journal, is found by
its id at the file's end.

Of several gateways with one file one writes, for all of them, until it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from penstock.config.errors import ConfigError
from penstock.gateway.billing.journal_slots import MAX_LINE, SUFFIX, JournalSlots, Line
from penstock.logging_setup import RateLimitedLog

log = logging.getLogger(__name__)
_log_failure = RateLimitedLog(log, logging.ERROR)

INTERVAL_S = 0.2
MAX_BATCH = 256 << 10
"""Bytes that are written at once, and so the most that may be in the file and in journals at a time."""
_BEGIN = b'{"id":"'


def journal_folder(path: str) -> str:
    """Where workers have the journals of the billing file ``path``."""
    return f"{path}.journal"


class BillingFile:
    """The file's writer. Use it as a context: its thread runs meanwhile, and writes the rest at the end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder = journal_folder(path)
        self._file: int | None = None
        self._lock: int | None = None
        """The folder's lock; None: another gateway has it."""
        self._journals: dict[str, JournalSlots] = {}
        self._written: set[bytes] = set()
        """Ids of lines that the writer before this one may have written without having taken them out."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="billing", daemon=True)

    def __enter__(self) -> Self:
        """Raises ConfigError."""
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            self._open()
        except OSError as error:
            raise ConfigError(f"--billing-file {self._path}: {error.strerror}") from None
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._lock is not None:
            os.close(self._lock)

    def _run(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._try_write()
        self._try_write()

    def _try_write(self) -> None:
        try:
            if self._lock is not None or self._become_writer():
                self._write_due()
        except OSError as error:
            _log_failure(
                "write",
                "--billing-file %s cannot be written: %s; its lines wait in %s",
                self._path,
                error.strerror,
                self._folder,
            )

    def _become_writer(self) -> bool:
        lock = os.open(os.path.join(self._folder, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock = lock
        self._open()
        self._written = self._mend_end()
        return True

    # -- what is due

    def _write_due(self) -> None:
        for name in os.listdir(self._folder):
            if name.endswith(SUFFIX) and name not in self._journals:
                self._add_journal(name)
        for name, journal in list(self._journals.items()):
            orphaned = journal.is_orphaned()
            due = journal.due(orphaned=orphaned)
            while due:
                size, number = 0, 0
                while number < len(due) and size < MAX_BATCH:
                    size += len(due[number].text)
                    number += 1
                self._write_batch(journal, due[:number])
                due = due[number:]
            if orphaned:
                self._remove_journal(name, journal)
        self._written.clear()

    def _add_journal(self, name: str) -> None:
        path = os.path.join(self._folder, name)
        try:
            self._journals[name] = JournalSlots.open(path)
        except ValueError as error:
            _log_failure(name, "%s is left alone: %s", path, error)

    def _remove_journal(self, name: str, journal: JournalSlots) -> None:
        if left := int((journal.states != 0).sum()):
            log.error("%d lines of %s cannot be read and are lost", left, journal.path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(journal.path)
        journal.close()
        del self._journals[name]

    def _write_batch(self, journal: JournalSlots, batch: list[Line]) -> None:
        """Raises OSError: nothing is written then."""
        lines = [_settled(line) if line.lost else line.text for line in batch if self._is_new(line)]
        if lines:
            self._append(b"\n".join([*lines, b""]))
        for line in batch:
            journal.free(line.slot)
        if lost := sum(line.lost for line in batch):
            log.warning("a worker was lost with %d requests, which are in the billing file", lost)

    def _is_new(self, line: Line) -> bool:
        return not self._written or _id_of(line.text) not in self._written

    # -- the file

    def _append(self, data: bytes) -> None:
        """Write all of ``data``, or nothing. Raises OSError."""
        if self._file is None or not self._is_current(self._file):
            self._open()
        file = self._file
        assert file is not None, "it is open"
        before = os.fstat(file).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(file, data[written:])
            os.fdatasync(file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, before)
            raise

    def _is_current(self, file: int) -> bool:
        """Whether the file still has its name: log rotation moves it away."""
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(file))

    def _open(self) -> None:
        """Raises OSError."""
        file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        if self._file is not None:
            os.close(self._file)
        self._file = file

    def _mend_end(self) -> set[bytes]:
        """Cut off a line that the writer before this one has not completed, which is in a journal still;
        returns the ids of the last lines."""
        assert self._file is not None, "it is open"
        size = os.fstat(self._file).st_size
        start = max(0, size - 2 * MAX_BATCH)
        end = os.pread(self._file, size - start, start)
        whole = end.rfind(b"\n") + 1
        rest = end[whole:]
        if len(rest) <= 2 * MAX_LINE and rest.startswith(_BEGIN[: len(rest)]):
            os.ftruncate(self._file, start + whole)
        else:
            self._append(b"\n")  # whatever it is, it is none of ours
        return {_id_of(line) for line in end[:whole].split(b"\n")}


def _id_of(line: bytes) -> bytes:
    return line[len(_BEGIN) : line.find(b'"', len(_BEGIN))]


def _settled(line: Line) -> bytes:
    """The line of a request whose worker was lost, which has ended by now."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return line.text[:-1] + b',"time":"%b"}' % now.encode()


def check_journal_folder(path: str) -> None:
    """Raises ConfigError if the folder of the journals of the billing file ``path`` could not be written."""
    folder = Path(journal_folder(path)).absolute()
    if not os.access(folder if folder.exists() else folder.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--billing-file {path}: its journals need the folder {folder}: Permission denied")
