"""One API server's access to the store of responses. All work with the database is done by one thread.

Operations that wait while the thread works are done together: all writes are one transaction, then come the
reads. Their futures are set in one call of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from penstock.config.serve import ServeConfig
from penstock.http.admission import overloaded
from penstock.http.errors import ApiError, shown
from penstock.logging_setup import RateLimitedLog
from penstock.metrics.store_metrics import StoreMetrics
from penstock.store.database import STEP, TOUCH_S, Database, Entry, EventPage, Totals
from penstock.store.owners import Owner
from penstock.store.stored_response import RUNNING, StoredResponse

log = logging.getLogger(__name__)
_log_failure = RateLimitedLog(log, logging.ERROR)

PREFIX = "resp_"
HOUSEKEEPING_S = 30.0
"""Time between looks for expired responses and dead API servers, of an idle thread too."""
DISK_BYTES, MEMORY_BYTES = 1 << 30, 256 << 20
"""Default limits."""
MAX_CHAIN = 1000
"""Responses that one may continue."""
MAX_CHAIN_BYTES = 16 << 20
"""Size of all responses of a chain; as much as a body with the whole conversation may have."""
MAX_REFERRED_BYTES = 32 << 20
"""Size altogether of responses whose items one request may refer to: 0.3 s of the thread."""
MAX_TOGETHER = 256
"""Operations that are done together."""
WAKE_S = 0.02
"""Minimum time between two occasions on which those who wait for changes are woken."""
POLL_S = 0.05
"""Time between looks whether other processes have committed, while somebody waits for it."""
CLOSE_S = 5.0
"""Longest wait for the thread at the end; then a commit is stuck in the file system."""
DIED = "The API server that generated this response has died."
PREVIOUS = "previous_response_id"

Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Job(Generic[Result]):
    """One operation. ``future`` is the event loop's."""

    work: Callable[[Database], Result]
    future: asyncio.Future[Result]
    writes: bool
    tells: bool
    """Whether it changes what others may wait for."""
    result: Any = None
    error: BaseException | None = None


class _Done(NamedTuple):
    """What a round of the thread did besides its jobs."""

    commit_s: float = 0.0
    """Time of the transaction; 0: there was none."""
    expired: int = 0
    evicted: int = 0
    totals: Totals | None = None


