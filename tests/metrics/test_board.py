"""The board of a fleet's metrics: totals never go backwards, and its size is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.metrics import families as f
from penstock.metrics.board import (
    KEPT_STARTS,
    MAX_BOARD_BYTES,
    MAX_INCARNATIONS,
    MAX_SUM_BYTES,
    MetricsBoard,
)
from penstock.metrics.merge import Totals
from penstock.metrics.snapshot import Distribution, Series, Snapshot, decode_snapshot, encode_snapshot
from tests.metrics.test_merge import snapshot


def put(board: MetricsBoard, *snapshots: Snapshot) -> None:
    for each in snapshots:
        board.add_snapshot(each, encode_snapshot(each))


def copy_to(board: MetricsBoard, other: MetricsBoard) -> None:
    put(other, *(decode_snapshot(posted.data) for posted in board))


def never_less(before: Totals, after: Totals) -> None:
    for name, values in before.items():
        if name == f.RESTARTS.name:
            continue  # a gauge
        for labels, value in values.items():
            later = after[name][labels]
            if isinstance(value, Distribution):
                assert isinstance(later, Distribution)
                assert all(a <= b for a, b in zip(value.counts, later.counts, strict=True))
                assert value.total <= later.total
            else:
                assert not isinstance(later, Distribution)
                assert value <= later


starts = st.builds(snapshot, st.integers(0, 1), st.integers(0, 6), st.integers(1, 9), st.integers(0, 2))


@given(st.lists(st.tuples(st.integers(0, 2), starts | st.integers(0, 2)), max_size=40))
def test_totals_never_go_backwards_however_metrics_travel(
    events: list[tuple[int, Snapshot | int]],
) -> None:
    """Each event: a board hears of a snapshot, or of all that another one has."""
    boards = [MetricsBoard(for_totals=number == 0) for number in range(3)]
    for target, what in events:
        board = boards[target]
        before = board.totals()
        if isinstance(what, Snapshot):
            put(board, what)
        else:
            copy_to(boards[what], board)
        never_less(before, board.totals())
        assert sum(1 for _ in board) <= 2 * (1 + KEPT_STARTS)
        assert board.size == sum(len(posted.data) for posted in board)


@given(st.permutations([snapshot(0, epoch, 5) for epoch in range(5)]))
def test_what_every_board_knows_is_counted_once(order: list[Snapshot]) -> None:
    whole, part = MetricsBoard(), MetricsBoard()
    put(whole, *(snapshot(0, epoch, 5) for epoch in range(5)))
    put(part, *(snapshot(0, epoch, 5) for epoch in range(3)))
    for _ in range(2):
        copy_to(whole, part)
        copy_to(part, whole)
    put(part, *order)
    expected = {("m", "0"): sum(50 + epoch for epoch in range(5))}
    assert whole.totals()[f.GENERATION_TOKENS.name] == expected
    assert part.totals()[f.GENERATION_TOKENS.name] == expected


def test_many_restarts_take_the_room_of_three() -> None:
    board = MetricsBoard()
    for epoch in range(1000):
        put(board, snapshot(0, epoch, 1))
    one = len(encode_snapshot(snapshot(0, 999, 1)))
    assert board.size < 4 * one
    assert board.totals()[f.SUCCESS.name]["m", "0", "stop"] == 0
    assert board.totals()[f.GENERATION_TOKENS.name]["m", "0"] == sum(10 + epoch for epoch in range(1000))


def test_many_runs_of_a_supervisor_are_bounded() -> None:
    board = MetricsBoard()
    for run in range(5 * MAX_INCARNATIONS):
        put(board, snapshot(0, 0, 1, run * 7919 % 1000 + 1))
    posted, *_ = board
    assert len(decode_snapshot(posted.data).covers) == MAX_INCARNATIONS
    assert board.totals()[f.GENERATION_TOKENS.name]["m", "0"] == 10 * 5 * MAX_INCARNATIONS


@pytest.mark.parametrize(("first", "second"), [(7, 8), (8, 7)])
def test_gauges_are_those_of_the_run_heard_of_last(first: int, second: int) -> None:
    board = MetricsBoard()
    put(board, snapshot(0, 2, 5, first), snapshot(0, 0, 3, second))
    assert board.totals()[f.RESTARTS.name] == {("engine 0",): 0}
    put(board, snapshot(0, 1, 9, first))
    assert board.totals()[f.RESTARTS.name] == {("engine 0",): 0}, "an earlier start, late"
    assert board.totals()[f.GENERATION_TOKENS.name] == {("m", "0"): 52 + 91 + 30}


def test_own_metrics_count_once() -> None:
    board = MetricsBoard()
    put(board, snapshot(0, 0, 5), snapshot(0, 1, 2))
    own = snapshot(0, 1, 3)
    assert board.totals(own)[f.GENERATION_TOKENS.name] == {("m", "0"): 50 + 31}


def test_a_late_repetition_of_a_summed_start_is_no_news() -> None:
    board = MetricsBoard()
    put(board, *(snapshot(0, epoch, 5) for epoch in range(5)))
    before = board.totals()
    late = snapshot(0, 0, 9)
    assert not board.add_snapshot(late, encode_snapshot(late))
    assert board.totals() == before


@pytest.mark.parametrize(
    "process", ["", "engine", "engine -1", "engine 01", "engine 1024", "engine 5000", "nobody 1"]
)
def test_processes_that_cannot_be_are_refused(process: str) -> None:
    invented = Snapshot(process, 0, 1, [])
    with pytest.raises(ValueError, match="no process"):
        MetricsBoard().add_snapshot(invented, b"")


def test_a_full_board_keeps_what_it_has(caplog: pytest.LogCaptureFixture) -> None:
    board = MetricsBoard()
    put(board, snapshot(0, 0, 5))
    size = 1 << 18
    for index in range(1, MAX_BOARD_BYTES // size):
        board.add_snapshot(Snapshot(f"engine {index}", 0, 1, []), bytes(size))
    with pytest.raises(ValueError, match="no room"):
        board.add_snapshot(Snapshot("engine 1000", 0, 1, []), bytes(size))
    board.add_or_log(Snapshot("engine 1000", 0, 1, []), bytes(size))
    assert "no room for metrics of engine 1000" in caplog.text
    assert board.size <= MAX_BOARD_BYTES
    assert next(iter(board)).key == ("engine 0", 0, 0)


def test_labels_without_end_do_not_make_a_sum_grow() -> None:
    board = MetricsBoard()
    for epoch in range(20):
        series = [Series(f.UNKNOWN_FIELDS.name, ("0", f"{epoch} {n}" * 100), 1) for n in range(100)]
        put(board, Snapshot("api-server 0", epoch, 1, series))
    posted, *_ = board
    assert MAX_SUM_BYTES / 2 < len(posted.data) <= MAX_SUM_BYTES


def test_a_full_sum_goes_on_counting() -> None:
    board = MetricsBoard()
    labels = [("0", f"{n}" * 20) for n in range(500)]
    for epoch in range(8):
        put(
            board,
            Snapshot("api-server 0", epoch, 1, [Series(f.UNKNOWN_FIELDS.name, each, 1) for each in labels]),
        )
    found = board.totals()[f.UNKNOWN_FIELDS.name]
    assert max(found.values()) == 8  # type: ignore[type-var]
    assert len(found) == len(labels)
    posted, *_ = board
    assert len(posted.data) <= MAX_SUM_BYTES
