"""Numbers in the place of pictures, and what events tell of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.engine.kv_events.block_log import BlockLog, block_hashes
from penstock.engine.media import picture_numbers
from penstock.engine.media.picture_numbers import PictureNumbers, picture_keys
from penstock.engine.schedule.cache_scope import CacheScope
from penstock.wire.kv_events import BlockStored
from penstock.wire.media.items import MediaItem
from tests.engine.media.pictures import key, pictures_in, prompt
from tests.engine.paged import IMAGE


def tokens_of(numbers: PictureNumbers, *parts: str | int) -> list[int] | None:
    tokens, media = prompt(*parts, features=2)
    found = numbers.in_place(np.array(tokens, "<i4").tobytes(), media)
    return None if found is None else np.frombuffer(found, "<i4").tolist()


def test_each_picture_has_its_own_number() -> None:
    numbers = PictureNumbers()
    assert tokens_of(numbers, 1, "a", 1) == [10, *[-1] * 4, 15]
    assert tokens_of(numbers, "b", "a") == [*[-2] * 4, *[-1] * 4]


def test_a_picture_of_other_tokens_or_another_grid_has_another_number() -> None:
    numbers = PictureNumbers()
    span = np.full(4, IMAGE, "<i4").tobytes()
    found = [
        numbers.in_place(bytes(tokens), (MediaItem(key("a"), 0, length, 9, grid),))
        for tokens, length, grid in ((span, 4, ()), (span, 3, ()), (span, 4, (1, 2, 2)), (span, 4, ()))
    ]
    assert len(set(found)) == 3
    assert found[0] == found[3]


def test_numbers_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when pictures are forgotten, nor when all are used up."""
    monkeypatch.setattr(picture_numbers, "MAX_KNOWN", 2)
    numbers = PictureNumbers()
    assert [tokens_of(numbers, name)[0] for name in "abacab"] == [-1, -2, -1, -3, -1, -4]  # type: ignore[index]
    numbers._next = picture_numbers._LEAST
    assert tokens_of(numbers, "x") == [-(1 << 31)] * 4
    assert tokens_of(numbers, "y") is None
    assert tokens_of(numbers, "x") == [-(1 << 31)] * 4


def test_keys_of_blocks() -> None:
    """As vLLM 0.32 has them: the key, and where the picture begins, relative to the block."""
    items = [MediaItem(key("a"), 6, 5, 1), MediaItem(key("b"), 11, 1, 1)]
    a, b = key("a").hex(), key("b").hex()
    assert picture_keys(items, 0, 4, 4) == [[], [[a, 2]], [[a, -2], [b, 3]], []]
    assert picture_keys(items, 8, 4, 1) == [[[a, -2], [b, 3]]]


def test_hashes_tell_pictures_and_their_places_apart() -> None:
    scope, tokens = CacheScope(), np.full(4, IMAGE, np.int32).tobytes()
    shown = [(), [[["aa", 0]]], [[["bb", 0]]], [[["aa", 1]]], [[["aa", 0], ["bb", 2]]]]
    assert len({block_hashes(None, tokens, 16, scope, each)[0] for each in shown}) == len(shown)
    assert block_hashes(None, tokens, 16, scope, [[]]) == block_hashes(None, tokens, 16, scope)


def test_extra_keys_are_in_vllm_s_order() -> None:
    """Adapter, pictures, salt."""
    scope = CacheScope("s", ("sql", "digest"))
    assert scope.extra_keys(2, first=True, pictures=[[["aa", 1]], []]) == [["sql", ["aa", 1], "s"], ["sql"]]
    assert CacheScope().extra_keys(2, first=True, pictures=[[], [["aa", 1]]]) == [None, [["aa", 1]]]


def test_events_have_the_real_tokens_and_the_keys(tmp_path: Path) -> None:
    """Of prompts and of outputs; a block is announced as the one that another engine announces."""
    stored = []
    for before in ((), ("other",)):  # so that numbers differ
        with pictures_in(tmp_path) as pictures:
            pictures.put("other", "a", features=3)
            log = BlockLog(40, 4)
            driver = pictures.driver(block_log=log)
            for name in before:
                tokens, media = prompt(name, 1, features=3)
                driver.submit(1, tokens, 2, media=media)
                driver.finish()
                log.take_events()
            tokens, media = prompt(2, "a", 3, features=3)
            driver.submit(0, tokens, 8, media=media)
            driver.finish()
            stored.append([event for event in log.take_events() if isinstance(event, BlockStored)])
    events = stored[0]
    history = [*tokens, *driver.received.tokens[0]]
    assert [token for event in events for token in event.token_ids] == history[:16]
    extra = [each for event in events for each in event.extra_keys or [None] * len(event.block_hashes)]
    assert extra == [[[key("a").hex(), 2]], [[key("a").hex(), -2]], None, None]
    assert stored[0] == stored[1]
