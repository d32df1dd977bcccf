"""Pages that the host's store lacks: asked for, checked, written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import pytest

from penstock.engine.media import page_supply
from penstock.engine.media.page_supply import PageSupply, Want
from penstock.wire.media.items import MediaItem, PagePiece
from penstock.wire.messages import MEDIA_GONE, UNAVAILABLE, WireError
from tests.engine.media.pictures import Pictures, file_of, key, pictures_in, prompt


@pytest.fixture
def pictures(tmp_path: Path) -> Iterator[Pictures]:
    with pictures_in(tmp_path) as made:
        yield made


def item(name: str, size: int | None = None) -> MediaItem:
    return MediaItem(key(name), 0, 8, len(file_of(name, 6)) if size is None else size)


def pieces(name: str, size: int = 100) -> list[PagePiece]:
    data = file_of(name, 6)
    digest = blake2b(data, digest_size=32).digest()
    return [
        PagePiece(key(name), at, data[at : at + size], digest if at + size >= len(data) else b"")
        for at in range(0, len(data), size)
    ]


def asked(supply: PageSupply) -> list[tuple[int, bytes]]:
    return [(server, message.key) for server, message in supply.take_wanted()]


def settled(supply: PageSupply) -> list[tuple[Want, str]]:
    """What has settled once all is written."""
    if supply._writer is not None:
        supply._writer.submit(int).result()
    return supply.take_settled()


def test_pages_come_once_for_all_streams(pictures: Pictures) -> None:
    supply = pictures.supply
    for _ in range(3):
        assert not supply.has(0, item("a"))
    assert asked(supply) == [(0, key("a"))]
    with pytest.raises(LookupError):
        supply.read(item("a"))
    for piece in pieces("a"):
        assert not settled(supply)
        supply.receive(0, piece)
    assert settled(supply) == [((0, key("a")), "")]
    assert supply.has(0, item("a"), keep=True)
    assert supply.read(item("a")).facts.features == 6
    assert asked(supply) == []
    assert supply.asked == 1


def test_each_api_server_is_asked_for_itself_and_the_first_one_serves_all(pictures: Pictures) -> None:
    supply = pictures.supply
    assert not supply.has(0, item("a"))
    assert not supply.has(1, item("a"))
    assert asked(supply) == [(0, key("a")), (1, key("a"))]
    for piece in pieces("a"):
        supply.receive(1, piece)
    assert settled(supply) == [((1, key("a")), ""), ((0, key("a")), "")]
    for piece in pieces("a"):
        supply.receive(0, piece)  # too late, and no harm
    assert settled(supply) == [((0, key("a")), "")]


def test_an_api_server_that_lacks_them_too(pictures: Pictures) -> None:
    supply = pictures.supply
    assert not supply.has(0, item("a"))
    supply.receive(0, PagePiece(key("a"), 0, b""))
    assert settled(supply) == [((0, key("a")), MEDIA_GONE)]
    assert not supply.has(0, item("a"))
    assert len(asked(supply)) == 2


def test_a_store_without_room(pictures: Pictures) -> None:
    pictures.store.capacity = 10
    assert not pictures.supply.has(0, item("a"))
    for piece in pieces("a"):
        pictures.supply.receive(0, piece)
    assert settled(pictures.supply) == [((0, key("a")), UNAVAILABLE)]


def test_a_store_that_fails_costs_these_streams_alone(pictures: Pictures) -> None:
    assert not pictures.supply.has(0, item("a"))
    shutil.rmtree(pictures.store.directory)
    for piece in pieces("a"):
        pictures.supply.receive(0, piece)
    assert settled(pictures.supply) == [((0, key("a")), UNAVAILABLE)]


def test_wrong_pieces(pictures: Pictures) -> None:
    supply = pictures.supply
    assert not supply.has(0, item("a"))
    first, *_, last = pieces("a")
    with pytest.raises(WireError, match="from byte 100 on, 0 are there"):
        supply.receive(0, PagePiece(key("a"), 100, b"x"))
    supply.receive(0, first)
    with pytest.raises(WireError, match=r"of pages, Submit.media says"):
        supply.receive(0, PagePiece(key("a"), 100, bytes(10_000)))
    with pytest.raises(WireError, match="not those of their digest"):
        supply.receive(0, PagePiece(key("a"), 100, b"x", last.digest))
    junk = bytes(200)
    assert not supply.has(1, item("b", len(junk)))
    with pytest.raises(WireError, match="no pages"):
        supply.receive(1, PagePiece(key("b"), 0, junk, blake2b(junk, digest_size=32).digest()))
    supply.drop_server(0)
    supply.drop_server(1)
    supply.receive(0, first)  # of the connection before
    assert settled(supply) == []


def test_an_api_server_is_asked_for_a_bounded_number_of_bytes(
    pictures: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    supply, size = pictures.supply, item("a").size
    monkeypatch.setattr(page_supply, "MAX_WANTED_BYTES", 2 * size)
    for name in "abcd":
        assert not supply.has(0, item(name))
    assert not supply.has(1, item("big", 100 * size))  # a single one may have more
    assert asked(supply) == [(0, key("a")), (0, key("b")), (1, key("big"))]
    for piece in pieces("a"):
        supply.receive(0, piece)
    assert len(settled(supply)) == 1
    assert asked(supply) == [(0, key("c"))]
    supply.drop_server(0)
    assert not supply.has(0, item("d"))
    assert asked(supply) == [(0, key("d"))]


def test_streams_wait_for_pages_in_nobody_s_way(pictures: Pictures) -> None:
    """One that lacks them later, because they were evicted, waits with its slot."""
    driver = pictures.driver(cache_tokens=6, step_tokens=9)
    tokens, media = prompt(2, "a", "b", 3)
    for stream in (0, 1):
        driver.submit(stream, tokens, 2, media=media)
    driver.submit(2, [9, 9], 4)
    for _ in range(5):
        driver.step()
    assert driver.received.finish.keys() == {2}
    assert driver.scheduler.deferred() == 2
    assert asked(pictures.supply) == [(0, key("a")), (0, key("b"))]
    for name in "ab":
        for piece in pieces(name):
            pictures.supply.receive(0, piece)
    assert len(settled_again(pictures)) == 2
    driver.step()  # computes the first picture
    (pictures.store_file("b")).unlink()
    for _ in range(3):
        driver.step()
    assert driver.received.finish.keys() == {2}
    assert asked(pictures.supply) == [(0, key("b"))]
    for piece in pieces("b"):
        pictures.supply.receive(0, piece)
    settled_again(pictures)
    driver.finish()
    assert driver.received.finish.keys() == {0, 1, 2}


def settled_again(pictures: Pictures) -> list[tuple[Want, str]]:
    """What has settled, which the scheduler will see."""
    found = settled(pictures.supply)
    pictures.supply._settled += found
    return found


def test_streams_whose_pages_will_not_come(pictures: Pictures) -> None:
    """Those that wait in the queue and those that have a slot; others of another API server go on."""
    pictures.put("a")
    driver = pictures.driver(cache_tokens=6, step_tokens=8)
    tokens, media = prompt("a", "b", 3)
    driver.submit(0, tokens, 2, media=media)
    pictures.put("b")
    driver.step()
    pictures.store_file("b").unlink()
    driver.submit(1, tokens, 2, media=media)
    driver.submit(2, [9, 9], 4)
    for _ in range(5):
        driver.step()
    assert driver.received.finish.keys() == {2}
    while driver.scheduler.has_work():  # the second waits for the first one's blocks before it asks itself
        for server, name in asked(pictures.supply):
            pictures.supply.receive(server, PagePiece(name, 0, b""))
        driver.step()
    assert {stream: failure.code for stream, failure in driver.received.failed.items()} == {
        0: MEDIA_GONE,
        1: MEDIA_GONE,
    }
    assert not driver.scheduler.streams.media.spans  # type: ignore[union-attr]
