"""What the choices of a request share is held once, and long lists do not make steps slow."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from penstock.engine.base import RequestRejected
from penstock.engine.batch.slots import SlotTable
from penstock.engine.sampling.metadata import LogitEdits, SamplingMetadata, SharedEdits
from penstock.wire.messages import SamplingParams, Submit

VOCAB, SLOTS = 128_000, 1024
PROMPT = np.array([5, 6], "<i4").tobytes()
LONG: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": tuple(range(100_000))},
    "stop": {"stop_token_ids": tuple(range(100_000))},
    "stop later": {"stop_token_ids": tuple(range(100_000)), "min_tokens": 5},
    "bias": {"logit_bias": dict.fromkeys(range(16000), 1.0)},
    "bad words": {"bad_words": tuple((token, token + 1, token + 2) for token in range(5_000))},
}


@pytest.mark.parametrize("name", LONG)
def test_lists_that_choices_share_are_held_once(name: str) -> None:
    table = SlotTable(SLOTS, 16, [1], vocab_size=VOCAB)
    metadata = SamplingMetadata(table, VOCAB)
    tracemalloc.start()
    try:
        for stream in range(SLOTS):
            sampling = SamplingParams(8, stream, **LONG[name])
            metadata.check_sampling(sampling)
            metadata.set(table.allocate(0, Submit(stream, PROMPT, sampling)), sampling)
        slots = np.arange(SLOTS)
        table.append_and_check_stop(slots, slots.astype(np.int32))
        for first in range(0, SLOTS, 64):  # as many rows as are sampled at once
            rows = slots[first : first + 64]
            length = table.length[rows]
            assert len(list(metadata.edits(rows, length, metadata.needs_of(rows, length)))) <= 2
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    for slot in range(SLOTS):
        metadata.clear(slot)
        table.release(slot)
    assert not table.stop_ids


def test_long_lists_are_applied_once_for_all_rows() -> None:
    table = SlotTable(4, 16, [1])
    metadata = SamplingMetadata(table, 2000)
    many = dict.fromkeys(range(1500), 0.5)
    for stream, bias in enumerate((many, {7: 2.0}, many, None)):
        sampling = SamplingParams(8, 0, logit_bias=bias)
        metadata.set(table.allocate(0, Submit(stream, PROMPT, sampling)), sampling)
    slots = np.array([table.find_slot(0, stream) for stream in range(4)], np.intp)
    length = table.length[slots]
    shared, single = metadata.edits(slots, length, metadata.needs_of(slots, length))
    assert isinstance(shared, SharedEdits)
    assert isinstance(single, LogitEdits)
    assert shared.rows.tolist() == [0, 2]
    assert len(shared.token) == 1500
    assert (single.row.tolist(), single.token.tolist(), single.value.tolist()) == ([1], [7], [2.0])


def test_equal_lists_of_different_requests_end_with_their_own() -> None:
    table = SlotTable(2, 16, [1])
    first, second = (9, 8), (8, 9)
    slots = np.array(
        [
            table.allocate(0, Submit(stream, PROMPT, SamplingParams(8, 0, stop_token_ids=ids)))
            for stream, ids in enumerate((first, second))
        ]
    )
    table.release(int(slots[0]))
    slots = slots[1:]
    assert table.append_and_check_stop(slots, np.array([9], np.int32)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_bias_that_is_not_finite_is_refused(value: float) -> None:
    metadata = SamplingMetadata(SlotTable(1, 16, [1]), 100)
    with pytest.raises(RequestRejected, match="logit_bias"):
        metadata.check_sampling(SamplingParams(8, 0, logit_bias={3: value}))
