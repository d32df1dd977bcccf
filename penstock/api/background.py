"""Responses that run in the background: their events go to the response store instead of a client."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.generation.dialect import ReplyFormat
from penstock.http.admission import overloaded
from penstock.http.errors import ApiError
from penstock.http.sink import EVENT_STREAM, Listener, StreamKind
from penstock.logging_setup import RateLimitedLog
from penstock.metrics.store_metrics import StoreMetrics
from penstock.store.response_object import with_status
from penstock.store.response_store import ResponseStore
from penstock.store.stored_response import StoredResponse
from penstock.streaming.stream import StreamError

_log_failure = RateLimitedLog(logging.getLogger(__name__), logging.ERROR)

MAX_RUNS = 1024
"""Background responses that an API server runs at the same time."""
MAX_EVENT_BYTES = 256 << 20
"""Events of one response: about a million tokens."""
MAX_PENDING_BYTES = 1 << 20
"""Events that wait for the store; beyond them the reply holds its rows."""
COMMIT_INTERVAL_S = 0.05
"""Minimum time between two commits of events of one response; the first ones are committed at once."""
RETRY_S = 1.0
"""Time between attempts to store the end of a response."""
LOOK_S = 1.0
"""Longest time between looks whether responses were cancelled, beside those after a commit of anybody."""
CLOSE_S = 2.0
"""Longest wait at the end for the store."""
TOO_LONG = StreamError(
    500, "internal_error", f"The response has more than {MAX_EVENT_BYTES >> 20} MiB of events."
)
NOT_STORED = StreamError(500, "internal_error", "The events of this response could not be stored.")


class _End(msgspec.Struct):
    """The last event of a stream."""

    response: msgspec.Raw


class _Status(msgspec.Struct):
    status: str


class BackgroundRun:
    """One response: the sink of its reply. It ends once its end is stored."""

    write_target = None
    """Every row is written by :meth:`write`."""

    def __init__(
        self,
        store: ResponseStore,
        entry: StoredResponse,
        format: ReplyFormat,
        on_end: Callable[[BackgroundRun], None],
    ) -> None:
        # -- at first
        self._store = store
        self.entry = entry
        self._format = format
        self._on_end = on_end
        self._listener: Listener | None = None
        """The reply, as long as it runs."""
        self._pending = bytearray()
        """Events that are not given to the store yet."""
        self._count = 0
        """Number of the pending events."""
        self._next = 0
        """Sequence number of the first of them."""
        self._stored_bytes = 0
        self._committing = False
        self._commit_at = 0.0
        """When the next events may be committed."""
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._failure: StreamError | None = None
        """Why the events do not tell the end."""
        self._left = False
        """Whether nothing of it is to be stored any more: it was cancelled or deleted."""
        self.stored = False
        """Whether the entry is in the store."""
        self.ended = False

    # -- the sink of the reply

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    def release(self, kept: int = 0) -> None:
        pass

    def unread(self) -> int:
        return len(self._pending)

    def cut(self) -> None:
        self._failure = NOT_STORED

    def send(self, data: bytes, *, last: bool, kind: StreamKind = EVENT_STREAM) -> None:
        self.write(data)

    def write(self, data: bytes) -> None:
        if data == self._format.keep_alive or self._left:  # nobody waits for a keep-alive here
            return
        self._pending += data
        self._count += data.count(b"\n\n")
        if not (self._committing or self._timer):
            self._timer = asyncio.get_running_loop().call_later(
                max(self._commit_at - time.monotonic(), 0), self._commit
            )
        if self._listener is None:
            return
        if self._stored_bytes + len(self._pending) > MAX_EVENT_BYTES:
            self._fail(TOO_LONG)
        elif len(self._pending) > MAX_PENDING_BYTES and not self._paused:
            self._paused = True
            self._listener.on_pause()

    # -- its end

    def on_reply_end(self, error: StreamError | None) -> None:
        """The reply has ended, with an error if nothing was sent."""
        self._listener = None
        self._failure = self._failure or error
        if not self._committing:
            self._commit()

    def stop(self) -> None:
        """Stop: the response was cancelled or deleted."""
        self._left = True
        self._pending.clear()
        self._count = 0
        self._drop()

    def _fail(self, error: StreamError) -> None:
        self._failure = error
        self._drop()

    def _drop(self) -> None:
        """End the reply, if it runs."""
        if self._listener is not None:
            self._listener.on_disconnect()

    # -- commits

    def _commit(self) -> None:
        """Give the store what there is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._committing or self.ended:
            return
        if self._left:
            if self._listener is None:
                self._committing = True
                self._store.disown([self.entry.id]).add_done_callback(self._on_left)
            return
        data, count, first = bytes(self._pending), self._count, self._next
        id = self.entry.id
        if self._listener is not None:
            if not data:
                return
            stored = self._store.append(id, first, count, data)
        else:
            if self._failure is not None:
                ending = self._format.error(self._failure)
                data, count = data + ending, count + ending.count(b"\n\n")
                self._pending += ending
                self._count, self._failure = count, None
            status, body = _end_of(data, self.entry)
            stored = self._store.finish(id, status, body, first, count, data)
        self._committing = True
        ends = self._listener is None
        stored.add_done_callback(lambda done: self._on_committed(done, len(data), count, ends=ends))

    def _on_committed(self, stored: asyncio.Future[bool], size: int, count: int, *, ends: bool) -> None:
        self._committing = False
        self._commit_at = time.monotonic() + COMMIT_INTERVAL_S
        if stored.cancelled() or stored.exception() is not None:
            _log_failure("events", "events of a background response could not be stored")
            if self._listener is not None:
                self._fail(NOT_STORED)  # which comes back to commit the end
            else:
                self._commit_later(RETRY_S)
            return
        if not stored.result():
            self.stop()
            self._commit()
            return
        del self._pending[:size]
        self._count -= count
        self._next += count
        self._stored_bytes += size
        if ends:
            self._end()
            return
        if self._paused and self._listener is not None:
            self._paused = False
            self._listener.on_resume()
        if self._listener is None:
            self._commit()
        elif self._pending:
            self._commit_later(COMMIT_INTERVAL_S)

    def _commit_later(self, delay_s: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._commit)

    def _on_left(self, done: asyncio.Future[Any]) -> None:
        done.cancelled() or done.exception()  # it is seen; the entry is failed when this process ends
        self._end()

    def abandon(self) -> None:
        """No engine took the request: who asked gets the error, and nothing is stored."""
        self._left, self._listener = True, None
        self._store.delete(self.entry.id, self.entry.tenant).add_done_callback(self._on_left)

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._on_end(self)


