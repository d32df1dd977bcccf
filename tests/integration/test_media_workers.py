"""Media workers of a server, killed and restarted; what they keep in memory ends with the server."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import signal
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from PIL import Image

from penstock.media.store import MediaStore
from penstock.supervisor.startup.run_directory import PID_FILE, RunDirectory
from penstock.wire.media.worker import (
    FromMediaWorker,
    MediaDescription,
    MediaPrepared,
    PrepareMedia,
    media_socket,
)
from tests.integration.server import SYNTHETIC, Server, wait_until

MEMORY = Path("/dev/shm")
HEAD = struct.Struct("<II")

pytestmark = pytest.mark.skipif(not MEMORY.is_dir(), reason="the store is in /dev/shm")


@pytest.fixture
def run_dir() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="run")
    yield path
    shutil.rmtree(path)


def store_of(server: Server) -> Path:
    """The directory of the server's store."""
    own = f"{server.process.pid}\n"
    (found,) = (path for path in MEMORY.glob("penstock-*/media") if _text(path.parent / PID_FILE) == own)
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another server's, gone meanwhile
        return ""


def prepare(run_dir: str, worker: int, data: bytes) -> MediaPrepared:
    async def ask() -> MediaPrepared:
        reader, writer = await asyncio.open_unix_connection(media_socket(run_dir, worker))
        request = msgspec.msgpack.encode(PrepareMedia(1))
        writer.write(HEAD.pack(len(request), len(data)) + request + data)
        answers = []
        try:
            for _ in range(2):
                size, _ = HEAD.unpack(await reader.readexactly(HEAD.size))
                answers.append(msgspec.msgpack.decode(await reader.readexactly(size), type=FromMediaWorker))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        assert isinstance(answers[0], MediaDescription)
        assert isinstance(answers[1], MediaPrepared)
        return answers[1]

    return asyncio.run(ask())


def answers(run_dir: str, worker: int, data: bytes) -> bool:
    try:
        prepare(run_dir, worker, data)
    except (OSError, EOFError):
        return False
    return True


def picture(color: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (90, 60), (color, 0, 0)).save(file, "PNG")
    return file.getvalue()


def test_workers_are_restarted_and_nothing_is_left(run_dir: str, tmp_path: Path) -> None:
    options = ("--synthetic-image-tokens", "64", "--media-workers", "2", "--run-dir", run_dir)
    with Server(*SYNTHETIC, *options, directory=tmp_path) as server:
        assert len(server.children("media-worker")) == 2
        directory = store_of(server)
        first = prepare(run_dir, 0, picture(1))
        assert not first.found
        assert prepare(run_dir, 1, picture(1)).found
        store = MediaStore(str(directory), 1 << 20)
        lease = store.lease(first.key)
        assert lease is not None
        with lease:
            assert lease.pages().facts.features == first.features == 6
        assert store.used_bytes() == first.size
        store.close()

        (victim,) = server.children("media-worker 0")
        victim.kill()
        victim.wait(60)
        wait_until(lambda: answers(run_dir, 0, picture(2)), 60, "the worker's successor")
        assert prepare(run_dir, 0, picture(1)).found  # its pages outlive a worker
        killed = f"media-worker 0 was killed by {signal.SIGKILL.name}"
        wait_until(lambda: killed in server.log, 60, "its death in the log")
        wait_until(
            lambda: server.metric("penstock:process_restarts", process="media-worker 0") == 1,
            60,
            "the restart in /metrics",
        )
        server.complete()
    assert not directory.parent.exists()


def test_what_a_killed_server_leaves_goes_at_the_next_start(run_dir: str, tmp_path: Path) -> None:
    options = ("--synthetic-image-tokens", "64", "--media-workers", "1", "--run-dir", run_dir)
    with Server(*SYNTHETIC, *options, directory=tmp_path) as server:
        directory = store_of(server)
        prepare(run_dir, 0, picture(1))
        server.process.kill()
        server.process.wait()
        for each in server._children:
            each.wait(60)
        with pytest.raises(httpx.ConnectError):
            server.get("/health")
        with RunDirectory(None, [str(MEMORY)], 4096):
            assert not directory.exists()
