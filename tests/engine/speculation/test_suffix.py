"""Drafts from the own prompt and from earlier outputs."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from penstock.engine.batch.slots import SlotTable
from penstock.engine.speculation.suffix import CHUNK, MAX_DRAFTS, SuffixProposer
from tests.engine.speculation.replay import start

WIDTH = 256
TEXT = list(range(100, 160))
STORE = 1 << 20


def proposer(slots: int = 4, width: int = WIDTH, store: int = STORE) -> tuple[SlotTable, SuffixProposer]:
    table = SlotTable(slots, width, [0])
    return table, SuffixProposer(table, store_bytes=store, seed=3)


def begin(table: SlotTable, suffix: SuffixProposer, slot: int, prompt: list[int], scope: int = 0) -> None:
    start(table, slot, prompt)
    suffix.begin(slot, scope)


def grow(table: SlotTable, slot: int, tokens: list[int]) -> None:
    length = int(table.length[slot])
    table.history[slot, length : length + len(tokens)] = tokens
    table.length[slot] += len(tokens)


def draft(table: SlotTable, suffix: SuffixProposer, slots: list[int], most: int) -> list[list[int]]:
    counts = suffix.propose(np.array(slots, np.intp), np.full(len(slots), most, np.int32))
    assert counts.dtype == np.int32
    return [
        table.history[slot, table.length[slot] : table.length[slot] + count].tolist()
        for slot, count in zip(slots, counts.tolist(), strict=True)
    ]


ALONE_OR_NOT = pytest.mark.parametrize("others", [[], [3]], ids=["alone", "with another"])
"""A single slot is computed by integers, several by array operations."""


@ALONE_OR_NOT
def test_a_prompt_is_quoted(others: list[int]) -> None:
    table, suffix = proposer()
    begin(table, suffix, 3, [1, 2])
    begin(table, suffix, 0, [*TEXT, 1, 2, 3, *TEXT[:5]])
    assert draft(table, suffix, [0, *others], 8)[0] == TEXT[5:9]  # not certain enough of more
    grow(table, 0, TEXT[5:20])
    assert draft(table, suffix, [0, *others], 8)[0] == TEXT[20:28]


@ALONE_OR_NOT
@pytest.mark.parametrize("finished", [True, False])
def test_another_output_is_repeated(others: list[int], finished: bool) -> None:
    table, suffix = proposer()
    begin(table, suffix, 3, [1, 2])
    begin(table, suffix, 0, [5, 6])
    grow(table, 0, TEXT)
    if finished:
        suffix.end(0)
    else:
        draft(table, suffix, [0], 0)
    begin(table, suffix, 1, [8, 9])
    grow(table, 1, TEXT[:16])
    assert draft(table, suffix, [1, *others], 5)[0] == TEXT[16:21]


@ALONE_OR_NOT
def test_scopes_share_nothing(others: list[int]) -> None:
    table, suffix = proposer()
    begin(table, suffix, 3, [1, 2])
    for scope in (1, 1, 1, 2):
        begin(table, suffix, 0, [5, 6], scope)
        grow(table, 0, TEXT if scope == 1 else TEXT[::-1])
        suffix.end(0)
    for scope, expected in ((0, []), (1, TEXT[16:20]), (2, []), (-1, [])):
        begin(table, suffix, 1, [8, 9], scope)
        grow(table, 1, TEXT[:16])
        assert draft(table, suffix, [1, *others], 4)[0] == expected


@ALONE_OR_NOT
def test_prompts_are_not_learned(others: list[int]) -> None:
    table, suffix = proposer()
    begin(table, suffix, 3, [1, 2])
    begin(table, suffix, 0, TEXT)
    grow(table, 0, [1])
    draft(table, suffix, [0, *others], 4)
    suffix.end(0)
    begin(table, suffix, 1, [8, 9])
    grow(table, 1, TEXT[:16])
    assert draft(table, suffix, [1, *others], 4)[0] == []


@ALONE_OR_NOT
def test_drafts_end_where_outputs_differed(others: list[int]) -> None:
    """A field with a value of its own in each record ends the draft of the constant text before it."""
    table, suffix = proposer()
    begin(table, suffix, 3, [1, 2])
    rng = np.random.default_rng(0)
    for _ in range(12):
        begin(table, suffix, 0, [5, 6])
        grow(table, 0, [*TEXT[:10], *rng.integers(1000, 9000, 3).tolist(), *TEXT[10:20]])
        suffix.end(0)
    begin(table, suffix, 1, [8, 9])
    grow(table, 1, TEXT[:2])
    assert draft(table, suffix, [1, *others], 20)[0] == TEXT[2:10]


def test_a_stream_that_resumes_brings_its_output() -> None:
    table, suffix = proposer(width=4 * CHUNK)
    output = np.random.default_rng(0).permutation(3 * CHUNK).tolist()
    start(table, 0, [5, *output])
    table.base[0] = 1
    suffix.begin(0)
    draft(table, suffix, [0], 4)
    begin(table, suffix, 1, [8, 9])
    grow(table, 1, output[-50:-30])
    assert draft(table, suffix, [1], 4) == [output[-30:-26]]
    grow(table, 1, output[:20])  # more than a chunk back
    assert draft(table, suffix, [1], 4) == [[]]


@pytest.mark.parametrize("seed", range(12))
def test_drafts_of_one_slot_are_those_of_several(seed: int) -> None:
    """Computed by integers or by arrays, and within bounds. A token at a time: those that are learned
    together do not see one another."""
    rng = np.random.default_rng(seed)
    (table, one), (other, several) = (proposer(slots=3, width=400) for _ in range(2))
    for slot in range(3):
        begin(table, one, slot, [7, 7])
        begin(other, several, slot, [7, 7])
    longest = 0
    for _ in range(150):
        slot, token, most = int(rng.integers(3)), int(rng.integers(2)), int(rng.integers(9))
        prompt, scope, ends = (
            rng.integers(0, 2, rng.integers(1, 90)).tolist(),
            int(rng.integers(2)),
            not rng.integers(20),
        )
        for a_table, suffix in ((table, one), (other, several)):
            if ends:
                suffix.end(slot)
                begin(a_table, suffix, slot, prompt, scope)
            else:
                grow(a_table, slot, [token])
            a_table.history[slot, a_table.length[slot] :] = 77
        (drafted,) = draft(table, one, [slot], most)
        counts = several.propose(np.array([slot, (slot + 1) % 3]), np.array([most, 0], np.int32))
        assert counts.tolist() == [len(drafted), 0]
        length = int(table.length[slot])
        assert (table.history[slot] == other.history[slot]).all()
        assert (table.history[slot, length + len(drafted) :] == 77).all()
        longest = max(longest, len(drafted))
    assert longest > 3


def test_bounds() -> None:
    table, suffix = proposer(slots=3, width=100)
    rows = np.arange(3)
    for slot in range(3):
        begin(table, suffix, slot, [8] * 20)
        for _ in range(40):
            grow(table, slot, [8])
            draft(table, suffix, [slot], 0)
    table.history[:, 60:] = 77
    most = np.array([0, 39, 3], np.int32)
    assert suffix.propose(rows, most).tolist() == most.tolist()
    assert (table.history[rows, 60 + most] == 77).all()
    assert suffix.propose(rows, np.zeros(3, np.int32)).tolist() == [0, 0, 0]
    assert suffix.propose(rows[:0], most[:0]).tolist() == []


def test_histories_that_are_shorter_than_contexts() -> None:
    table, suffix = proposer(slots=2, width=8)
    begin(table, suffix, 0, [1])
    begin(table, suffix, 1, [1, 1, 1, 1])
    assert draft(table, suffix, [0], 3) == [[]]
    assert draft(table, suffix, [0, 1], 3) == [[], [1, 1]]


def test_no_draft_is_longer_than_sums_reach() -> None:
    table, suffix = proposer(slots=2, width=1000)
    for slot in range(2):
        begin(table, suffix, slot, [8] * 200)
    for slots in ([0], [0, 1]):
        for drafted in draft(table, suffix, slots, 500):
            assert 0 < len(drafted) <= MAX_DRAFTS


def test_the_newest_outputs_are_kept() -> None:
    table, suffix = proposer(slots=2, width=1 << 12, store=1 << 15)
    rng = np.random.default_rng(0)
    outputs = rng.integers(0, 50_000, (60, 300)).tolist()
    for output in outputs:
        begin(table, suffix, 0, [1])
        grow(table, 0, output)
        suffix.end(0)
    drafted = []
    for output in outputs:
        begin(table, suffix, 1, output[:250])
        drafted.append(draft(table, suffix, [1], 4)[0] == output[250:254])
    assert drafted[-1]
    assert not any(drafted[:30])


def test_steps_leave_no_objects() -> None:
    rows = 64
    table, suffix = proposer(slots=rows, width=1 << 10)
    for slot in range(rows):
        begin(table, suffix, slot, [*TEXT, *TEXT])
        table.history[slot] = np.resize(TEXT, 1 << 10)
    slots, most = np.arange(rows), np.full(rows, 4, np.int32)

    def steps() -> None:
        for _ in range(5):
            table.length += 1
            assert suffix.propose(slots, most).all()

    steps()
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        steps()
        assert gc.get_count()[0] - before < rows // 2
    finally:
        gc.enable()
