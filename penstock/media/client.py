"""The media workers of a host, as an API server uses them: pictures go in, keys and tokens come out.

Everything runs on the event loop; a worker does the work. A picture is sent to the worker with the fewest at
hand. If that ends, the picture goes to another one; the store counts how many it has ended. The same picture
at the same time is prepared once, and what has become of recent ones is remembered by a digest of their text:
then only their pages are looked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import struct
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from typing import NamedTuple, TypeAlias

import msgspec

from penstock.media.refused import Refused
from penstock.media.store import Lease, MediaStore
from penstock.metrics.media_metrics import MediaMetrics
from penstock.wire.media.items import MediaKey
from penstock.wire.media.worker import (
    MAX_MESSAGE_BYTES,
    AbandonMedia,
    FromMediaWorker,
    MediaDescription,
    MediaPrepared,
    MediaRefused,
    PrepareMedia,
    media_socket,
)

log = logging.getLogger(__name__)

RETRY_S = 0.05
"""Time between two attempts to connect to a worker that has not started yet."""
ROOM_RETRY_S = 0.01
"""Time between two looks whether another API server's request has found room."""
WORKER_WAIT_S = 15.0
"""How long a picture waits for a worker while none runs: one restarts within seconds."""
MAX_TRIES = 3
"""Workers that a picture is sent to: the store refuses it after it has ended two."""
HASHED_INLINE = 1 << 20
"""Bytes that are hashed on the event loop, in 0.6 ms (SHA-256 by the processor's instructions; BLAKE2b takes
twice as long); more are hashed in a thread."""
MAX_REMEMBERED = 16 << 20
"""Bytes of token ids of remembered pictures."""
LATEST = 64
"""Pictures whose tokens tell what another one may have."""
ENTRY_BYTES = 400
"""Memory of a remembered picture beside its token ids."""
Memo: TypeAlias = tuple[bytes, str, str]
"""Digest of a picture's text, detail and salt: what is remembered of it."""
_HEAD = struct.Struct("<II")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FromMediaWorker).decode
_decode_description = msgspec.msgpack.Decoder(MediaDescription).decode


class WantedPicture(NamedTuple):
    """What a request has of a picture."""

    url: str
    """http:, https: or file: URL; empty: ``data``."""
    data: bytes | memoryview = b""
    """Base64."""
    detail: str = "auto"
    salt: str = ""


class WorkerLost(ConnectionError):
    """The worker has ended, or does not speak as it should."""


class _Preparation:
    """A picture that a worker prepares."""

    def __init__(self, task: asyncio.Task[MediaPrepared]) -> None:
        self.task = task
        self.waiting = 0
        """Requests that wait for it."""


