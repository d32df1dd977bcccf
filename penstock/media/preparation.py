"""Prepares pictures: finds them in the store, or fetches, decodes, preprocesses and seals them."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import hashlib
import logging
import string
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from penstock.config.serve import ServeConfig
from penstock.media.fetch import FetchPolicy, fetch
from penstock.media.image_file import PictureLimits, open_picture
from penstock.media.prepared import PictureProcessor, PreparedPicture
from penstock.media.refused import Refused
from penstock.media.store import Lease, MediaStore, StoreFull
from penstock.media.turns import TenantTurns
from penstock.wire.media.worker import MediaPrepared, PrepareMedia

log = logging.getLogger(__name__)

MAX_SECONDS = 60.0
"""Time for one picture."""
MAX_DECODE_S = 30.0
"""Time to decode and preprocess one: 64 megapixels take a few seconds of a busy core."""
MAX_FETCHES = 8
"""Pictures that are fetched at a time: their bytes are in memory."""
ROOM_S = 2.0
"""How long a prepared picture waits for room in a full store."""
_ROOM_RETRY_S = 0.05
_FLIGHT_RETRY_S = 0.005
_LAST_ANSWER_S = 0.2
"""How long the answer about a picture that takes too long may take to be sent."""
LINGER_S = 0.2
"""How long a worker's own lease lasts after its answer, within which an API server takes one."""
TENANT_CHARACTERS = 32
"""Of a salt, which begins with the tenant of the request's key; the rest is the request's own."""
_IN_THREAD_BYTES = 256 << 10
"""Larger files are decoded from base64, and hashed, in a thread."""
_FROM_URL_ALPHABET = bytes.maketrans(b"-_", b"+/")
"""The alphabet for URLs is that of the bytes of Google's packages."""
_BASE64 = f"{string.ascii_letters}{string.digits}+/=-_{string.whitespace}".encode()


def tenant_of(salt: str) -> str:
    """The tenant of a request's salt; empty: none."""
    return salt[:TENANT_CHARACTERS]


class _Made(NamedTuple):
    """A lease, and how the pages came about."""

    lease: Lease
    found: bool
    decode_s: float = 0.0
    preprocess_s: float = 0.0


