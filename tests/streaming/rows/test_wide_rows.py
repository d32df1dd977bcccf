"""Rows that take long are handled in parts, and streams take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest

from penstock.streaming.rows.wide_rows import PART_TOKENS, TOKEN_COST, TURN_CANDIDATES, WideRows
from penstock.streaming.stream import Stream
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs


class Numbered:
    def __init__(self, handle: int) -> None:
        self.handle = handle


def stream(handle: int) -> Stream:
    return cast(Stream, Numbered(handle))


class Bench:
    def __init__(self) -> None:
        self.turns: list[Callable[[], None]] = []
        self.handled: list[tuple[int, int, FinishReason, int, int]] = []
        self.logprobs: list[Logprobs | None] = []
        self.rows = WideRows(self._handle, self.turns.append)

    def _handle(
        self, of: Stream, tokens: Sequence[int], finish: FinishReason, cached: int, logprobs: Logprobs | None
    ) -> None:
        self.handled.append((of.handle, len(tokens), finish, cached, tokens[0] if tokens else -1))
        self.logprobs.append(logprobs)

    def run_turn(self) -> None:
        turns, self.turns[:] = list(self.turns), []
        for turn in turns:
            turn()


def scored(count: int, width: int = 2) -> Logprobs:
    ids = np.arange(count * width, dtype=np.int32).reshape(count, width)
    place = np.arange(count, dtype=np.int32)
    return Logprobs(place, ids, np.zeros((count, width), np.float32), np.ones(count, np.int32))


@pytest.mark.parametrize("written", [False, True])
def test_a_long_row_is_handled_in_parts(written: bool) -> None:
    bench = Bench()
    count = 2 * PART_TOKENS + 7
    assert not bench.rows.add(stream(1), range(9), FinishReason.NONE, 3, None, written=written)
    taken = bench.rows.add(stream(1), range(count), FinishReason.LENGTH, 3, scored(count), written=written)
    assert taken
    assert (bench.rows.tokens(1), bench.rows.ended(1)) == (count, True)
    while bench.turns:
        bench.run_turn()
    none, length = FinishReason.NONE, FinishReason.LENGTH
    assert bench.handled == [
        (1, PART_TOKENS, none, 3, 0),
        (1, PART_TOKENS, none, 0, PART_TOKENS),
        (1, 7, length, 0, 2 * PART_TOKENS),
    ]
    for number, logprobs in enumerate(bench.logprobs):
        assert logprobs is not None
        assert logprobs.token.tolist() == list(range(len(logprobs.ids)))
        assert logprobs.ids[0, 0] == 2 * number * PART_TOKENS


def test_other_streams_have_their_turn_between_parts() -> None:
    bench = Bench()
    for handle in (1, 2):
        bench.rows.add(stream(handle), range(4 * PART_TOKENS), FinishReason.NONE, 0, None, written=False)
    bench.run_turn()
    assert sum(row[1] for row in bench.handled) <= TURN_CANDIDATES // TOKEN_COST + PART_TOKENS
    assert bench.turns, "the rest has a later turn"
    while bench.turns:
        bench.run_turn()
    assert [row[0] for row in bench.handled] == [1, 2] * 4


def test_a_row_behind_a_long_one_waits() -> None:
    bench = Bench()
    bench.rows.add(stream(1), range(PART_TOKENS + 1), FinishReason.NONE, 0, None, written=False)
    assert bench.rows.add(stream(1), [5], FinishReason.EOS, 0, None, written=False)
    bench.rows.finish(1)
    assert [row[1] for row in bench.handled] == [PART_TOKENS, 1, 1]
