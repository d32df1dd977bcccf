"""The index of a history against a search through it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.batch.slots import SlotTable
from penstock.engine.speculation import history_index
from penstock.engine.speculation.history_index import LONGEST, SHORTEST, HistoryIndex
from tests.engine.speculation.replay import start

WIDTH = 96
SLOTS = 3

GROWTH = st.lists(
    st.binary(max_size=9).map(lambda tokens: [token & 3 for token in tokens]), min_size=1, max_size=8
)
"""Of one stream: its prompt, then what it grows by between two lookups."""


def search(history: list[int], limit: int, distance: int) -> int:
    """Where the tokens that followed stand: for the occurrence ``distance`` tokens back if that matches, else
    for the latest one of the longest context, before ``limit``; 0: nowhere."""
    for size in (LONGEST, *range(LONGEST, SHORTEST - 1, -1)):
        tried = range(limit - 1, size - 1, -1)
        if distance:
            tried = range(len(history) - distance, len(history) - distance + 1)
        for at in tried:
            if size <= at < limit and history[at - size : at] == history[-size:]:
                return at
        distance = 0
    return 0


def grow(table: SlotTable, slot: int, tokens: list[int]) -> None:
    length = int(table.length[slot])
    table.history[slot, length : length + len(tokens)] = tokens
    table.length[slot] += len(tokens)


def lookup(index: HistoryIndex, table: SlotTable, slots: list[int]) -> list[tuple[int, int]]:
    which = np.array(slots, np.intp)
    at, matched = index.find_occurrence(which, table.length[which])
    return list(zip(at.tolist(), matched.tolist(), strict=True))


@given(st.lists(st.tuples(st.integers(0, SLOTS - 1), GROWTH), max_size=5), st.sampled_from([1, 4, 1 << 12]))
def test_what_is_found_matches_whatever_hashes_collide(
    streams: list[tuple[int, list[list[int]]]], buckets: int
) -> None:
    table = SlotTable(SLOTS, WIDTH + 32, [0])
    index = HistoryIndex(table, buckets)
    for slot, growth in streams:
        start(table, slot, [7, *growth[0]])
        index.forget(slot)
        for tokens in growth:
            grow(table, slot, tokens)
            ((at, matched),) = lookup(index, table, [slot])
            history = table.history[slot, : table.length[slot]].tolist()
            if not at:
                continue
            assert SHORTEST <= matched <= at < len(history)
            assert history[at - SHORTEST : at] == history[-SHORTEST:]


@pytest.mark.parametrize("outputs", [True, False])
def test_the_longest_and_latest_is_found(outputs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for collisions, which are few in large tables."""
    monkeypatch.setattr(history_index, "FEWEST_BUCKETS", 1 << 16)
    rng = np.random.default_rng(0)
    table = SlotTable(SLOTS, 1 << 16, [0])
    index = HistoryIndex(table, outputs=outputs)
    distances = [0] * SLOTS
    wrong = found = lookups = 0
    for step in range(1500):
        for slot in range(SLOTS):
            if step % 40 == slot:  # a stream after another
                start(table, slot, rng.integers(0, 6, rng.integers(1, 60)).tolist())
                index.forget(slot)
                distances[slot] = 0
            elif table.length[slot]:
                grow(table, slot, rng.integers(0, 6, rng.integers(0, 5)).tolist())
        slots = [slot for slot in rng.permutation(SLOTS).tolist() if table.length[slot]]
        for slot, (at, _) in zip(slots, lookup(index, table, slots), strict=True):
            history = table.history[slot, : table.length[slot]].tolist()
            limit = len(history) if outputs else int(table.base[slot])
            wrong += at != search(history, limit, distances[slot])
            found += at > 0
            lookups += 1
            distances[slot] = len(history) - at if at else 0
    assert found > lookups / 4
    assert wrong < lookups / 100


@given(GROWTH, st.booleans(), st.sampled_from([4, 1 << 12]))
def test_one_slot_is_looked_up_as_several_are(growth: list[list[int]], outputs: bool, buckets: int) -> None:
    table = SlotTable(2, WIDTH + 32, [0])
    one, several = (HistoryIndex(table, buckets, outputs=outputs) for _ in range(2))
    start(table, 1, [7, *growth[0]])
    for tokens in growth:
        grow(table, 1, tokens)
        at, matched = one.find_one(1, int(table.length[1]))
        ((other, size),) = lookup(several, table, [1])
        assert (other, size if other else 0) == (at, matched)


def test_a_copy_goes_on_behind_a_token_that_differs() -> None:
    table = SlotTable(1, WIDTH, [0])
    index = HistoryIndex(table)
    start(table, 0, [*range(10, 30), *range(10, 16)])
    assert lookup(index, table, [0]) == [(6, 5)]
    grow(table, 0, [99, 17, 18])
    assert lookup(index, table, [0]) == [(9, 8)]
    assert index.find_one(0, int(table.length[0])) == (9, 8)
    grow(table, 0, [5, 12, 13])
    assert lookup(index, table, [0]) == [(24, 2)]


def test_a_lookup_again_without_growth_finds_the_same() -> None:
    table = SlotTable(1, WIDTH, [0])
    index = HistoryIndex(table)
    start(table, 0, [5, 6, 7, 8, 5, 6, 7])
    assert lookup(index, table, [0]) == [(3, 3)] == lookup(index, table, [0])
    assert index.find_one(0, 7) == (3, 3)


def test_tables_grow_with_a_history() -> None:
    """A context at its start is found when thousands of tokens have followed, however they came."""
    rng = np.random.default_rng(1)
    text = rng.permutation(20_000).tolist()
    for rows in ([0], [0, 1]):
        table = SlotTable(2, 1 << 15, [0])
        index = HistoryIndex(table)
        start(table, 0, text[:50])
        start(table, 1, [1, 2])
        for first in range(50, 12_000, 171):
            grow(table, 0, text[first : first + 171])
            if len(rows) == 1:
                index.find_one(0, int(table.length[0]))
            else:
                lookup(index, table, rows)
        again = 0
        for at in range(10, 12_000, 100):
            grow(table, 0, text[at - LONGEST : at])
            again += lookup(index, table, rows)[0][0] == at
        assert again > 0.9 * len(range(10, 12_000, 100))


def test_entries_of_a_former_stream_are_no_match() -> None:
    table = SlotTable(1, WIDTH, [0])
    index = HistoryIndex(table)
    start(table, 0, [1, 2, 3, 4, 5, 1, 2, 3])
    assert lookup(index, table, [0])[0][0] == 3
    table.history[0] = 0
    start(table, 0, [9, 1, 2, 3])
    index.forget(0)
    assert lookup(index, table, [0])[0][0] == 0
