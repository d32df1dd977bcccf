"""An API server's side of the media workers, with workers of the test's own on real sockets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.media.client import MediaClient, WantedPicture
from penstock.media.pages import PageFacts
from penstock.media.refused import Refused
from penstock.media.store import MediaStore
from penstock.metrics.media_metrics import MediaMetrics
from penstock.wire.media.worker import (
    AbandonMedia,
    MediaDescription,
    MediaPrepared,
    MediaRefused,
    PrepareMedia,
    ToMediaWorker,
    media_socket,
)

HEAD = struct.Struct("<II")
IDS = np.array([1, 7, 7, 2], "<i4").tobytes()
PENDING = MediaRefused(0, "busy", "no answer for now")
Answer = Callable[[PrepareMedia, bytes], MediaPrepared | MediaRefused | None]
"""None: the worker ends."""


def prepared(store: MediaStore, request: PrepareMedia, key: bytes = b"k" * 32) -> MediaPrepared:
    with store.write(key, PageFacts(IDS, 2), {"a": np.zeros(4, "<f4")}) as lease:
        return MediaPrepared(request.number, key, lease.size, IDS, features=2)


@asynccontextmanager
async def worker(run_dir: Path, number: int, answer: Answer) -> AsyncIterator[list[tuple[str, bytes]]]:
    """Yields the URLs and bytes that it was sent."""
    sent: list[tuple[str, bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send(message: MediaDescription | MediaPrepared | MediaRefused) -> None:
            data = msgspec.msgpack.encode(message)
            writer.write(HEAD.pack(len(data), 0) + data)

        send(MediaDescription("<image>"))
        try:
            while True:
                size, more = HEAD.unpack(await reader.readexactly(HEAD.size))
                request = msgspec.msgpack.decode(await reader.readexactly(size), type=ToMediaWorker)
                if isinstance(request, AbandonMedia):
                    sent.append(("abandoned", b""))
                    continue
                data = await reader.readexactly(more)
                sent.append((request.url, data))
                found = answer(request, data)
                if found is None:
                    break
                if found is not PENDING:
                    send(found)
        except (EOFError, OSError, asyncio.CancelledError):
            pass
        writer.transport.abort()

    server = await asyncio.start_unix_server(serve, media_socket(str(run_dir), number))
    try:
        yield sent
    finally:
        server.close()


@pytest.fixture
def store(tmp_path: Path) -> MediaStore:
    return MediaStore(str(tmp_path), 1 << 20)


@asynccontextmanager
async def connected(tmp_path: Path, store: MediaStore, workers: int) -> AsyncIterator[MediaClient]:
    client = MediaClient(str(tmp_path), workers, store, MediaMetrics())
    try:
        assert (await client.start()).placeholder == "<image>"
        yield client
    finally:
        await client.close()


def test_the_same_picture_is_prepared_once(tmp_path: Path, store: MediaStore) -> None:
    async def run() -> None:
        async with (
            worker(tmp_path, 0, lambda request, data: prepared(store, request)) as sent,
            connected(tmp_path, store, 1) as client,
        ):
            picture = WantedPicture("", b"QUJD")
            both = await asyncio.gather(client.prepare(picture), client.prepare(picture))
            assert both[0].ids == both[1].ids == IDS
            await client.prepare(picture)
            assert sent == [("", b"QUJD")]
            assert client.counts.images == {"decoded": 1, "remembered": 2}
            await client.prepare(WantedPicture("", b"QUJD", salt="other"))
            assert len(sent) == 2

    asyncio.run(run())


def test_what_a_url_shows_is_fetched_each_time(tmp_path: Path, store: MediaStore) -> None:
    async def run() -> None:
        async with (
            worker(tmp_path, 0, lambda request, data: prepared(store, request)) as sent,
            connected(tmp_path, store, 1) as client,
        ):
            for _ in range(2):
                await client.prepare(WantedPicture("https://example.org/a.png"))
            assert sent == [("https://example.org/a.png", b"")] * 2

    asyncio.run(run())


def test_pages_stay_while_a_request_has_them(tmp_path: Path, store: MediaStore) -> None:
    async def run() -> None:
        async with (
            worker(tmp_path, 0, lambda request, data: prepared(store, request)) as sent,
            connected(tmp_path, store, 1) as client,
        ):
            picture = WantedPicture("", b"QUJD")
            first = await client.prepare(picture)
            await client.prepare(picture)
            client.release(first.key)
            assert client.lease_of(first.key) is not None
            client.release(first.key)
            assert client.lease_of(first.key) is None
            (tmp_path / first.key.hex()).unlink()  # as if it had been evicted
            await client.prepare(picture)
            assert len(sent) == 2

    asyncio.run(run())


def test_a_picture_whose_worker_ends_goes_to_another(tmp_path: Path, store: MediaStore) -> None:
    async def run() -> None:
        async with (
            worker(tmp_path, 0, lambda request, data: None) as first,
            worker(tmp_path, 1, lambda request, data: prepared(store, request)) as second,
            connected(tmp_path, store, 2) as client,
        ):
            pictures = [WantedPicture("", data) for data in (b"QUJD", b"QUJE", b"QUJF")]
            found = await asyncio.gather(*map(client.prepare, pictures))
            assert [each.ids for each in found] == [IDS] * 3
            assert len(second) == 3
            assert client.counts.lost >= len(first)

    asyncio.run(run())


def test_a_refused_picture_is_asked_for_again(tmp_path: Path, store: MediaStore) -> None:
    async def run() -> None:
        def refuse(request: PrepareMedia, data: bytes) -> MediaRefused:
            return MediaRefused(request.number, "invalid", "it is no image")

        async with worker(tmp_path, 0, refuse) as sent, connected(tmp_path, store, 1) as client:
            for _ in range(2):
                with pytest.raises(Refused, match="it is no image") as caught:
                    await client.prepare(WantedPicture("", b"QUJD"))
                assert caught.value.code == "invalid"
            assert len(sent) == 2
            assert client.counts.refused == {"invalid": 2}

    asyncio.run(run())


def test_a_request_that_is_cancelled_leaves_the_picture_to_the_others(
    tmp_path: Path, store: MediaStore
) -> None:
    async def run() -> None:
        async with (
            worker(tmp_path, 0, lambda request, data: prepared(store, request)) as sent,
            connected(tmp_path, store, 1) as client,
        ):
            waits = [asyncio.ensure_future(client.prepare(WantedPicture("", b"QUJD"))) for _ in range(2)]
            await asyncio.sleep(0)
            waits[0].cancel()
            assert (await waits[1]).ids == IDS
            assert len(sent) == 1

    asyncio.run(run())


def test_what_nobody_waits_for_is_abandoned(tmp_path: Path, store: MediaStore) -> None:
    async def run() -> None:
        picture, answers = WantedPicture("", b"QUJD"), [PENDING, None]
        came = asyncio.Event()

        def answer(request: PrepareMedia, data: bytes) -> MediaPrepared | MediaRefused | None:
            came.set()
            return answers.pop(0) if len(answers) > 1 else prepared(store, request)

        async with worker(tmp_path, 0, answer) as sent, connected(tmp_path, store, 1) as client:
            waits = [asyncio.ensure_future(client.prepare(picture)) for _ in range(2)]
            await came.wait()
            for each in waits:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            assert (await client.prepare(picture)).ids == IDS
            assert sent == [("", b"QUJD"), ("abandoned", b""), ("", b"QUJD")]

    asyncio.run(run())


def test_an_api_server_that_starts_again_needs_no_worker(tmp_path: Path, store: MediaStore) -> None:
    store.describe(msgspec.msgpack.encode(MediaDescription("<image>")))

    async def run() -> None:
        async with connected(tmp_path, store, 1):
            pass

    asyncio.run(run())
