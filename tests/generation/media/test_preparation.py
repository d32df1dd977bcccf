"""The pictures of one request, with a client of the test's own in place of media workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from penstock.generation.media.preparation import Pictures
from penstock.generation.media.source import ImageSource
from penstock.http.errors import ApiError
from penstock.media.client import MediaClient, WantedPicture
from penstock.media.refused import Refused
from penstock.wire.media.worker import MediaDescription, MediaPrepared


class Client:
    """A store of 10 bytes, of which a picture takes as many as it has characters of base64."""

    capacity = 10

    def __init__(self, others: int = 0) -> None:
        self.others = others
        """Bytes that other requests hold, until one waits for room."""
        self.held: list[bytes] = []
        self.crowded = False
        self.turns = 0
        self.slow = 0
        """Pictures that do not come before the turn is over."""

    @asynccontextmanager
    async def last_room(self) -> AsyncIterator[None]:
        assert self.held == []
        self.turns += 1
        self.others = 0
        yield

    async def prepare(self, picture: WantedPicture) -> MediaPrepared:
        key, size = bytes(picture.data), len(picture.data)
        self.slow -= 1
        await asyncio.sleep(0 if self.slow < 0 else 60)
        if self.others + sum(map(len, {*self.held, key})) > self.capacity:
            raise Refused("busy", "no room", key, size)
        self.held.append(key)
        return MediaPrepared(1, key, size, b"")

    def release(self, key: bytes) -> None:
        self.held.remove(key)


def prepare(client: Client, *pictures: str) -> Pictures:
    made = Pictures(cast("MediaClient", client), 7, MediaDescription("<image>"))
    sources = [ImageSource(f"image {at}", f"data:;base64,{each}") for at, each in enumerate(pictures)]
    try:
        asyncio.run(made.prepare(sources, ""))
    finally:
        made.release()
    return made


def test_pictures_that_never_fit_together_are_the_requests_fault() -> None:
    client = Client()
    with pytest.raises(
        ApiError, match=r"image 2: .* 12 bytes or more .* 10 are kept \(--media-cache\)"
    ) as caught:
        prepare(client, "AAAA", "BBBB", "CCCC")
    assert (caught.value.status, caught.value.code) == (400, "invalid_image")
    assert client.held == []


def test_pictures_that_never_fit_are_refused_beside_those_of_others() -> None:
    client = Client(others=8)
    with pytest.raises(ApiError, match="12 bytes or more") as caught:
        prepare(client, "AAAA", "BBBB", "CCCC")
    assert caught.value.status == 400
    assert (client.held, client.turns) == ([], 0)


def test_the_same_picture_again_takes_no_more_room() -> None:
    assert len(prepare(Client(), "AAAA", "BBBB", "AAAA", "BBBB").prepared) == 4


def test_pictures_that_fit_wait_for_those_of_others() -> None:
    client = Client(others=4)
    assert [each.key for each in prepare(client, "AAAA", "BBBB").prepared] == [b"AAAA", b"BBBB"]
    assert client.held == []


def test_a_turn_ends_for_one_whose_pictures_come_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.generation.media.preparation.TURN_S", 0.01)
    client = Client()
    client.crowded, client.slow = True, 2
    assert len(prepare(client, "AAAA", "BBBB").prepared) == 2
    assert (client.turns, client.held) == (3, [])


def test_room_that_does_not_come_is_the_servers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.generation.media.preparation.ROOM_WAIT_S", 0.01)
    client = Client(others=8)
    monkeypatch.setattr(client, "last_room", contextlib.nullcontext)
    with pytest.raises(ApiError, match="image 0: the media cache has no room") as caught:
        prepare(client, "AAAA")
    assert (caught.value.status, caught.value.code) == (503, "media_busy")
