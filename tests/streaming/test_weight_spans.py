"""Spans of tokens by the weights that made them."""

from __future__ import annotations

import pytest

from penstock.streaming.weight_spans import WeightSpan, weight_spans

Changes = list[tuple[int, str]]


@pytest.mark.parametrize(
    ("changes", "tokens", "spans"),
    [
        ([], 0, []),
        ([(0, "a")], 0, []),
        ([(0, "a")], 5, [(0, 5, "a")]),
        ([(0, "a"), (3, "b")], 5, [(0, 3, "a"), (3, 5, "b")]),
        ([(0, "a"), (0, "b"), (2, "c"), (2, "d")], 5, [(0, 2, "b"), (2, 5, "d")]),
        ([(0, "a"), (2, "b"), (2, "a")], 5, [(0, 5, "a")]),
        ([(0, "a"), (2, "a"), (4, "b")], 4, [(0, 4, "a")]),  # what a stop string cuts off
        ([(0, "a"), (2, "b"), (4, "c")], 3, [(0, 2, "a"), (2, 3, "b")]),
    ],
)
def test_spans_cover_the_output_once(
    changes: Changes, tokens: int, spans: list[tuple[int, int, str]]
) -> None:
    assert weight_spans(changes, tokens) == [WeightSpan(*span) for span in spans]
    assert weight_spans(changes, tokens, "d1") == [WeightSpan(*span, adapter="d1") for span in spans]
