from __future__ import annotations

from typing import Any

import pytest

from penstock.generation.prompts import check_vocabulary, parse_prompts
from tests.generation.planning import error_of


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", ""], ["a", ""]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 9]], [[1], [2, 9]]),
    ],
)
def test_the_four_forms(prompt: Any, prompts: list[Any]) -> None:
    assert list(parse_prompts(prompt, 10)) == prompts


@pytest.mark.parametrize("prompt", [None, "", [], [[]], [10], [[1], [10]], ["a", 1], [1, "a"], [1, [1]]])
def test_what_is_no_prompt(prompt: Any) -> None:
    assert error_of(parse_prompts, prompt, 10).status == 400


def test_the_vocabulary_ends_before_its_size() -> None:
    check_vocabulary("prompt", 9, 10)
    error = error_of(check_vocabulary, "prompt", 10, 10)
    assert (error.message, error.param) == ("Token id 10 is out of vocabulary", "prompt")
