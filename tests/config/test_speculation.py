"""Options of speculative decoding and --batch-invariant that contradict each other are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.serve import ServeConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_method": "draft"}, "--speculative-method draft: needs --draft-model"),
        ({"draft_model": "small"}, "--draft-model small: needs --speculative-method draft"),
        (
            {"speculative_method": "ngram", "draft_model": "small"},
            "--draft-model small: needs --speculative-method draft",
        ),
        ({"speculative_tokens": 3}, "--speculative-tokens 3: needs --speculative-method ngram"),
        (
            {"speculative_method": "ngram", "engine": "vllm"},
            "is for --engine torch, not vllm: give --speculative-config behind --",
        ),
        (
            {"speculative_method": "ngram", "engine": "synthetic"},
            "is for --engine torch, not synthetic: it runs no model",
        ),
        ({"batch_invariant": True, "engine": "synthetic"}, "--batch-invariant: is for --engine torch"),
    ],
)
def test_contradictions(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeConfig(**options)


def test_what_belongs_together_is_accepted() -> None:
    assert ServeConfig(speculative_method="draft", draft_model="small", speculative_tokens=4)
    assert ServeConfig(speculative_method="suffix", speculative_tokens=4)
