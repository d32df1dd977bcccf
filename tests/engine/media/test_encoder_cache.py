"""Which pictures make way for others."""

from __future__ import annotations

from penstock.engine.media.encoder_cache import EncoderCache


def key(number: int) -> bytes:
    return bytes([number]) * 32


def test_the_least_recently_used_make_way() -> None:
    cache = EncoderCache(10)
    for number in (1, 2, 3):
        cache.begin_step()
        assert not cache.use(key(number))
        assert cache.make_room(key(number), 3)
        cache.put(key(number), f"value {number}")
    cache.begin_step()
    assert cache.use(key(1))
    assert cache.get(key(1)) == "value 1"
    cache.begin_step()
    assert cache.make_room(key(4), 4)
    assert [key(number) in cache for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert cache.used == 10
    assert cache.get(key(2)) is None
    assert cache.get(key(4)) is None


def test_what_the_step_or_a_stream_needs_stays() -> None:
    cache = EncoderCache(6)
    cache.begin_step()
    assert cache.make_room(key(1), 3)
    assert cache.make_room(key(2), 3)
    assert not cache.make_room(key(3), 1)
    assert len(cache) == 2
    cache.hold(0, key(1))
    cache.begin_step()
    assert not cache.make_room(key(3), 4)
    assert len(cache) == 2
    assert cache.make_room(key(3), 3)
    assert key(2) not in cache
    cache.hold(0, None)
    cache.begin_step()
    assert cache.make_room(key(4), 6)
    assert cache.used == 6


def test_a_slot_holds_one_picture() -> None:
    cache = EncoderCache(6)
    cache.begin_step()
    assert cache.make_room(key(1), 3)
    assert cache.make_room(key(2), 3)
    for number in (1, 2):
        cache.put(key(number), number)
    for held in (key(1), key(2), key(2)):
        cache.hold(0, held)
    cache.begin_step()
    assert cache.make_room(key(3), 3)
    assert key(1) not in cache
    assert key(2) in cache
    cache.clear()
    cache.hold(0, None)
    assert not cache.used
    assert cache.make_room(key(4), 6)
