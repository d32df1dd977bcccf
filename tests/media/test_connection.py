"""A media worker over its socket: what API servers send, and what they get."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import logging
import os
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

import penstock
from penstock.config.serve import ServeConfig
from penstock.logging_setup import RateLimitedLog
from penstock.media.connection import MediaConnections
from penstock.media.fetch import FetchPolicy
from penstock.media.preparation import PicturePreparer
from penstock.media.prepared import PreparedPicture
from penstock.media.store import MAX_ATTEMPTS, MediaStore
from penstock.media.synthetic_processor import SyntheticProcessor, image_token
from penstock.wire.media.worker import (
    AbandonMedia,
    FromMediaWorker,
    MediaDescription,
    MediaPrepared,
    MediaRefused,
    PrepareMedia,
)

DEMO = str(Path(penstock.__file__).parent / "demo")
HEAD = struct.Struct("<II")


def png(width: int = 100, height: int = 60, color: int = 7) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (color, 100, 200)).save(file, "PNG")
    return file.getvalue()


class Processor(SyntheticProcessor):
    """The synthetic one, which waits or fails when it is told to."""

    def __init__(self) -> None:
        super().__init__(DEMO, 64)
        self.may_go = threading.Event()
        self.may_go.set()
        self.error: Exception | None = None
        self.calls = 0

    def prepare(self, image: Image.Image, detail: str, source_bytes: int) -> PreparedPicture:
        self.calls += 1
        self.may_go.wait(30)
        if self.error is not None:
            raise self.error
        return super().prepare(image, detail, source_bytes)


class Peer:
    """An API server's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._number = 0

    def send(self, data: bytes = b"", **fields: Any) -> int:
        self._number += 1
        request = msgspec.msgpack.encode(PrepareMedia(self._number, **fields))
        self._writer.write(HEAD.pack(len(request), len(data)) + request + data)
        return self._number

    def abandon(self, number: int) -> None:
        message = msgspec.msgpack.encode(AbandonMedia(number))
        self._writer.write(HEAD.pack(len(message), 0) + message)

    async def answered(self) -> None:
        """All that was sent has come."""
        assert (await self.ask(url="http://127.0.0.1/")).code == "forbidden"

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def receive(self) -> Any:
        size, more = HEAD.unpack(await self._reader.readexactly(HEAD.size))
        assert not more
        return msgspec.msgpack.decode(await self._reader.readexactly(size), type=FromMediaWorker)

    async def ask(self, data: bytes = b"", **fields: Any) -> Any:
        number = self.send(data, **fields)
        answer = await self.receive()
        assert answer.number == number
        return answer

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class Worker:
    def __init__(self, directory: Path, policy: FetchPolicy) -> None:
        self.processor = Processor()
        (directory / "store").mkdir()
        self.store = MediaStore(str(directory / "store"), 4 << 20)
        config = ServeConfig(media_max_bytes=1 << 20)
        self.preparer = PicturePreparer(self.processor, self.store, config, policy)
        self.path = str(directory / "w.sock")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Worker]:
        log = RateLimitedLog(logging.getLogger("penstock.media"))
        before = asyncio.all_tasks()
        server = await asyncio.start_unix_server(MediaConnections(self.preparer, log).serve, self.path)
        try:
            yield self
        finally:
            self.processor.may_go.set()
            server.close()
            if ends := asyncio.all_tasks() - before:  # the worker's ends of the connections
                await asyncio.wait(ends)
            await asyncio.sleep(0)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Peer]:
        peer = Peer(*await asyncio.open_unix_connection(self.path))
        try:
            description = await peer.receive()
            assert description == MediaDescription(image_token(DEMO)[0], processor="synthetic")
            yield peer
        finally:
            await peer.close()


Case = Callable[[Worker, Peer], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Case], None]:
    """Runs a case with a worker and a connection to it."""

    async def run(case: Case) -> None:
        worker = Worker(tmp_path, FetchPolicy(local_path=str(tmp_path)))
        async with worker.running(), worker.connected() as peer:
            await case(worker, peer)

    return lambda case: asyncio.run(asyncio.wait_for(run(case), 60))


def test_both_alphabets_of_base64(play: Callable[[Case], None]) -> None:
    pictures = (png(color=color) for color in range(100))
    picture = next(each for each in pictures if {*b"-_"} & {*base64.urlsafe_b64encode(each)})

    async def case(worker: Worker, peer: Peer) -> None:
        usual = await peer.ask(base64.b64encode(picture), base64=True)
        assert (await peer.ask(base64.urlsafe_b64encode(picture), base64=True)).key == usual.key

    play(case)


