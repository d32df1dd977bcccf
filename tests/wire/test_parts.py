"""Long parts cross in pieces and arrive whole."""

from __future__ import annotations

import pytest

from penstock.wire.parts import PIECE_BYTES, join_parts, mark_whole, split_parts

LENGTHS = [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 3 * PIECE_BYTES + 5]


@pytest.mark.parametrize("first", LENGTHS)
@pytest.mark.parametrize("second", LENGTHS)
def test_what_was_cut_is_joined(first: int, second: int) -> None:
    parts = [b"a" * first, b"", b"b" * second, b"c"]
    pieces = split_parts(parts)
    assert max(map(len, pieces)) <= PIECE_BYTES
    assert join_parts(pieces) == parts


@pytest.mark.parametrize("first", LENGTHS)
@pytest.mark.parametrize("second", LENGTHS)
def test_what_stays_whole_is_told_apart(first: int, second: int) -> None:
    parts = [b"a" * first, b"", b"b" * second, b"c"]
    pieces = mark_whole(parts)
    assert set(map(len, pieces)) == {*map(len, parts)}
    assert join_parts(pieces) == parts
    assert [bytes(part) for part in join_parts([memoryview(piece) for piece in pieces])] == parts


def test_short_parts_are_not_touched() -> None:
    parts = [b"header", bytes(PIECE_BYTES - 1)]
    assert split_parts(parts) is parts
    assert join_parts(parts) is parts


def test_a_last_piece_that_is_missing_counts_as_empty() -> None:
    assert join_parts([bytes(PIECE_BYTES)]) == [bytes(PIECE_BYTES)]
