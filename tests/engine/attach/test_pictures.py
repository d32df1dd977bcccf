"""Pictures of an attached engine's requests: values sent once, and again to an engine that lacks them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.engine.attach.pictures import AttachedPictures, media_info
from penstock.engine.base import RequestRejected
from penstock.media.pages import PageFacts
from penstock.media.store import MediaStore
from penstock.media.vllm_item import item_arrays, read_item
from penstock.wire.frames import FinishReason
from penstock.wire.media.items import MediaInfo, MediaItem
from penstock.wire.messages import SamplingParams, Submit
from tests.engine.attach.test_engine import ERROR, LENGTH, Attached

ADD = b"\x00"
PROMPT = np.arange(40, 60, dtype="<i4").tobytes()
VALUES = {"pixel_values": {"data": ["float32", [1], 7], "field": ["batched", {}]}}
MASK = np.array([False, True, True, False])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MediaStore]:
    (tmp_path / "store").mkdir()
    made = MediaStore(str(tmp_path / "store"), 1 << 20)
    yield made
    made.close()


@pytest.fixture
def attached(store: MediaStore, tmp_path: Path) -> Attached:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 320, "image_token_id": 41}))
    return Attached(tmp_path, model=tmp_path, store=store)


def put(store: MediaStore, number: int, mask: Any = None) -> bytes:
    """Pages of a picture of four tokens, of which vLLM's range are the last three or all."""
    key = bytes([number]) * 32
    place = (1, 3) if mask is None else (0, 4)
    data = msgspec.msgpack.encode(VALUES | {"number": number})
    store.write(key, PageFacts(b"", 2), item_arrays("image", *place, mask, data)).close()
    return key


def picture(key: bytes, offset: int = 2) -> MediaItem:
    return MediaItem(key, offset, 4, 100)


def submit(attached: Attached, stream: int, *media: MediaItem) -> None:
    sampling = SamplingParams(max_tokens=20, seed=1)
    attached.engine.submit(0, Submit(stream, PROMPT, sampling, media=media))


def answer_missing(attached: Attached, request_id: str, *hashes: str) -> None:
    """As vLLM's engine does, apart from all other outputs."""
    record = [request_id, [], *[None] * 11, 0, *[None] * 5]
    record[5], record[14] = ERROR, list(hashes)
    attached.connection.put([record])


def requests(attached: Attached) -> list[Any]:
    """Since they were asked for last, without the question for the cache."""
    sent = [fields for fields in attached.sent(ADD) if not fields[0].startswith("cache-check-")]
    attached.connection.sent.clear()
    return sent


def has_cache(attached: Attached) -> None:
    """The engine answers the question."""
    question = attached.sent(ADD)[0]
    assert question[19] is True  # abort_immediately
    assert question[2][0]["data"] is None
    answer_missing(attached, question[0], question[2][0]["mm_hash"])
    attached.steps()
    requests(attached)


def test_what_vllm_is_told_of_a_picture(attached: Attached, store: MediaStore) -> None:
    assert attached.engine.info.media == MediaInfo(41)
    plain, masked = put(store, 1), put(store, 2, MASK)
    submit(attached, 0, picture(plain), picture(masked, 8))
    (fields,) = requests(attached)
    assert fields[1] == list(range(40, 60))
    assert fields[2] == [
        {
            "data": VALUES | {"number": 1},
            "modality": "image",
            "identifier": plain.hex(),
            "mm_position": {"offset": 3, "length": 3, "is_embed": None},
            "mm_hash": plain.hex(),
        },
        {
            "data": VALUES | {"number": 2},
            "modality": "image",
            "identifier": masked.hex(),
            "mm_position": {
                "offset": 8,
                "length": 4,
                "is_embed": ["bool", [4], msgspec.msgpack.Ext(3, b"\0\1\1\0")],
            },
            "mm_hash": masked.hex(),
        },
    ]


def values_of(fields: list[Any]) -> list[int | None]:
    return [None if each["data"] is None else each["data"]["number"] for each in fields[2]]


def cache_metrics(attached: Attached) -> tuple[float, float]:
    metrics = attached.engine.metrics()
    return metrics["mm_cache_queries_total"], metrics["mm_cache_hits_total"]


def test_values_are_sent_once_to_an_engine_with_a_cache(attached: Attached, store: MediaStore) -> None:
    first, second = put(store, 1), put(store, 2)
    submit(attached, 0, picture(first))
    submit(attached, 1, picture(first))
    assert [values_of(fields) for fields in attached.sent(ADD)[1:]] == [[1], [1]], "it has not answered"
    has_cache(attached)
    submit(attached, 2, picture(first), picture(second, 8))
    submit(attached, 3, picture(second))
    assert [values_of(fields) for fields in requests(attached)] == [[None, 2], [None]]
    assert cache_metrics(attached) == (5, 2)