def test_a_picture_is_prepared_once(play: Callable[[Case], None]) -> None:
    async def case(worker: Worker, peer: Peer) -> None:
        first = await peer.ask(base64.b64encode(png()), base64=True)
        assert isinstance(first, MediaPrepared)
        assert np.frombuffer(first.ids, "<i4").tolist() == [image_token(DEMO)[1]] * 8
        assert (first.grid, first.features, first.found) == ((1, 2, 4), 8, False)
        assert (first.source_bytes, first.pixels, first.pool_bytes) == (len(png()), 6000, first.size)
        lease = worker.store.lease(first.key)
        assert lease is not None
        with lease:
            assert lease.pages().arrays["pixel_values"].shape == (1, 3, 56, 112)
        again = await peer.ask(png())
        assert again == msgspec.structs.replace(
            first, number=2, found=True, seconds=again.seconds, pool_bytes=again.pool_bytes
        )
        keys = {first.key}
        for fields in ({"salt": "s"}, {"detail": "low"}, {"detail": "low", "salt": "s"}):
            keys.add((await peer.ask(png(), **fields)).key)
        keys.add((await peer.ask(png(color=8))).key)
        assert (await peer.ask(png(), detail="high")).key == first.key
        assert len(keys) == worker.processor.calls == 5

    play(case)


def test_the_same_picture_at_the_same_time_is_prepared_once(play: Callable[[Case], None]) -> None:
    async def case(worker: Worker, peer: Peer) -> None:
        async with worker.connected() as other:
            for _ in range(10):
                peer.send(png(300, 300))
                other.send(png(300, 300))
            answers = [await each.receive() for _ in range(10) for each in (peer, other)]
        assert sum(not each.found for each in answers) == worker.processor.calls == 1
        assert answers[0].features == 64  # the most
        assert not worker.preparer._running

    play(case)


def test_files_are_read_where_that_is_allowed(play: Callable[[Case], None], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())

    async def case(worker: Worker, peer: Peer) -> None:
        assert isinstance(await peer.ask(url=f"file://{tmp_path}/a.png"), MediaPrepared)
        assert (await peer.ask(url="file:///etc/passwd")).code == "forbidden"
        assert (await peer.ask(url="http://127.0.0.1:1/")).code == "forbidden"

    play(case)


def test_what_is_no_picture_is_refused_and_the_connection_goes_on(play: Callable[[Case], None]) -> None:
    async def case(worker: Worker, peer: Peer) -> None:
        assert (await peer.ask(b"A", base64=True)).code == "invalid"
        picture = base64.b64encode(png())
        for byte in (b"\0", b"\xff", b"!"):
            refused = await peer.ask(picture[:40] + byte + picture[40:], base64=True)
            assert (refused.code, "not base64" in refused.message) == ("invalid", True)
        assert (await peer.ask(b"GIF89a")).code == "invalid"
        large = await peer.ask(b"x" * (2 << 20))
        assert (large.code, "--media-max-bytes" in large.message) == ("too_large", True)
        worker.processor.error = ValueError("aspect ratio")
        assert "does not take the image: aspect ratio" in (await peer.ask(png())).message
        worker.processor.error = RuntimeError("a fault of ours")
        assert (await peer.ask(png())).code == "internal"
        worker.processor.error = None
        assert isinstance(await peer.ask(png()), MediaPrepared)
        key = (await peer.ask(png(color=9))).key
        for _ in range(MAX_ATTEMPTS):
            worker.store.begin_attempt(key)
        os.unlink(f"{worker.store.directory}/{key.hex()}")
        assert "has ended the processes" in (await peer.ask(png(color=9))).message

    play(case)


