"""The SQLite file of stored responses: schema, statements, and what expires. Used by one thread at a time.

Write-ahead logging lets the processes of a host read and write one file. A commit survives the death of any
process; only a power failure can take the last ones (``synchronous=NORMAL``), never the file's consistency.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.store.response_object import ending_event, inputs_of, output_ids, outputs_of, with_status
from penstock.store.stored_response import QUEUED_EVENTS, RUNNING, StoredResponse

FILE = "responses.db"
APPLICATION_ID = 0x50656E73
"""Marks the file as ours; SQLite keeps it in the file's head."""
VERSION = 1
_OF_FILE_SYSTEM = {"lost+found"}
"""Names that an empty file system has."""
BUSY_TIMEOUT_S = 10.0
"""Longest wait for other processes' commits, each of which takes milliseconds."""
MAX_CHECKED_PAGES = 32_768
"""Size up to which the whole file is checked at the start; damage of a larger one is found in reading."""
ROW_BYTES = 512
"""What an entry counts besides its JSON: its row and its places in indexes."""
ITEM_BYTES = 96
"""What an item's id counts."""
TOUCH_S = 60.0
"""Precision of the time of last use: a response in use is not written anew for each use."""
STEP = 64
"""Entries that expire in one transaction."""

_SCHEMA = """
CREATE TABLE store (store_id TEXT NOT NULL, count INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL,
    created_at REAL NOT NULL, used_at REAL NOT NULL, status TEXT NOT NULL, model TEXT NOT NULL,
    previous_id TEXT, bytes INTEGER NOT NULL,
    background INTEGER NOT NULL,  -- whether it has events
    owner TEXT,  -- the API server that generates it
    events INTEGER NOT NULL DEFAULT 0  -- their number
);
CREATE INDEX by_age ON responses (created_at) WHERE owner IS NULL;
CREATE INDEX by_use ON responses (used_at) WHERE owner IS NULL;
CREATE INDEX by_owner ON responses (owner) WHERE owner IS NOT NULL;
-- Apart from the row above, so that an update of it does not write them again.
CREATE TABLE bodies (number INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE inputs (number INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE items (
    id TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (id, number)) WITHOUT ROWID;
CREATE INDEX items_of ON items (number);
CREATE TABLE events (
    number INTEGER NOT NULL, last INTEGER NOT NULL, first INTEGER NOT NULL, data BLOB NOT NULL,
    UNIQUE (number, last));
CREATE TRIGGER added AFTER INSERT ON responses BEGIN
    UPDATE store SET count = count + 1, bytes = bytes + NEW.bytes; END;
CREATE TRIGGER resized AFTER UPDATE OF bytes ON responses BEGIN
    UPDATE store SET bytes = bytes + NEW.bytes - OLD.bytes; END;
CREATE TRIGGER removed AFTER DELETE ON responses BEGIN
    UPDATE store SET count = count - 1, bytes = bytes - OLD.bytes;
    DELETE FROM bodies WHERE number = OLD.number;
    DELETE FROM inputs WHERE number = OLD.number;
    DELETE FROM items WHERE number = OLD.number;
    DELETE FROM events WHERE number = OLD.number; END;
"""
_COLUMNS = "r.id, r.tenant, r.created_at, r.status, b.data, i.data, r.previous_id, r.model"
_TABLES = "responses r JOIN bodies b ON b.number = r.number JOIN inputs i ON i.number = r.number"
_RUNS = f"status IN {RUNNING}"


class StoreError(Exception):
    """The store cannot be used, or an entry cannot be kept; the message says why."""


class EventPage(NamedTuple):
    """Some events of a background response."""

    status: str
    data: bytes
    """Whole events."""
    last: int
    """Sequence number of the last one; that of the question if there are none."""


class Entry(NamedTuple):
    """What routes ask about an entry before they act on it."""

    status: str
    background: bool
    owner: str | None


class Use(NamedTuple):
    used_at: float
    response: StoredResponse


class Totals(NamedTuple):
    entries: int
    bytes: int


def create(directory: Path) -> None:
    """Make the store's directory and file, or check that they can be used. Raises StoreError."""
    path = directory / FILE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid != os.geteuid():
            raise StoreError("it belongs to another user")
        if not path.exists() and {each.name for each in directory.iterdir()} - _OF_FILE_SYSTEM:
            raise StoreError("it holds other files; give an empty directory or a new name")
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        raise StoreError("it is no directory") from None
    except OSError as error:
        raise StoreError(error.strerror or str(error)) from None
    with contextlib.closing(_connect(path)) as connection:
        try:
            is_new = _is_new(connection)
            directory.chmod(0o700)
            path.chmod(0o600)  # SQLite gives the files beside it the same mode
            if connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
                raise StoreError("its file system does not allow the shared memory of a write-ahead log")
            if is_new:
                _create_schema(connection)
            _check_pages(connection)
        except sqlite3.Error as error:
            raise StoreError(f"{FILE}: {error}") from None


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(
        path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=64
    )


