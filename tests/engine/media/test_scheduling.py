"""Which pictures are encoded when, beside what, and how often. The driver checks in every step that each
image token gets the feature that is its own."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.engine.base import RequestRejected
from penstock.engine.media.engine_media import EngineMedia
from penstock.wire.media.items import MediaItem
from tests.engine.media.pictures import Pictures, key, pictures_in, prompt
from tests.engine.paged import IMAGE, Driver
from tests.engine.support import submit


@pytest.fixture
def pictures(tmp_path: Path) -> Iterator[Pictures]:
    with pictures_in(tmp_path) as made:
        yield made


def media_of(driver: Driver) -> EngineMedia:
    media = driver.scheduler.streams.media
    assert media is not None
    return media


def counts(driver: Driver) -> tuple[float, float, float]:
    """Pictures encoded, of streams, and found."""
    metrics = driver.scheduler.metrics()
    names = ("pictures_encoded_total", "encoder_cache_queries_total", "encoder_cache_hits_total")
    encoded, queries, hits = (metrics[name] for name in names)
    return encoded, queries, hits


def test_a_picture_is_encoded_once(pictures: Pictures) -> None:
    """In the same step, in a later one, and with the prefix cache or without."""
    pictures.put("cat")
    for caching in (True, False):
        driver = pictures.driver(enable_prefix_caching=caching)
        for stream in range(12):
            tokens, media = prompt(5, "cat", stream)
            driver.submit(stream, [*tokens, 20 + stream], 3, media=media)
        driver.finish()
        assert counts(driver) == (1, 12, 11)
        assert not media_of(driver).spans
        assert driver.scheduler.metrics()["encoder_cache_tokens"] == 6


def test_same_text_and_another_picture_share_no_block(pictures: Pictures) -> None:
    """The driver asserts that what is read is the stream's own."""
    pictures.put("cat", "dog")
    driver = pictures.driver(block_size=2)
    for stream, name in enumerate(("cat", "dog", "cat", "dog")):
        tokens, media = prompt(4, name, 5)
        driver.submit(stream, tokens, 2, media=media)
        driver.finish()
    # 17 tokens: the text before a picture is everybody's, the rest of the prompt the same picture's
    assert driver.cached == {1: 4, 2: 16, 3: 16}
    assert driver.received.tokens[0] == driver.received.tokens[2] != driver.received.tokens[1]
    assert counts(driver) == (2, 4, 2)


def test_beside_decodes_one_picture_is_encoded_per_step(pictures: Pictures) -> None:
    names = [f"p{number}" for number in range(4)]
    pictures.put(*names)
    driver = pictures.driver(step_tokens=64, cache_tokens=100)
    driver.submit(0, [9, 9], 40)
    driver.step()
    for stream, name in enumerate(names[:2], 1):
        tokens, media = prompt(name, 2)
        driver.submit(stream, tokens, 1, media=media)
    tokens, media = prompt(3, *names[2:], 2)
    driver.submit(3, tokens, 1, media=media)
    encoded = []
    for _ in range(4):
        batch = driver.step()
        encoded.append((batch.pictures, len(pictures.encoder.encoded)))
        assert 0 in batch.slots  # the text goes on
    assert encoded == [(1, 1), (1, 2), (1, 3), (1, 4)]
    driver.finish()


def test_without_decodes_pictures_fill_the_step(pictures: Pictures) -> None:
    pictures.put("a", "b", "c")
    driver = pictures.driver(step_tokens=16, cache_tokens=100)
    tokens, media = prompt("a", "b", "c", 1)
    driver.submit(0, tokens, 1, media=media)
    batches: list[tuple[int, int]] = []
    driver.finish(each=lambda batch: batches.append((batch.pictures, int(batch.count.sum()))))
    assert batches == [(2, 16), (1, 9)]


def test_a_chunk_ends_before_a_picture_for_which_the_cache_has_no_room(pictures: Pictures) -> None:
    """What a stream is in the middle of stays, so each stream can go on."""
    pictures.put("a", "b", features=10)
    driver = pictures.driver(step_tokens=8, cache_tokens=10)
    for stream, name in enumerate(("a", "b")):
        tokens, media = prompt(3, name, 4, features=10)
        driver.submit(stream, tokens, 2, media=media)
    driver.finish()
    assert counts(driver) == (2, 2, 0)


def test_a_span_in_both_directions_is_computed_at_once(pictures: Pictures) -> None:
    pictures.put("a", "b", "c")
    driver = pictures.driver(step_tokens=12, whole_spans=True, enable_prefix_caching=False)
    driver.submit(0, [9], 40)
    driver.submit(1, [9], 40)
    driver.step()
    tokens, media = prompt(9, "a", "b", 20, "c", 2)
    driver.submit(2, tokens, 2, media=media)
    slot_parts: list[tuple[int, int]] = []

    def check(batch: object) -> None:
        slots, start, count = (getattr(batch, name).tolist() for name in ("slots", "start", "count"))
        slot_parts.extend((at, at + n) for slot, at, n in zip(slots, start, count, strict=True) if slot == 2)

    driver.finish(each=check)
    for item in media:
        assert any(at <= item.offset and item.offset + item.length <= end for at, end in slot_parts)