class _Worker:
    """The connection to one worker."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.writer: asyncio.StreamWriter | None = None
        """None: it is not connected."""
        self.waiting: dict[int, asyncio.Future[MediaPrepared | MediaRefused]] = {}
        """By number of the request."""


class MediaClient:
    """The media workers of an API server's host."""

    def __init__(self, run_dir: str, workers: int, store: MediaStore, counts: MediaMetrics) -> None:
        self.counts = counts
        self.capacity = store.capacity
        """Bytes of pages that are kept at a time."""
        self._workers = [_Worker(media_socket(run_dir, index)) for index in range(workers)]
        self._store = store
        self._numbers = itertools.count(1)
        self._described: asyncio.Future[MediaDescription]
        self._connected = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._running: dict[Memo, _Preparation] = {}
        self._known: OrderedDict[Memo, MediaPrepared] = OrderedDict()
        """The longest unused first."""
        self._known_bytes = 0
        self._latest = deque[int](maxlen=LATEST)
        """Tokens of each of the latest pictures."""
        self._last_room = asyncio.Lock()
        self._held: dict[MediaKey, tuple[Lease, int]] = {}
        """Leases, and how many requests have each."""

    # -- workers

    async def start(self) -> MediaDescription:
        """Connect to the workers, and wait for the first description that there is: an API server that starts
        again serves text even if no worker runs."""
        self._described = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._keep_connected(worker)) for worker in self._workers]
        kept = self._store.description()
        return await self._described if kept is None else _decode_description(kept)

    async def close(self) -> None:
        """End the connections, and all that waits for them."""
        tasks = [*self._tasks, *(each.task for each in self._running.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lease, _ in self._held.values():
            lease.close()
        self._held.clear()

    async def _keep_connected(self, worker: _Worker) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(worker.path)
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            try:
                await self._read(worker, reader, writer)
            except (OSError, EOFError, msgspec.MsgspecError, WorkerLost) as error:
                log.debug("media worker at %s: %s", worker.path, error)
            finally:
                self._on_lost(worker)
                writer.transport.abort()

    async def _read(
        self, worker: _Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            size, more = _HEAD.unpack(await reader.readexactly(_HEAD.size))
            if size > MAX_MESSAGE_BYTES or more:
                raise WorkerLost(f"a message of {size} and {more} bytes")
            message = _decode(await reader.readexactly(size))
            if isinstance(message, MediaDescription):
                worker.writer = writer
                self._connected.set()
                if not self._described.done():
                    self._described.set_result(message)
                continue
            future = worker.waiting.pop(message.number, None)
            if future is not None and not future.done():
                future.set_result(message)

    def _on_lost(self, worker: _Worker) -> None:
        worker.writer = None
        if not any(each.writer for each in self._workers):
            self._connected.clear()
        waiting, worker.waiting = worker.waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(WorkerLost("the worker has ended"))

    async def _ask(self, picture: WantedPicture) -> MediaPrepared:
        """Have a worker prepare a picture. Raises Refused."""
        tried: list[_Worker] = []
        for _ in range(MAX_TRIES):
            try:
                async with asyncio.timeout(WORKER_WAIT_S):
                    await self._connected.wait()
            except TimeoutError:
                raise Refused("busy", "no media worker runs at present") from None
            ready = [worker for worker in self._workers if worker.writer is not None]
            worker = min(ready, key=lambda each: (tried.count(each), len(each.waiting)))
            tried.append(worker)
            try:
                answer = await self._send(worker, picture)
            except OSError:
                self.counts.lost += 1
                continue
            if isinstance(answer, MediaRefused):
                raise Refused(answer.code, answer.message, answer.key, answer.size)
            return answer
        raise Refused("internal", "the image has ended the processes that were to decode it")

    async def _send(self, worker: _Worker, picture: WantedPicture) -> MediaPrepared | MediaRefused:
        number = next(self._numbers) & 0x7FFFFFFF
        request = _encode(
            PrepareMedia(number, picture.url, bool(picture.data), detail=picture.detail, salt=picture.salt)
        )
        future = asyncio.get_running_loop().create_future()
        worker.waiting[number] = future
        try:
            assert worker.writer is not None
            worker.writer.write(_HEAD.pack(len(request), len(picture.data)) + request)
            worker.writer.write(picture.data)
            answer: MediaPrepared | MediaRefused = await future
            return answer
        except asyncio.CancelledError:
            if worker.writer is not None:
                abandoned = _encode(AbandonMedia(number))
                worker.writer.write(_HEAD.pack(len(abandoned), 0) + abandoned)
            raise
        finally:
            worker.waiting.pop(number, None)

    # -- pictures

    def typical_tokens(self) -> int:
        """As many tokens as the longest of the latest pictures; 0: there was none."""
        return max(self._latest, default=0)

    async def prepare(self, picture: WantedPicture) -> MediaPrepared:
        """The pages of a picture, of which the caller has a lease until :meth:`release`. Raises Refused."""
        if len(picture.data) <= HASHED_INLINE:
            memo = _memo(picture)
        else:
            memo = await asyncio.get_running_loop().run_in_executor(None, _memo, picture)
        known = self._recall(memo)
        if known is not None:
            self.counts.images["remembered"] += 1
            return known
        for _ in range(MAX_TRIES):
            prepared = await self._prepare_once(memo, picture)
            if self._hold(prepared.key):
                return prepared
        text = "the media cache has no room (--media-cache)"
        raise Refused("busy", text, prepared.key, prepared.size)

    def recall(self, picture: WantedPicture) -> MediaPrepared | None:
        """As :meth:`prepare`, without waiting and counting; None: it must wait."""
        return self._recall(_memo(picture)) if len(picture.data) <= HASHED_INLINE else None

    def _recall(self, memo: Memo) -> MediaPrepared | None:
        known = self._known.get(memo)
        if known is None or not self._hold(known.key):
            return None
        self._known.move_to_end(memo)
        return known

    async def _prepare_once(self, memo: Memo, picture: WantedPicture) -> MediaPrepared:
        """Requests for the same picture at the same time share a task; one that is cancelled leaves it to the
        others, and the last one ends it."""
        running = self._running.get(memo)
        if running is None:
            running = self._running[memo] = _Preparation(asyncio.create_task(self._ask(picture)))
            running.task.add_done_callback(lambda _: self._on_prepared(memo, running, bool(picture.url)))
        else:
            self.counts.images["remembered"] += 1
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if not running.waiting and not running.task.done():
                self._forget(memo, running)
                running.task.cancel()

    def _forget(self, memo: Memo, running: _Preparation) -> None:
        """Later requests start anew."""
        if self._running.get(memo) is running:
            del self._running[memo]

    def _on_prepared(self, memo: Memo, running: _Preparation, fetched: bool) -> None:
        """What a URL shows may change: it is fetched for each request."""
        self._forget(memo, running)
        task = running.task
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.counts.refused[error.code if isinstance(error, Refused) else "internal"] += 1
            return
        prepared = task.result()
        self.counts.prepare(prepared)
        self._latest.append(len(prepared.ids) // 4)
        if not fetched:
            self._remember(memo, prepared)

    def _remember(self, memo: Memo, prepared: MediaPrepared) -> None:
        old = self._known.pop(memo, None)
        if old is not None:
            self._known_bytes -= len(old.ids) + ENTRY_BYTES
        self._known[memo] = prepared
        self._known_bytes += len(prepared.ids) + ENTRY_BYTES
        while self._known_bytes > MAX_REMEMBERED:
            _, dropped = self._known.popitem(last=False)
            self._known_bytes -= len(dropped.ids) + ENTRY_BYTES

    # -- room

    @property
    def crowded(self) -> bool:
        """Whether requests wait for room in the store."""
        return self._last_room.locked()

    @contextlib.asynccontextmanager
    async def last_room(self) -> AsyncIterator[None]:
        """Be the only request on this host, in the order of their coming here, that waits for room while it
        has pictures."""
        await self._last_room.acquire()
        try:
            with contextlib.ExitStack() as held:
                while True:
                    try:
                        held.enter_context(self._store.last_room())
                        break
                    except BlockingIOError:
                        await asyncio.sleep(ROOM_RETRY_S)
                yield
        finally:
            # Not at once: other API servers look from time to time.
            asyncio.get_running_loop().call_later(2 * ROOM_RETRY_S, self._last_room.release)

    # -- leases

    def _hold(self, key: MediaKey) -> bool:
        """Whether the pages are in the store; they stay there until they are released."""
        held = self._held.get(key)
        if held is None:
            lease = None
            with contextlib.suppress(OSError):
                lease = self._store.lease(key)
            if lease is None:
                return False
            held = lease, 0
        self._held[key] = held[0], held[1] + 1
        return True

    def release(self, key: MediaKey) -> None:
        """A request that has prepared the picture is over."""
        held = self._held.pop(key, None)
        if held is None:
            return
        lease, count = held
        if count > 1:
            self._held[key] = lease, count - 1
        else:
            lease.close()

    def lease_of(self, key: MediaKey) -> Lease | None:
        """The lease of a picture of a running request."""
        held = self._held.get(key)
        return None if held is None else held[0]


def _memo(picture: WantedPicture) -> Memo:
    text = picture.data or picture.url.encode("utf-8", "surrogatepass")
    return hashlib.sha256(text).digest(), picture.detail, picture.salt