def test_an_engine_that_lacks_values_gets_the_request_again(attached: Attached, store: MediaStore) -> None:
    has_cache(attached)
    first, second = put(store, 1), put(store, 2)
    submit(attached, 0, picture(first), picture(second, 8))
    submit(attached, 1, picture(first), picture(second, 8))
    _, fields = requests(attached)
    assert values_of(fields) == [None, None]
    answer_missing(attached, fields[0], second.hex(), "not ours")
    attached.steps()
    (again,) = requests(attached)
    assert again[:2] == fields[:2]
    assert values_of(again) == [1, 2]
    attached.connection.put([attached.record(1, [7], LENGTH)])
    attached.steps()
    assert attached.tokens == {1: [7]}
    assert attached.ends == {1: FinishReason.LENGTH}
    assert cache_metrics(attached) == (4, 1)


def test_an_answer_to_an_aborted_request_means_nothing(attached: Attached, store: MediaStore) -> None:
    has_cache(attached)
    submit(attached, 0, picture(put(store, 1)))
    ((request_id, *_),) = requests(attached)
    attached.engine.abort(0, [0])
    attached.steps()
    answer_missing(attached, request_id, (b"\1" * 32).hex())
    attached.steps()
    assert requests(attached) == []
    assert not attached.engine.has_work()


def test_a_picture_that_is_gone_ends_its_stream(attached: Attached, store: MediaStore) -> None:
    has_cache(attached)
    key = put(store, 1)
    submit(attached, 0, picture(key))
    submit(attached, 1, picture(key))
    sent = requests(attached)
    Path(store.directory, key.hex()).unlink()
    submit(attached, 2, picture(key))
    assert values_of(requests(attached)[0]) == [None], "vLLM has it"
    answer_missing(attached, sent[1][0], key.hex())
    attached.steps()
    assert "does not have the picture" in str(attached.ends[1])
    with pytest.raises(RequestRejected, match=r"^media\[0\]: the store") as refused:
        submit(attached, 3, picture(key))
    assert refused.value.code == "unavailable"
    attached.connection.put([attached.record(0, [7], LENGTH), attached.record(2, [8], LENGTH)])
    attached.steps()
    assert not attached.engine.has_work()


def test_pages_of_another_processor_are_refused(attached: Attached, store: MediaStore) -> None:
    key = b"\5" * 32
    store.write(key, PageFacts(b"", 2), {"pixel_values": np.zeros(3, np.float32)}).close()
    with pytest.raises(RequestRejected, match="no pages of vLLM's processor"):
        submit(attached, 0, picture(key))
    with pytest.raises(RequestRejected, match="its pages are of another number of tokens"):
        submit(attached, 0, MediaItem(put(store, 1), 2, 2, 100))


def test_a_cache_keeps_what_it_has_room_for(store: MediaStore) -> None:
    keys = [put(store, number) for number in range(1, 4)]
    size = len(read_item(store.lease(keys[0]).pages().arrays).data)  # type: ignore[union-attr]
    pictures = AttachedPictures(store, ["--mm-processor-cache-gb", str(2.5 * size / (1 << 30))])
    (_, body) = pictures.question()
    pictures.missing(msgspec.msgpack.decode(body)[0], ["any"])

    def values(*chosen: bytes) -> list[bool]:
        request = Submit(0, PROMPT, SamplingParams(max_tokens=1, seed=0), media=tuple(map(picture, chosen)))
        features = pictures.features(0, request, "name")
        assert features is not None
        return [each["data"] is not None for each in features]

    assert values(*keys[:2], *keys[:2]) == [True, True, False, False]
    assert values(keys[0], keys[2], keys[0], keys[1]) == [False, True, False, True]
    none = AttachedPictures(store, ["--mm_processor_cache_gb=0"])
    none.missing(msgspec.msgpack.decode(none.question()[1])[0], ["any"])
    pictures = none
    assert values(keys[0], keys[0]) == [True, True]


def test_what_adapters_change_has_another_identifier(store: MediaStore) -> None:
    request = Submit(0, PROMPT, SamplingParams(max_tokens=1, seed=0), media=(picture(put(store, 1)),))
    (feature,) = AttachedPictures(store, ["--enable-tower-connector-lora"]).features(0, request, "name") or ()
    assert (feature["identifier"], feature["mm_hash"]) == (f"name:{'01' * 32}", "01" * 32)


def test_models_that_take_pictures_have_a_vision_part(tmp_path: Path) -> None:
    assert media_info(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    assert media_info(str(tmp_path)) is None
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    assert media_info(str(tmp_path)) == MediaInfo(0)
    (tmp_path / "config.json").write_text('{"image_token_index": 7}')
    assert media_info(str(tmp_path)) == MediaInfo(7)