def test_decodes_give_way_to_a_span_that_is_computed_at_once(pictures: Pictures) -> None:
    """And get their tokens in the steps between."""
    pictures.put("a", features=8)
    driver = pictures.driver(slots=8, step_tokens=10, whole_spans=True)
    for stream in range(6):
        driver.submit(stream, [9], 30)
    driver.step()
    tokens, media = prompt("a", 2, features=8)
    driver.submit(6, tokens, 1, media=media)
    for _ in range(4):
        driver.step()
    assert driver.received.ended(6)
    assert min(map(len, driver.received.tokens.values())) >= 1
    driver.finish()


def test_preempted_streams_come_back(pictures: Pictures) -> None:
    """Their features are encoded again if they have made way."""
    pictures.put("a", "b", "c", "d")
    driver = pictures.driver(blocks=14, cache_tokens=6, step_tokens=16, model_len=40)
    for stream, name in enumerate("abcd"):
        tokens, media = prompt(2, name, 3)
        driver.submit(stream, tokens, 20, media=media)
    driver.finish()
    assert driver.scheduler.streams.preemptions > 0
    assert len(driver.received.finish) == 4
    assert counts(driver)[1] == 4


def test_new_weights_and_sleep_forget_features(pictures: Pictures) -> None:
    pictures.put("a")
    driver = pictures.driver(step_tokens=6)
    tokens, media = prompt("a", 2)
    driver.submit(0, tokens, 1, media=media)
    driver.step()
    driver.scheduler.preempt_all()
    driver.scheduler.reset_caches()
    driver.finish()
    assert counts(driver)[0] == 2


def test_a_picture_whose_features_are_not_as_many_as_its_tokens(pictures: Pictures) -> None:
    pictures.put("a", features=5)
    driver = pictures.driver()
    tokens, media = prompt("a", 2)
    driver.submit(0, tokens, 1, media=media)
    with pytest.raises(ValueError, match="5 features for 6 image tokens"):
        driver.step()


def test_drafts_end_before_an_image_token(pictures: Pictures) -> None:
    """Text that comes again is not continued by the picture that followed it."""
    driver = pictures.driver()
    table = driver.scheduler.table
    for stream, draft in enumerate(([5, IMAGE, 6], [5, 6, 7], [IMAGE, 5, 5])):
        slot = table.allocate(0, submit(stream, prompt=[1, 2]))
        table.history[slot, 2:5] = draft
    slots, drafts = np.arange(3), np.array([3, 3, 0], np.int32)
    assert media_of(driver).cut_drafts(slots, drafts).tolist() == [1, 3, 0]
    assert media_of(driver).cut_drafts(slots, 0 * drafts).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("parts", "features", "options", "message"),
    [
        ((1, "a", 1), 30, {}, "encoder cache has room for 24.*--encoder-cache-tokens"),
        ((1, "a", 1), 9, {"whole_spans": True, "step_tokens": 10}, "11 tokens.*--max-num-batched-tokens"),
    ],
)
def test_pictures_that_could_never_be_computed(
    pictures: Pictures, parts: tuple[str | int, ...], features: int, options: dict[str, int], message: str
) -> None:
    driver = pictures.driver(**options)  # type: ignore[arg-type]
    tokens, media = prompt(*parts, features=features)
    with pytest.raises(RequestRejected, match=message):
        driver.submit(0, tokens, 1, media=media)


def test_a_span_without_image_tokens(pictures: Pictures) -> None:
    request = msgspec.structs.replace(submit(0, prompt=[1, 2, 3]), media=(MediaItem(key("a"), 0, 2, 1),))
    with pytest.raises(RequestRejected, match=r"media\[0\]: none of its 2 tokens is the image token, 49"):
        pictures.driver().scheduler.submit(0, request)


@pytest.mark.parametrize("seed", range(6))
def test_storms(pictures: Pictures, seed: int) -> None:
    """Every stream ends, whatever is short; no picture is encoded when there is room for all."""
    rng = random.Random(seed)
    names = ["a", "b", "c", "d"]
    pictures.put(*names)
    whole, roomy = bool(seed % 2), seed >= 3
    driver = pictures.driver(
        blocks=18,
        block_size=2 if seed % 3 else 4,
        model_len=36,
        step_tokens=rng.choice([8, 11, 30]),
        cache_tokens=24 if roomy else rng.choice([6, 13]),
        whole_spans=whole,
    )
    used: Counter[str] = Counter()
    for stream in range(30):
        parts: list[str | int] = [rng.randrange(1, 4)]
        for _ in range(rng.randrange(3)):
            parts += [rng.choice(names), rng.randrange(3)]
        tokens, media = prompt(*parts)
        used.update(part for part in parts if isinstance(part, str))
        driver.submit(stream, [*tokens, rng.randrange(20, 22)], rng.randrange(1, 8), media=media)
        for _ in range(rng.randrange(4)):
            driver.step()
        if rng.random() < 0.1:
            driver.scheduler.abort(0, [stream])
    driver.finish()
    assert len(driver.received.finish) == 30
    media_state = media_of(driver)
    assert not media_state.spans
    assert not media_state.cache._held
    if roomy:
        assert media_state.encoded <= len(used)