def _is_new(connection: sqlite3.Connection) -> bool:
    """Whether the file is empty. Raises StoreError if it is not ours."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if not (application or version or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]):
        return True
    if application != APPLICATION_ID:
        raise StoreError(f"{FILE} is the database of another program")
    if version != VERSION:
        raise StoreError(f"{FILE} has version {version} of the format, this program has {VERSION}")
    return False


def _create_schema(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    if _is_new(connection):  # another server may have been faster
        for statement in _statements(_SCHEMA):
            connection.execute(statement)
        connection.execute("INSERT INTO store VALUES (?, 0, 0)", (secrets.token_hex(6),))
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={VERSION}")
    connection.execute("COMMIT")


def _check_pages(connection: sqlite3.Connection) -> None:
    if connection.execute("PRAGMA page_count").fetchone()[0] <= MAX_CHECKED_PAGES:
        found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise StoreError(f"{FILE} is damaged: {found}")


def _statements(script: str) -> Iterator[str]:
    """The statements of a script; ``executescript`` would end the transaction."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


class Database:
    """A connection. ``owner``: the API server that has it. Methods that write are to be called between
    :meth:`begin` and :meth:`commit`. They raise sqlite3.Error."""

    def __init__(self, directory: Path, owner: str, *, most_bytes: int, ttl_s: float) -> None:
        self._connection = _connect(directory / FILE)
        self._run = self._connection.execute
        self._owner = owner
        self._most_bytes = most_bytes
        self.full = False
        """Whether nothing is left to remove: all that is stored is still generated."""
        self._ttl_s = ttl_s
        self._run("PRAGMA synchronous=NORMAL")
        self._run(f"PRAGMA journal_size_limit={16 << 20}")
        self.store_id: str = self._run("SELECT store_id FROM store").fetchone()[0]

    def close(self) -> None:
        self._connection.close()

    # -- transactions

    def begin(self) -> None:
        self._run("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._run("COMMIT")

    def rollback(self) -> None:
        if self.in_transaction:
            self._run("ROLLBACK")

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo what the block does if it raises."""
        self._run("SAVEPOINT one")
        try:
            yield
        except BaseException:
            if self.in_transaction:  # SQLite ends it for some errors, such as a full disk
                self._run("ROLLBACK TO one")
                self._run("RELEASE one")
            raise
        self._run("RELEASE one")

    def data_version(self) -> int:
        """Changes when another connection has committed."""
        version: int = self._run("PRAGMA data_version").fetchone()[0]
        return version

    def totals(self) -> Totals:
        return Totals(*self._run("SELECT count, bytes FROM store").fetchone())

    # -- writing

    def put(self, response: StoredResponse) -> None:
        """Add a response; one that is still generated gets events, and its end, later. Raises StoreError."""
        known = response.output_ids
        outputs = [item.id for item in outputs_of(response) if item.id] if known is None else known
        ids = [*outputs, *(item.id for item in inputs_of(response) if item.id)]
        size = ROW_BYTES + len(response.body) + len(response.input) + ITEM_BYTES * len(ids)
        if size > self._most_bytes:
            raise StoreError(
                f"The response takes {size} bytes, --response-store-bytes is {self._most_bytes}."
            )
        running = response.status in RUNNING
        cursor = self._run(
            "INSERT INTO responses (id, tenant, created_at, used_at, status, model, previous_id, bytes,"
            " background, owner) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                response.id,
                response.tenant,
                response.created_at,
                time.time(),
                response.status,
                response.model,
                response.previous_id,
                size,
                running,
                self._owner if running else None,
            ),
        )
        number = cursor.lastrowid
        self._run("INSERT INTO bodies VALUES (?, ?)", (number, response.body))
        self._run("INSERT INTO inputs VALUES (?, ?)", (number, response.input))
        self._add_items(number, ids)

    def _add_items(self, number: int | None, ids: Iterable[str]) -> None:
        self._connection.executemany(
            "INSERT OR IGNORE INTO items VALUES (?, ?)", [(each, number) for each in ids]
        )

    def append(self, id: str, first: int, count: int, data: bytes) -> bool:
        """Add events, the first one with sequence number ``first``, to a response that this API server
        generates. False: it was cancelled or deleted. Raises StoreError if the store is full."""
        if self.full:
            raise StoreError("The store is full of responses that are still generated.")
        return self._append(id, first, count, data)

    def _append(self, id: str, first: int, count: int, data: bytes) -> bool:
        found = self._run(
            "UPDATE responses SET events = ?, bytes = bytes + ? WHERE id = ? AND owner = ? "
            f"AND {_RUNS} RETURNING number",
            (first + count, len(data) + ITEM_BYTES, id, self._owner),
        ).fetchall()
        if not found:
            return False
        number = found[0][0]
        if count:
            self._run("INSERT INTO events VALUES (?, ?, ?, ?)", (number, first + count - 1, first, data))
        if first <= QUEUED_EVENTS < first + count:
            self._begin(number)
        return True

    def _begin(self, number: int) -> None:
        """The response is not queued any more."""
        ((body,),) = self._run("SELECT data FROM bodies WHERE number = ?", (number,))
        self._run("UPDATE bodies SET data = ? WHERE number = ?", (with_status(body, "in_progress"), number))
        self._run("UPDATE responses SET status = 'in_progress' WHERE number = ?", (number,))

    def finish(self, id: str, status: str, body: bytes, first: int, count: int, data: bytes) -> bool:
        """Add the last events of a response as :meth:`append` does, even to a full store, and its end."""
        if not self._append(id, first, count, data):
            return False
        self._end(id, status, body)
        return True

    def _end(self, id: str, status: str, body: bytes) -> None:
        ids = output_ids(body)
        ((number, before),) = self._run(
            "SELECT r.number, length(b.data) FROM responses r JOIN bodies b ON b.number = r.number "
            "WHERE r.id = ?",
            (id,),
        )
        self._run("UPDATE bodies SET data = ? WHERE number = ?", (body, number))
        self._add_items(number, ids)
        self._run(
            "UPDATE responses SET status = ?, owner = NULL, bytes = bytes + ?, used_at = ? WHERE number = ?",
            (status, len(body) - before + ITEM_BYTES * len(ids), time.time(), number),
        )

    def cancel(self, id: str, tenant: str) -> None:
        """End a response that is still generated. Its owner stops when it hears of it."""
        row = self._run(
            f"SELECT r.number, r.owner, b.data FROM {_TABLES} WHERE r.id = ? AND r.tenant = ? AND {_RUNS}",
            (id, tenant),
        ).fetchone()
        if row is not None:
            self._end(id, "cancelled", with_status(row[2], "cancelled"))
            self._run("UPDATE responses SET owner = ? WHERE number = ?", (row[1], row[0]))

    def disown(self, ids: Sequence[str]) -> None:
        """This API server has stopped generating these."""
        self._connection.executemany(
            "UPDATE responses SET owner = NULL WHERE id = ? AND owner = ?",
            [(id, self._owner) for id in ids],
        )

    def delete(self, id: str, tenant: str) -> bool:
        deleted = self._run("DELETE FROM responses WHERE id = ? AND tenant = ?", (id, tenant))
        return deleted.rowcount > 0

    def fail_owner(self, owner: str, message: str) -> int:
        """Fail what an API server generated that has died; returns how many responses."""
        rows = self._run(
            f"SELECT r.id, r.number, r.status, r.events, b.data FROM {_TABLES} WHERE r.owner = ?", (owner,)
        ).fetchall()
        for id, number, status, events, before in rows:
            if status in RUNNING:
                body = with_status(before, "failed", message)
                data = ending_event("response.failed", events, body)
                self._run("INSERT INTO events VALUES (?, ?, ?, ?)", (number, events, events, data))
                self._run(
                    "UPDATE responses SET events = ?, bytes = bytes + ? WHERE number = ?",
                    (events + 1, len(data) + ITEM_BYTES, number),
                )
                self._end(id, "failed", body)
            else:
                self._run("UPDATE responses SET owner = NULL WHERE number = ?", (number,))
        return len(rows)

    def touch(self, ids: Sequence[str]) -> None:
        """Record that these responses were used."""
        self._connection.executemany(
            "UPDATE responses SET used_at = ? WHERE id = ?", [(time.time(), id) for id in ids]
        )

    # -- limits

    def expire(self) -> int:
        """Remove the oldest of the responses that have expired; returns how many."""
        removed = self._run(
            "DELETE FROM responses WHERE number IN (SELECT number FROM responses WHERE owner IS NULL "
            "AND created_at <= ? ORDER BY created_at LIMIT ?)",
            (time.time() - self._ttl_s, STEP),
        )
        return removed.rowcount

    def shrink(self) -> int:
        """Remove responses that were not used for longest until the rest fits; returns how many."""
        removed = 0
        surplus = self.totals().bytes - self._most_bytes
        while surplus > 0:
            oldest = self._run(
                "SELECT number, bytes FROM responses WHERE owner IS NULL ORDER BY used_at, number LIMIT ?",
                (STEP,),
            ).fetchall()
            if not oldest:
                self.full = True
                return removed
            for number, size in oldest:
                self._run("DELETE FROM responses WHERE number = ?", (number,))
                removed += 1
                surplus -= size
                if surplus <= 0:
                    break
        self.full = False
        return removed

    # -- reading

    def get(self, id: str, tenant: str) -> StoredResponse | None:
        row = self._run(
            f"SELECT {_COLUMNS} FROM {_TABLES} WHERE r.id = ? AND r.tenant = ? AND {self._live()}",
            (id, tenant),
        ).fetchone()
        return None if row is None else StoredResponse(*row)

    def _live(self) -> str:
        """The condition that a response has not expired. By seconds, so that statements stay prepared."""
        return f"(r.created_at > {int(time.time() - self._ttl_s)} OR r.owner IS NOT NULL)"

    def entry(self, id: str, tenant: str) -> Entry | None:
        row = self._run(
            "SELECT r.status, r.background, r.owner FROM responses r "
            f"WHERE r.id = ? AND r.tenant = ? AND {self._live()}",
            (id, tenant),
        ).fetchone()
        return None if row is None else Entry(row[0], bool(row[1]), row[2])

    def chain(self, id: str, tenant: str) -> Generator[Use, None, None]:
        """The response and those that it continues, the latest first, as far as they are stored. Each is read
        when it is asked for; to be closed."""
        live = self._live()
        rows = self._run(
            "WITH RECURSIVE chain (number, previous_id) AS (SELECT r.number, r.previous_id FROM responses r "
            f"WHERE r.id = ? AND r.tenant = ? AND {live} UNION ALL SELECT r.number, r.previous_id FROM chain "
            f"CROSS JOIN responses r ON r.id = chain.previous_id WHERE r.tenant = ? AND {live}) "
            f"SELECT r.used_at, {_COLUMNS} FROM chain CROSS JOIN {_TABLES} WHERE r.number = chain.number",
            (id, tenant, tenant),
        )
        for row in rows:
            yield Use(row[0], StoredResponse(*row[1:]))

    def items(self, ids: Iterable[str], tenant: str) -> Generator[tuple[int, dict[str, bytes]], None, None]:
        """Input and output items by their ids, as JSON, as far as they are stored: the size of a response and
        its items, one response after the other. Each is read when it is asked for; to be closed."""
        wanted: dict[int, set[str]] = {}
        for id in ids:
            row = self._run(
                "SELECT r.number FROM items CROSS JOIN responses r ON r.number = items.number "
                f"WHERE items.id = ? AND r.tenant = ? AND {self._live()} ORDER BY items.number DESC LIMIT 1",
                (id, tenant),
            ).fetchone()
            if row is not None:
                wanted.setdefault(row[0], set()).add(id)
        for number, its in wanted.items():
            rows = self._run(f"SELECT {_COLUMNS} FROM {_TABLES} WHERE r.number = ?", (number,))
            response = StoredResponse(*rows.fetchone())
            items = (*inputs_of(response), *outputs_of(response))  # of the same id the output
            size = len(response.body) + len(response.input)
            yield size, {item.id: bytes(item.json) for item in items if item.id in its}

    def page(self, id: str, tenant: str, after: int, most: int) -> EventPage | None:
        """Events with sequence numbers above ``after``, up to about ``most`` bytes. None: no such
        response."""
        row = self._run(  # the status first: it says whether more events can come after these
            f"SELECT r.number, r.status FROM responses r WHERE r.id = ? AND r.tenant = ? AND {self._live()}",
            (id, tenant),
        ).fetchone()
        if row is None:
            return None
        number, status = row
        data, last = bytearray(), after
        for batch_last, first, batch in self._run(
            "SELECT last, first, data FROM events WHERE number = ? AND last > ? ORDER BY last",
            (number, after),
        ):
            known = after + 1 - first
            data += batch if known <= 0 else _without(batch, known)
            last = batch_last
            if len(data) >= most:
                break
        return EventPage(status, bytes(data), last)

    def running(self) -> set[str]:
        """Ids of the responses that this API server is to go on with."""
        rows = self._run(f"SELECT id FROM responses WHERE owner = ? AND {_RUNS}", (self._owner,))
        return {id for (id,) in rows}


def _without(batch: bytes, count: int) -> bytes:
    """A batch of events without the first ``count``."""
    start = 0
    for _ in range(count):
        start = batch.index(b"\n\n", start) + 2
    return batch[start:]