def test_a_full_store_is_waited_for_and_then_refused(
    play: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.media.preparation.ROOM_S", 0.05)
    monkeypatch.setattr("penstock.media.preparation.LINGER_S", 0.0)

    async def case(worker: Worker, peer: Peer) -> None:
        worker.store.capacity = 800_000
        first = await peer.ask(png(200, 200))
        assert isinstance(first, MediaPrepared)
        lease = worker.store.lease(first.key)
        assert lease is not None
        with lease:
            refused = await peer.ask(png(201, 200))
            assert (refused.code, "--media-cache" in refused.message) == ("busy", True)
        assert isinstance(await peer.ask(png(201, 200)), MediaPrepared)
        worker.store.capacity = 400_000
        assert (await peer.ask(png(202, 200))).code == "too_large"

    play(case)


def test_a_picture_that_takes_too_long_is_refused_and_ends_the_worker(
    play: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.media.preparation.MAX_DECODE_S", 0.01)
    monkeypatch.setattr("penstock.media.preparation._LAST_ANSWER_S", 0.0)

    async def case(worker: Worker, peer: Peer) -> None:
        ended = asyncio.Event()
        worker.preparer.on_hung = ended.set
        worker.processor.may_go.clear()
        refused = await peer.ask(png())
        assert (refused.code, "to decode" in refused.message) == ("invalid", True)
        await ended.wait()

    play(case)


def test_a_picture_whose_time_is_over_is_refused(
    play: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.media.preparation.MAX_SECONDS", 0.005)

    async def case(worker: Worker, peer: Peer) -> None:
        worker.processor.may_go.clear()
        assert (await peer.ask(png())).code == "timeout"

    play(case)


def test_an_abandoned_picture_is_not_decoded_later(play: Callable[[Case], None]) -> None:
    async def case(worker: Worker, peer: Peer) -> None:
        worker.processor.may_go.clear()
        first = peer.send(png())
        for color in range(8, 11):
            peer.abandon(peer.send(png(color=color)))
        peer.abandon(999)
        await peer.answered()
        worker.processor.may_go.set()
        assert (await peer.receive()).number == first
        peer.abandon(first)
        assert isinstance(await peer.ask(png(color=11)), MediaPrepared)
        assert worker.processor.calls == 2

    play(case)


def test_tenants_take_turns(play: Callable[[Case], None]) -> None:
    async def case(worker: Worker, peer: Peer) -> None:
        worker.processor.may_go.clear()
        many, few = "a" * 32, "b" * 32
        sent = [peer.send(png(color=color), salt=f"{many}{color}") for color in range(6)]
        one = peer.send(png(), salt=few)
        await peer.answered()
        worker.processor.may_go.set()
        order = [(await peer.receive()).number for _ in range(7)]
        assert order == [sent[0], sent[1], one, *sent[2:]]

    play(case)


def test_what_waits_is_bounded(play: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.media.connection.MAX_WAITING_BYTES", 500)

    async def case(worker: Worker, peer: Peer) -> None:
        worker.processor.may_go.clear()
        peer.send(png())
        assert (await peer.ask(b"x" * 500)).code == "busy"
        worker.processor.may_go.set()
        assert isinstance(await peer.receive(), MediaPrepared)
        assert (await peer.ask(b"x" * 501)).code == "invalid"  # alone it is taken

    play(case)


def test_a_tenant_leaves_room_for_others(
    play: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.media.connection.MAX_WAITING", 4)

    async def case(worker: Worker, peer: Peer) -> None:
        worker.processor.may_go.clear()
        sent = [peer.send(png(color=color), salt="a" * 32 + str(color)) for color in range(3)]
        assert (await peer.ask(png(), salt="a" * 32)).code == "busy"
        sent.append(peer.send(png(), salt="b" * 32))
        assert (await peer.ask(png(), salt="c" * 32)).code == "busy", "no room is left at all"
        worker.processor.may_go.set()
        answers = [await peer.receive() for _ in sent]
        assert {each.number for each in answers if isinstance(each, MediaPrepared)} == {*sent}
        assert isinstance(await peer.ask(png(), salt="a" * 32), MediaPrepared), "none waits any more"

    play(case)


def test_a_worker_that_ends_with_connections_logs_nothing(tmp_path: Path) -> None:
    complaints: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        worker = Worker(tmp_path, FetchPolicy())
        async with worker.running(), worker.connected():
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()  # as a loop does when it ends
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert not complaints


def test_a_peer_that_does_not_speak_the_language_is_cut(play: Callable[[Case], None]) -> None:
    async def case(worker: Worker, peer: Peer) -> None:
        for nonsense in (HEAD.pack(3, 0) + b"\xc1\xc1\xc1", HEAD.pack(1 << 30, 0)):
            async with worker.connected() as other:
                other.write(nonsense)
                with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                    await other.receive()
        refused = await peer.ask(b"")
        assert isinstance(refused, MediaRefused)

    play(case)
