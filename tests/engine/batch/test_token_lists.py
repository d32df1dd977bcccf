"""Lists of varying length per slot against a dictionary of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.batch.token_lists import MIN_CAPACITY, TokenLists

SLOTS = 6
ACTIONS = st.lists(
    st.tuples(st.integers(0, SLOTS - 1), st.lists(st.integers(0, 99), max_size=40)), max_size=60
)


@given(ACTIONS)
def test_lists_are_those_that_were_set_last(actions: list[tuple[int, list[int]]]) -> None:
    lists = TokenLists(SLOTS, np.int64, np.float32)
    expected: dict[int, list[int]] = {slot: [] for slot in range(SLOTS)}
    for slot, items in actions:
        lists.clear(slot)
        if items:
            row = lists.share(slot, items)
            assert row is not None
            lists.fill(row, items, [item / 2 for item in items])
        expected[slot] = items
    slots = [4, 0, 5, 2]
    row, (tokens, values) = lists.gather(np.array(slots, np.intp))
    assert tokens.tolist() == [item for slot in slots for item in expected[slot]]
    assert (values * 2).tolist() == tokens.tolist()
    assert row.tolist() == [row for row, slot in enumerate(slots) for _ in expected[slot]]


def test_room_of_cleared_lists_is_used_again() -> None:
    lists = TokenLists(2, np.int32)
    for _ in range(1000):
        row = lists.share(0, object())
        assert row is not None
        lists.fill(row, range(20))
        lists.clear(0)
    assert len(lists._columns[0]) <= 2 * MIN_CAPACITY
