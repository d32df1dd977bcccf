"""Drafts that are copies from the own history."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.engine.batch.slots import SlotTable
from penstock.engine.speculation.ngram import NgramProposer
from tests.engine.speculation.replay import start

UNTOUCHED = 77


def drafts(histories: list[list[int]], most: list[int], width: int = 32) -> list[list[int]]:
    table = SlotTable(len(histories), width, [0])
    table.history[:] = UNTOUCHED
    proposer = NgramProposer(table)
    for slot, history in enumerate(histories):
        start(table, slot, history)
        proposer.begin(slot)
    counts = proposer.propose(np.arange(len(histories)), np.array(most, np.int32))
    assert counts.dtype == np.int32
    written = []
    for slot, count in enumerate(counts.tolist()):
        end = int(table.length[slot]) + count
        assert (table.history[slot, end:] == UNTOUCHED).all()
        written.append(table.history[slot, table.length[slot] : end].tolist())
    return written


CASES = [
    ([1, 2, 3, 4, 5, 6, 1, 2, 3], 9, [4, 5, 6]),  # at most as many tokens as match
    ([1, 2, 3, 4, 5, 6, 1, 2, 3], 2, [4, 5]),
    ([1, 2, 3, 4, 5, 6, 1, 2, 3], 0, []),
    ([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 1, [4]),  # the longest context,
    ([1, 2, 4, 1, 2, 5, 1, 2], 1, [5]),  # and its latest occurrence
    ([8, 8, 8, 8, 8, 8], 4, [8, 8, 8, 8]),  # a loop goes on
    ([0, 1, 2, 1, 2, 1, 2, 1, 2], 4, [1, 2, 1, 2]),
    ([1, 2, 3, 4], 4, []),
    ([1], 4, []),
    ([3, 4, 3], 4, []),  # one token is no context
]


@pytest.mark.parametrize(("history", "most", "draft"), CASES)
def test_a_draft_is_what_followed(history: list[int], most: int, draft: list[int]) -> None:
    assert drafts([history], [most]) == [draft]


def test_slots_have_drafts_of_their_own() -> None:
    histories, most, expected = map(list, zip(*CASES, strict=True))
    assert drafts(histories, most) == expected
    assert drafts(histories, [0] * len(most)) == [[]] * len(most)


def test_no_slots() -> None:
    proposer = NgramProposer(SlotTable(2, 32, [0]))
    assert proposer.propose(np.zeros(0, np.intp), np.zeros(0, np.int32)).shape == (0,)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_draft_reaches_the_last_but_one_place_of_a_history(rows: int) -> None:
    width = 16
    histories = [[1, 2, 3] * 4] * rows
    assert drafts(histories, [width - 12 - 1] * rows, width) == [[1, 2, 3]] * rows


def test_a_shorter_stream_in_the_slot_of_another_has_no_draft() -> None:
    """One token shorter than what the slot's last stream was looked up with."""
    table = SlotTable(2, 64, [0])
    ngram = NgramProposer(table)
    both, most = np.arange(2), np.full(2, 4, np.int32)
    for slot in both.tolist():
        start(table, slot, list(range(10, 20)))
        ngram.begin(slot)
    assert ngram.propose(both, most).tolist() == [0, 0]
    for slot in both.tolist():
        ngram.end(slot)
        start(table, slot, list(range(30, 39)))
        ngram.begin(slot)
    assert ngram.propose(both, most).tolist() == [0, 0]