class ResponseStore:
    """``tenant``: of the API key that asks; empty without keys. Operations raise ApiError when the store
    fails."""

    def __init__(
        self,
        directory: Path,
        *,
        most_bytes: int,
        ttl_s: float,
        metrics: StoreMetrics | None = None,
    ) -> None:
        """To be called in the event loop, with a directory that :func:`penstock.store.database.create` has
        made. Raises OSError, sqlite3.Error."""
        # -- per process
        self._loop = asyncio.get_running_loop()
        self._owner = Owner(directory)
        self._database = Database(directory, self._owner.id, most_bytes=most_bytes, ttl_s=ttl_s)
        self._metrics = StoreMetrics() if metrics is None else metrics
        self.store_id = self._database.store_id
        """12 hexadecimal characters, drawn when the store was made, in the id of every response in it."""
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._closed = False
        self.version = 0
        """Changes a moment after a commit that concerns who waits; also after those of other processes."""
        self._woken_at = 0.0
        self._wake: asyncio.TimerHandle | None = None
        self._data_version = 0
        self._waiters: set[asyncio.Future[None]] = set()
        self._poll: asyncio.TimerHandle | None = None
        self.one_long = asyncio.Lock()
        """Whoever makes and puts a body of megabytes has this for as long: the memory of one is enough."""
        self._thread = threading.Thread(target=self._work, name="response store", daemon=True)
        # -- in the thread
        self._next_housekeeping = 0.0
        self._thread.start()

    def close(self) -> None:
        """Do what was asked for, and end."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("the response store did not end: a commit takes more than %.0f seconds", CLOSE_S)
            return
        self._owner.close()

    def new_id(self) -> str:
        """An id for a response that is to be stored here."""
        return f"{PREFIX}{self.store_id}{secrets.token_hex(12)}"

    # -- whole responses

    def get(self, id: str, tenant: str) -> Awaitable[StoredResponse | None]:
        """The response; None if there is none, it has expired or belongs to another tenant."""

        def work(database: Database) -> StoredResponse | None:
            return database.get(id, tenant) if self._checked(database, id, tenant) is not None else None

        return self._read(work)

    def chain(self, id: str, tenant: str) -> Awaitable[list[StoredResponse]]:
        """The response and those that it continues, oldest first. Raises ApiError if one of them is missing,
        expired, of another tenant or still generated, and if they are too many or too large."""
        return self._read(lambda database: self._chain(database, id, tenant))

    def context(
        self, id: str, tenant: str, read: Callable[[list[StoredResponse]], Result]
    ) -> Awaitable[Result]:
        """What ``read``, in the thread, makes of the same as far as it is stored: nothing if the response
        itself is not."""
        return self._read(lambda database: read(self._chain(database, id, tenant, whole=False)))

    def items(self, ids: Iterable[str], tenant: str) -> Awaitable[dict[str, bytes]]:
        """Input and output items of stored responses, as JSON, by their ids; without those that are not
        stored. Raises ApiError if their responses are too large."""

        def work(database: Database) -> dict[str, bytes]:
            found: dict[str, bytes] = {}
            size = 0
            with contextlib.closing(database.items(ids, tenant)) as parts:
                for bytes_read, part in parts:
                    size += bytes_read
                    if size > MAX_REFERRED_BYTES:
                        most = f"{MAX_REFERRED_BYTES >> 20} MiB"
                        message = f"input: the items are those of responses with more than {most} together."
                        raise ApiError(400, message, param="input")
                    found |= part
            return found

        return self._read(work)

    def put(self, response: StoredResponse) -> asyncio.Future[None]:
        """Store a new response. The result is set once it is committed; its exception if it could not be.
        One that is still generated is this API server's to :meth:`finish`."""

        def work(database: Database) -> None:
            if database.full and response.status in RUNNING:
                raise overloaded("The response store is full of responses that run in the background.")
            database.put(response)

        self._metrics.stored += 1
        return self._ask(work, writes=True)

    def delete(self, id: str, tenant: str) -> asyncio.Future[bool]:
        """Delete a response; False if there is none."""
        return self._write(lambda database: database.delete(id, tenant))

    # -- responses in the background

    def append(self, id: str, first: int, count: int, data: bytes) -> asyncio.Future[bool]:
        """Store ``count`` events of a response that is generated here, numbered from ``first``. False: it was
        cancelled or deleted."""
        return self._write(lambda database: database.append(id, first, count, data))

    def finish(
        self, id: str, status: str, body: bytes, first: int, count: int, data: bytes
    ) -> asyncio.Future[bool]:
        """Store the last ``count`` events of a response that is generated here, and its end. False: it was
        cancelled or deleted."""
        return self._write(lambda database: database.finish(id, status, body, first, count, data))

    def disown(self, ids: Sequence[str]) -> asyncio.Future[None]:
        """Give up responses that are not generated here any more: they were cancelled."""
        return self._write(lambda database: database.disown(ids))

    def cancel(self, id: str, tenant: str) -> Awaitable[None]:
        """End a response that is still generated, wherever it is; else nothing."""
        return self._write(lambda database: database.cancel(id, tenant))

    def entry(self, id: str, tenant: str) -> Awaitable[Entry | None]:
        """What kind of response it is, and whether it is still generated."""
        return self._read(lambda database: self._checked(database, id, tenant))

    def page(self, id: str, tenant: str, after: int, most: int) -> Awaitable[EventPage | None]:
        """Events of a response from sequence number ``after + 1`` on, up to about ``most`` bytes."""
        return self._read(lambda database: database.page(id, tenant, after, most))

    def running(self) -> Awaitable[set[str]]:
        """Ids of responses that are generated here and were neither cancelled nor deleted."""
        return self._read(Database.running)

    # -- changes

    async def changed_since(self, version: int, timeout_s: float) -> None:
        """Wait until :attr:`version` is another one, or for a time."""
        if self.version != version:
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        if self._poll is None:
            self._poll = self._loop.call_later(POLL_S, self._ask_data_version)
        try:
            await asyncio.wait((waiter,), timeout=timeout_s)
        finally:
            self._waiters.discard(waiter)

    def _on_change(self) -> None:
        """Wake those who wait; together, if changes follow each other fast."""
        if self._wake is None:
            delay_s = max(self._woken_at + WAKE_S - self._loop.time(), 0)
            self._wake = self._loop.call_later(delay_s, self._wake_all)

    def _wake_all(self) -> None:
        self._wake, self._woken_at = None, self._loop.time()
        self.version += 1
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _ask_data_version(self) -> None:
        self._poll = None
        if self._waiters and not self._closed:
            self._read(Database.data_version).add_done_callback(self._on_data_version)

    def _on_data_version(self, asked: asyncio.Future[int]) -> None:
        if asked.cancelled() or asked.exception() is not None or self._closed:
            return
        if asked.result() != self._data_version:
            self._data_version = asked.result()
            self._on_change()
        if self._poll is None:  # who was woken may wait again
            self._poll = self._loop.call_later(POLL_S, self._ask_data_version)

    # -- jobs

    def _read(self, work: Callable[[Database], Result]) -> asyncio.Future[Result]:
        return self._ask(work)

    def _write(self, work: Callable[[Database], Result]) -> asyncio.Future[Result]:
        return self._ask(work, writes=True, tells=True)

    def _ask(
        self, work: Callable[[Database], Result], *, writes: bool = False, tells: bool = False
    ) -> asyncio.Future[Result]:
        future: asyncio.Future[Result] = self._loop.create_future()
        if self._closed:
            future.set_exception(_failed())
        else:
            self._jobs.put(_Job(work, future, writes, tells))
        return future

    def _settle(self, jobs: Sequence[_Job[Any]], done: _Done) -> None:
        """Set the futures of jobs that are done."""
        metrics, failures = self._metrics, 0
        for job in jobs:
            if job.error is not None:
                failures += job.writes
                if not isinstance(job.error, ApiError):
                    _log_failure(type(job.error).__name__, "the response store failed: %s", job.error)
                    job.error = _failed()
            if job.future.done():  # nobody waits any more
                continue
            if job.error is None:
                job.future.set_result(job.result)
            else:
                job.future.set_exception(job.error)
        metrics.failures += failures
        if done.totals is not None:
            metrics.entries, metrics.bytes = done.totals
            metrics.removed["ttl"] += done.expired
            metrics.removed["bytes"] += done.evicted
        if done.commit_s:
            metrics.commit.add(done.commit_s)
            if any(job.tells for job in jobs):
                self._on_change()

    # -- in the thread

    def _work(self) -> None:
        try:
            ended = False
            while not ended:
                jobs, ended = self._next_jobs()
                if jobs:
                    self._deliver(jobs, self._do(jobs))
                if time.monotonic() >= self._next_housekeeping:
                    self._keep_house()
        finally:
            self._database.close()

    def _deliver(self, jobs: Sequence[_Job[Any]], done: _Done) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._settle, jobs, done)

    def _next_jobs(self) -> tuple[list[_Job[Any]], bool]:
        """All jobs that wait; whether they are the last."""
        jobs: list[_Job[Any]] = []
        try:
            job = self._jobs.get(timeout=max(self._next_housekeeping - time.monotonic(), 0))
            while job is not None:
                jobs.append(job)
                if len(jobs) == MAX_TOGETHER:
                    return jobs, False
                job = self._jobs.get_nowait()
        except Empty:
            return jobs, False
        return jobs, True

    def _do(self, jobs: Sequence[_Job[Any]]) -> _Done:
        writes = [job for job in jobs if job.writes]
        done = self._commit(writes) if writes else _Done()
        for job in jobs:
            if not job.writes:
                try:
                    job.result = job.work(self._database)
                except Exception as error:  # noqa: BLE001 - the asker's
                    job.error = error
        return done

    def _commit(self, jobs: Sequence[_Job[Any]]) -> _Done:
        """Do these as one transaction; what fails alone is left out of it."""
        database, start = self._database, time.monotonic()
        try:
            database.begin()
            for job in jobs:
                try:
                    with database.savepoint():
                        job.result = job.work(database)
                except Exception as error:
                    if not database.in_transaction:
                        raise
                    job.error = error
            done = _Done(expired=database.expire(), evicted=database.shrink(), totals=database.totals())
            database.commit()
        except Exception as error:  # noqa: BLE001 - the askers'
            with contextlib.suppress(sqlite3.Error):
                database.rollback()
            for job in jobs:
                job.error = error
            return _Done()
        return done._replace(commit_s=time.monotonic() - start)

    def _keep_house(self) -> None:
        """Remove what has expired, and fail what dead API servers have left."""
        try:
            expired = STEP
            while expired == STEP:
                self._database.begin()
                expired = self._database.expire()
                totals = self._database.totals()
                self._database.commit()
                self._deliver((), _Done(expired=expired, totals=totals))
            for owner in self._owner.others():
                self._bury(owner)
        except Exception as error:  # noqa: BLE001 - also of a damaged response; the thread works for all
            with contextlib.suppress(sqlite3.Error):
                self._database.rollback()
            _log_failure("housekeeping", "the response store failed: %s", error)
        self._next_housekeeping = time.monotonic() + HOUSEKEEPING_S

    def _checked(self, database: Database, id: str, tenant: str) -> Entry | None:
        """A response's entry, after the end of its owner if that has died."""
        entry = database.entry(id, tenant)
        running_elsewhere = entry is not None and entry.status in RUNNING and entry.owner != self._owner.id
        if running_elsewhere and entry is not None and entry.owner is not None and self._bury(entry.owner):
            entry = database.entry(id, tenant)
        return entry

    def _bury(self, owner: str) -> bool:
        """Fail what an owner has left, if it is dead."""
        with self._owner.burying(owner) as dead:
            if dead:
                self._database.begin()
                try:
                    count = self._database.fail_owner(owner, DIED)
                    self._database.commit()
                finally:
                    self._database.rollback()  # unless it is committed
                if count:
                    log.warning("%d responses have failed: their API server has died", count)
            return dead

    def _chain(self, database: Database, id: str, tenant: str, *, whole: bool = True) -> list[StoredResponse]:
        entry = self._checked(database, id, tenant)
        if whole and entry is not None and entry.status in RUNNING:
            raise ApiError(
                400,
                f"The response {shown(id)} is still generated; it can be continued once it has ended.",
                param=PREVIOUS,
                code="previous_response_in_progress",
            )
        found: list[StoredResponse] = []
        old: list[str] = []
        count, size, next, touched_before = 0, 0, id, time.time() - TOUCH_S
        with contextlib.closing(database.chain(id, tenant)) as uses:
            for used_at, response in uses:
                found.append(response)
                if whole or response.id != id:  # those that it continued were few and small enough then
                    count, size = count + 1, size + len(response.body) + len(response.input)
                if size > MAX_CHAIN_BYTES or count > MAX_CHAIN:
                    raise ApiError(
                        400,
                        f"The conversation before {shown(id)} is too long: at most {MAX_CHAIN} responses of "
                        f"{MAX_CHAIN_BYTES >> 20} MiB are continued.",
                        param=PREVIOUS,
                    )
                if used_at < touched_before:
                    old.append(response.id)
                next = response.previous_id or ""
        if whole and next:
            raise missing_previous(id, next)
        if old:
            database.begin()
            database.touch(old)
            database.commit()
        found.reverse()
        return found


def open_store(directory: Path, config: ServeConfig, metrics: StoreMetrics) -> ResponseStore:
    """The store of one API server."""
    most = config.response_store_bytes
    if most is None:
        most = DISK_BYTES
        if config.response_store == "memory":  # of which a container may have little
            memory = os.statvfs(directory)
            most = min(MEMORY_BYTES, memory.f_blocks * memory.f_frsize // 2)
    return ResponseStore(directory, most_bytes=most, ttl_s=config.response_store_ttl, metrics=metrics)


def _failed() -> ApiError:
    return ApiError(500, "The response store failed.", code="response_store_failed")


def missing_previous(id: str, missing: str) -> ApiError:
    """404 for a response that cannot be continued because it, or one before it, is not stored."""
    because = "" if missing == id else f": {shown(missing)} before it is not stored any more"
    return ApiError(
        404,
        f"Previous response with id {shown(id)!r} not found{because}.",
        param=PREVIOUS,
        code="previous_response_not_found",
    )
