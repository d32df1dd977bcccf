"""Which features of which pictures a batch computes with."""

from __future__ import annotations

import numpy as np

from penstock.engine.batch.slots import SlotTable
from penstock.engine.media.spans import MediaSpans
from penstock.engine.schedule.batch import Batch
from penstock.wire.media.items import MediaItem
from tests.engine.support import submit

IMAGE, MARK = 7, 8
CAT, DOG = b"c" * 32, b"d" * 32


def batch(*parts: tuple[int, int, int]) -> Batch:
    """Parts as (slot, start, count)."""
    slots, start, count = np.array(parts).T
    none = np.zeros(0, np.intp)
    return Batch(
        slots=slots.astype(np.intp),
        start=start.astype(np.int32),
        count=count.astype(np.int32),
        singles=0,
        decodes=0,
        samples=none,
        generations=none.astype(np.int64),
    )


def table_with(*prompts: list[int]) -> SlotTable:
    table = SlotTable(4, 64, [])
    for stream, prompt in enumerate(prompts):
        assert table.allocate(0, submit(stream, prompt=prompt)) == stream
    return table


def test_features_of_a_part_of_a_span() -> None:
    """Marks in a span get none; rows are those of the flat batch."""
    table = table_with([1, 2, 3], [1, MARK, IMAGE, IMAGE, MARK, IMAGE, MARK, 2, IMAGE, IMAGE, 3])
    spans = MediaSpans(table, IMAGE)
    assert not spans
    assert spans.in_batch(batch((0, 0, 3))) == ()
    items = (MediaItem(CAT, 1, 6, 100), MediaItem(DOG, 8, 2, 100, (1, 2, 1)))
    spans.begin(0, ())
    spans.begin(1, items)
    assert spans
    assert list(spans.of(1)) == list(items)
    assert spans.of(0) == []

    def found(*parts: tuple[int, int, int]) -> list[tuple[bytes, int, int, int, list[int]]]:
        return [
            (rows.item.key, rows.first, rows.last, rows.total, rows.rows.tolist())
            for rows in spans.in_batch(batch(*parts))
        ]

    assert found((0, 0, 3), (1, 0, 11)) == [(CAT, 0, 3, 3, [5, 6, 8]), (DOG, 0, 2, 2, [11, 12])]
    assert found((1, 3, 2), (0, 0, 3)) == [(CAT, 1, 2, 3, [0])]
    assert found((1, 4, 5)) == [(CAT, 2, 3, 3, [1]), (DOG, 0, 1, 2, [4])]
    assert found((1, 6, 2)) == []
    assert found((1, 10, 1)) == []
    spans.release(1)
    assert not spans
    assert found((1, 0, 11)) == []


def test_an_image_token_outside_a_span_is_text() -> None:
    spans = MediaSpans(table_with([IMAGE, 1, IMAGE, 2]), IMAGE)
    spans.begin(0, (MediaItem(CAT, 2, 1, 1),))
    assert [rows.rows.tolist() for rows in spans.in_batch(batch((0, 0, 4)))] == [[2]]
