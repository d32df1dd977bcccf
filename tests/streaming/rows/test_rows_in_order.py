"""Rows that are written by columns do not overtake those of their stream that take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.streaming.rows.wide_rows import PART_TOKENS, WideRows
from penstock.wire.frames import FinishReason
from tests.generation.planning import tiny_tokenizer
from tests.generation.replying import Desk, read_stream
from tests.streaming.rows.test_token_fields import plan, tables, vocabulary


@pytest.mark.parametrize("logprobs", [-1, 1])
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_rows_behind_a_long_one_wait_for_it(logprobs: int, turns: int) -> None:
    """``turns``: of the waiting rows after each frame."""
    later: list[Callable[[], None]] = []
    plain, parts = vocabulary()
    long = [*parts, *[plain[1]] * (2 * PART_TOKENS), *parts]  # its text is not that of its tokens alone
    rows = [[plain[0]], long, [plain[2]], [plain[3]], [plain[4]], [plain[5]]]

    async def run() -> None:
        desk = Desk(tables())
        desk.streams._wide = WideRows(desk.streams._handle_row_now, later.append)
        _, sink = desk.streamed(plan(logprobs, ids=logprobs >= 0, names=False), chat=True)
        for frame in desk.rows(0, rows, FinishReason.LENGTH, logprobs=logprobs >= 0):
            desk.deliver([frame])
            for _ in range(turns):
                if later:
                    later.pop(0)()
        while later:
            later.pop(0)()
        reading = read_stream(sink)
        tokens = [token for row in rows for token in row]
        assert reading.text == tiny_tokenizer().decode(tokens)
        assert reading.tokens == (tokens if logprobs >= 0 else [])

    asyncio.run(run())