def _end_of(events: bytes, entry: StoredResponse) -> tuple[str, bytes]:
    """Status and body of a response by its last event."""
    start = events.rfind(b"\n\n", 0, len(events) - 2) + 2 if len(events) > 2 else 0
    _, _, data = events[max(start, 0) :].partition(b"data: ")
    try:
        body = bytes(msgspec.json.decode(data, type=_End).response)
        return msgspec.json.decode(body, type=_Status).status, body
    except msgspec.MsgspecError:  # the reply ended without an event that says so
        return "failed", with_status(entry.body, "failed", NOT_STORED.message)


class BackgroundResponses:
    """The responses of one API server that are generated in the background."""

    def __init__(self, store: ResponseStore, metrics: StoreMetrics) -> None:
        self.store = store
        self._metrics = metrics
        self._runs: dict[str, BackgroundRun] = {}
        self._watch: asyncio.Task[None] | None = None

    async def begin(
        self, entry: StoredResponse, format: ReplyFormat, on_end: Callable[[], None]
    ) -> BackgroundRun:
        """Store the entry of a response that is to run here, and give the sink for its reply. ``on_end`` is
        called at its end, unless this raises. Raises ApiError."""
        if len(self._runs) >= MAX_RUNS:
            raise overloaded(f"The server is overloaded: {MAX_RUNS} responses run in the background.")

        def end(run: BackgroundRun) -> None:
            self._remove(run)
            on_end()

        run = BackgroundRun(self.store, entry, format, end)
        self._runs[entry.id] = run
        self._metrics.background = len(self._runs)
        try:
            await self.store.put(entry)
        except BaseException:
            self._remove(run)
            raise
        run.stored = True
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(self._watch_for_ends())
        return run

    def _remove(self, run: BackgroundRun) -> None:
        del self._runs[run.entry.id]
        self._metrics.background = len(self._runs)

    async def close(self) -> None:
        """Wait until what has ended is stored, or for a time, and close the store."""
        deadline = time.monotonic() + CLOSE_S
        while self._runs and time.monotonic() < deadline:
            await self.store.changed_since(self.store.version, COMMIT_INTERVAL_S)
        if self._watch is not None:
            self._watch.cancel()
        self.store.close()

    async def _watch_for_ends(self) -> None:
        """Stop responses that were cancelled or deleted, at any API server."""
        while self._runs:
            version = self.store.version
            stored = [run for run in self._runs.values() if run.stored]
            try:
                wanted = await self.store.running()
            except ApiError:  # logged by the store
                wanted = {run.entry.id for run in stored}
            for run in stored:
                if run.entry.id not in wanted:
                    run.stop()
            await self.store.changed_since(version, LOOK_S)
