"""Pages of pictures on their way to engines that lack them."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.dispatch import page_sender
from penstock.dispatch.connections import EngineState
from penstock.dispatch.page_sender import MAX_WANTED, PageSender
from penstock.media.pages import PageFacts
from penstock.media.store import MediaStore
from penstock.wire.decoding import decode_from_server
from penstock.wire.media.items import PIECE, PagePiece
from penstock.wire.messages import (
    WireError,
)

KEY, OTHER = b"k" * 32, b"o" * 32


class Sent:
    """In place of the connections."""

    def __init__(self) -> None:
        self.pieces: list[PagePiece] = []

    def send(self, engine: EngineState, part: bytes) -> None:
        piece = decode_from_server(part)
        assert isinstance(piece, PagePiece)
        self.pieces.append(piece)


@pytest.fixture
def store(tmp_path: Path) -> MediaStore:
    store = MediaStore(str(tmp_path), 1 << 24)
    store.write(KEY, PageFacts(b"\1\0\0\0", 1), {"a": np.arange(PIECE // 2, dtype="<f4")}).close()
    store.write(OTHER, PageFacts(b"\2\0\0\0", 1), {"a": np.zeros(4, "<f4")}).close()
    return store


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_sender, "PACE_S", 0.0)


def made(store: MediaStore) -> tuple[PageSender, Sent, EngineState]:
    sent: Any = Sent()
    sender, engine = PageSender(sent), EngineState(0)
    sender.lease_of = store.lease
    link: Any = object()
    engine.link, engine.connections = link, 1
    return sender, sent, engine


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_file_goes_in_pieces_with_its_digest(store: MediaStore) -> None:
    async def run() -> None:
        sender, sent, engine = made(store)
        sender.on_wanted(engine, KEY)
        sender.on_wanted(engine, OTHER)
        await turns()
        mine = [piece for piece in sent.pieces if piece.key == KEY]
        whole = (Path(store.directory) / KEY.hex()).read_bytes()
        assert b"".join(piece.data for piece in mine) == whole
        assert [piece.position for piece in mine] == list(range(0, len(whole), PIECE))
        assert [bool(piece.digest) for piece in mine] == [False] * (len(mine) - 1) + [True]
        assert mine[-1].digest == hashlib.blake2b(whole, digest_size=32).digest()
        assert [piece.key for piece in sent.pieces] == [KEY] * len(mine) + [OTHER]

    asyncio.run(run())


def test_what_is_not_there_is_said(store: MediaStore) -> None:
    async def run() -> None:
        sender, sent, engine = made(store)
        sender.on_wanted(engine, b"n" * 32)
        assert sent.pieces == [PagePiece(b"n" * 32, 0, b"")]

    asyncio.run(run())


def test_a_lost_connection_gets_no_more_and_the_next_one_all_it_wants(store: MediaStore) -> None:
    async def run() -> None:
        sender, sent, engine = made(store)
        sender.on_wanted(engine, KEY)
        first = len(sent.pieces)
        engine.connections = 2
        sender.on_wanted(engine, OTHER)
        await turns()
        assert [piece.key for piece in sent.pieces] == [KEY] * first + [OTHER]
        sender.on_wanted(engine, OTHER)
        assert len(sent.pieces) == first + 2

    asyncio.run(run())


def test_an_engine_that_wants_too_much_is_refused(store: MediaStore) -> None:
    async def run() -> None:
        sender, _, engine = made(store)
        for _ in range(MAX_WANTED):
            sender.on_wanted(engine, KEY)
        with pytest.raises(WireError, match="256 pictures"):
            sender.on_wanted(engine, KEY)

    asyncio.run(run())
