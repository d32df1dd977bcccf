"""Scripted replies whose reasoning is ended by its budget. 1 opens reasoning, 2 ends it, 3 opens a call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from penstock.engine.synthetic.cut_reasoning import cut_reasoning
from penstock.wire.messages import ThinkingLimit


def cut(reply: Sequence[int], budget: int, prompt: Sequence[int] = (9,), opened: bool = False) -> list[int]:
    limit = ThinkingLimit(budget, ((1,),), ((2,), (3,)), (2,), (2,), opened)
    return list(cut_reasoning(reply, array("i", prompt).tobytes(), limit))


@pytest.mark.parametrize(
    ("reply", "budget", "kept"),
    [
        ([1, 10, 11, 2, 20, 21], 3, [1, 10, 11, 2, 20, 21]),
        ([1, 10, 11, 2, 20, 21], 2, [1, 10, 11, 2, 20, 21]),
        ([1, 10, 11, 2, 20, 21], 1, [1, 10, 2, 20, 21]),
        ([1, 10, 11, 2, 20, 21], 0, [1, 2, 20, 21]),
        ([1, 10, 11], 1, [1, 10, 2]),
        ([1, 10, 11, 3, 30], 1, [1, 10, 2, 3, 30]),
        ([1, 10, 2, 20, 1, 11, 12, 2, 21], 2, [1, 10, 2, 20, 1, 11, 2, 21]),
        ([20, 21], 0, [20, 21]),
    ],
)
def test_the_answer_follows_the_forced_end(reply: list[int], budget: int, kept: list[int]) -> None:
    assert cut(reply, budget) == kept


def test_tokens_of_the_prompt_count() -> None:
    assert cut([10, 11, 2, 20], 3, prompt=[9, 1, 12], opened=True) == [10, 11, 2, 20]
    assert cut([10, 11, 2, 20], 2, prompt=[9, 1, 12], opened=True) == [10, 2, 20]
    assert cut([10, 11, 2, 20], 0, prompt=[9, 1, 12], opened=True) == [2, 20]


def test_what_the_forced_end_has_of_the_reply_is_not_said_twice() -> None:
    """As gpt-oss' header of the answer."""
    limit = ThinkingLimit(1, ((1,),), ((2,),), (2, 5, 6), (2, 5, 6), False)
    reply = [1, 10, 11, 2, 5, 6, 20]
    assert list(cut_reasoning(reply, b"", limit)) == [1, 10, 2, 5, 6, 20]