class PicturePreparer:
    """One worker's pictures. Use it on one event loop."""

    def __init__(
        self, processor: PictureProcessor, store: MediaStore, config: ServeConfig, policy: FetchPolicy
    ) -> None:
        self.processor = processor
        self._store = store
        self._policy = policy
        self._limits = PictureLimits(max_bytes=config.media_max_bytes, max_pixels=config.media_max_pixels)
        self._fetches = TenantTurns(MAX_FETCHES)
        self._decoder = ThreadPoolExecutor(1, "decoder")
        self._turns = TenantTurns(1)
        self._running: dict[bytes, asyncio.Lock] = {}
        """Keys that are being prepared here."""
        self.on_hung: Callable[[], None] = lambda: None
        """Called when a picture has taken too long: the process is to end, once the answer is sent."""

    @property
    def max_source_bytes(self) -> int:
        """Bytes of a picture's file, as base64."""
        return self._limits.max_bytes * 4 // 3 + 4

    async def prepare(self, request: PrepareMedia, data: bytes) -> MediaPrepared:
        """The answer to a request; the pages stay in the store for :data:`LINGER_S`. Raises Refused."""
        try:
            async with asyncio.timeout(MAX_SECONDS):
                return await self._prepare(request, data)
        except TimeoutError:
            raise Refused("timeout", f"the image was not prepared within {MAX_SECONDS:g} s") from None

    async def _prepare(self, request: PrepareMedia, data: bytes) -> MediaPrepared:
        began = time.monotonic()
        tenant = tenant_of(request.salt)
        if request.url:
            async with self._fetches.turn(tenant):
                data = await fetch(request.url, self._policy)
        elif request.base64:
            data = await _in_thread(_from_base64, data)
        fetch_s = time.monotonic() - began
        detail = self.processor.takes_detail(request.detail)
        key = await _in_thread(self._key, data, detail, request.salt)
        made = await self._pages(key, data, detail, tenant)
        asyncio.get_running_loop().call_later(LINGER_S, made.lease.close)
        facts = made.lease.pages().facts
        return MediaPrepared(
            number=request.number,
            key=key,
            size=made.lease.size,
            ids=facts.ids,
            grid=facts.grid,
            features=facts.features,
            found=made.found,
            source_bytes=facts.source_bytes,
            pixels=facts.pixels,
            seconds=(fetch_s, made.decode_s, made.preprocess_s),
            pool_bytes=self._store.used_bytes(),
        )

    def _key(self, data: bytes, detail: str, salt: str) -> bytes:
        digest = hashlib.blake2b(self.processor.digest, digest_size=32)
        for part in (detail.encode(), salt.encode("utf-8", "surrogatepass"), data):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    async def _pages(self, key: bytes, data: bytes, detail: str, tenant: str) -> _Made:
        if (lease := self._store.lease(key)) is not None:
            return _Made(lease, found=True)
        async with self._flight(key):
            if (lease := self._store.lease(key)) is not None:
                return _Made(lease, found=True)
            return await self._make(key, data, detail, tenant)

    @contextlib.asynccontextmanager
    async def _flight(self, key: bytes) -> AsyncIterator[None]:
        """Be the only one who prepares ``key``: here, where the others wait in order, and on the host."""
        lock = self._running.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                with contextlib.ExitStack() as held:
                    while True:
                        try:
                            held.enter_context(self._store.single_flight(key, wait=False))
                            break
                        except BlockingIOError:
                            await asyncio.sleep(_FLIGHT_RETRY_S)
                    yield
        finally:
            if not lock.locked():
                self._running.pop(key, None)

    async def _make(self, key: bytes, data: bytes, detail: str, tenant: str) -> _Made:
        loop = asyncio.get_running_loop()
        hung: asyncio.Future[None] = loop.create_future()
        timers: list[asyncio.TimerHandle] = []

        def on_time_over() -> None:
            log.warning("a picture of %d bytes takes more than %g s to decode", len(data), MAX_DECODE_S)
            hung.set_result(None)
            loop.call_later(_LAST_ANSWER_S, self.on_hung)

        def work() -> tuple[PreparedPicture, float, float]:
            loop.call_soon_threadsafe(lambda: timers.append(loop.call_later(MAX_DECODE_S, on_time_over)))
            try:
                return self._decode(key, data, detail)
            finally:
                loop.call_soon_threadsafe(lambda: timers[0].cancel())

        async with self._turns.turn(tenant):
            running = loop.run_in_executor(self._decoder, work)
            both: list[asyncio.Future[Any]] = [running, hung]
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                running.cancel()
        if hung.done():
            raise Refused("invalid", f"the image takes more than {MAX_DECODE_S:g} s to decode")
        prepared, decode_s, preprocess_s = await running
        return _Made(await self._seal(key, prepared), False, decode_s, preprocess_s)

    def _decode(self, key: bytes, data: bytes, detail: str) -> tuple[PreparedPicture, float, float]:
        """The thread's part, with the seconds to decode and to preprocess. Raises Refused."""
        if not self._store.begin_attempt(key):
            raise Refused("invalid", "the image has ended the processes that were to decode it")
        try:
            first = time.monotonic()
            image = open_picture(data, self._limits)
            second = time.monotonic()
            prepared = self.processor.prepare(image, detail, len(data))
            return prepared, second - first, time.monotonic() - second
        except ValueError as error:
            raise Refused("invalid", f"the model's processor does not take the image: {error}") from None
        finally:
            self._store.end_attempt(key)

    async def _seal(self, key: bytes, prepared: PreparedPicture) -> Lease:
        """Write the pages; those of other pictures may have to be released first. Raises Refused."""
        size = sum(array.nbytes for array in prepared.arrays.values())
        if size > self._store.capacity:
            text = f"the image has {size} bytes when it is prepared, and {self._store.capacity} are kept"
            raise Refused("too_large", f"{text} (--media-cache)")
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + ROOM_S
        while True:
            try:
                # In the same thread: a worker takes one core.
                return await loop.run_in_executor(self._decoder, self._store.write, key, *prepared)
            except StoreFull as error:
                if time.monotonic() > deadline:
                    text = f"the media cache has no room (--media-cache): {error}"
                    raise Refused("busy", text, key, size) from None
            await asyncio.sleep(_ROOM_RETRY_S)


T = TypeVar("T")


async def _in_thread(work: Callable[..., T], data: bytes, *arguments: str) -> T:
    """``work`` with ``data``: here if that is quick."""
    if len(data) <= _IN_THREAD_BYTES:
        return work(data, *arguments)
    return await asyncio.to_thread(work, data, *arguments)


def _from_base64(data: bytes) -> bytes:
    """Raises Refused, also for what no text of JSON has: nobody before has looked at all of it."""
    if others := data.translate(None, _BASE64):
        raise Refused("invalid", f"the image is not base64: it has the byte {others[:1]!r}")
    try:
        return binascii.a2b_base64(data.translate(_FROM_URL_ALPHABET))
    except binascii.Error as error:
        raise Refused("invalid", f"the image is not base64: {error}") from None
