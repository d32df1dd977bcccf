"""Where reasoning begins in a prompt."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.engine.sampling.thinking_budget import reasoning_before
from penstock.wire.messages import ThinkingLimit

STARTS = ((1, 2, 3, 1, 2), (4,))
ENDS = ((5, 6, 5), (7,))


def expected(prompt: list[int], opened: bool | None) -> tuple[bool, int]:
    def last(sequences: tuple[tuple[int, ...], ...]) -> int:
        ends = [
            at + len(marks)
            for marks in sequences
            for at in range(len(prompt))
            if tuple(prompt[at : at + len(marks)]) == marks
        ]
        return max(ends, default=0)

    start = last(STARTS)
    inside = start > last(ENDS) if opened is None else opened
    return inside, len(prompt) - start if inside and start else 0


@pytest.mark.parametrize("opened", [None, True, False])
def test_the_last_mark_decides_unless_the_request_does(opened: bool | None) -> None:
    limit = ThinkingLimit(9, STARTS, ENDS, (5,), (5,), opened)
    draw = random.Random(3)
    found = 0
    for length in (*range(12), *range(60, 70), 255, 256, 257, 1030):
        for _ in range(8):
            prompt = draw.choices(range(8, 12), k=length)
            for _ in range(draw.randrange(3)):
                marks = draw.choice((*STARTS, *ENDS))
                at = draw.randrange(length + 1)
                prompt[at : at + len(marks)] = marks
            tokens = np.array(prompt, np.int32)
            assert reasoning_before(tokens, limit) == expected(prompt, opened), prompt
            found += expected(prompt, opened)[1] > 0
    assert found or opened is False
