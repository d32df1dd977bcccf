"""Grammars that would take too much to compile are refused, others are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.engine.sampling.grammar_compiler import LIMITS, failure_reason
from penstock.engine.sampling.grammar_limits import check_multiples
from penstock.supervisor.startup.model_resolution import DEMO_DIR


def schema(*multiples: float) -> str:
    properties = {
        f"p{index}": {"type": "number", "multipleOf": value} for index, value in enumerate(multiples)
    }
    return LLMatcher.grammar_from_json_schema(json.dumps({"type": "object", "properties": properties}))


@pytest.mark.parametrize("multiples", [(0.01, 5), (10_000,), (1, 2, 5, 10), (0.5, 0.25), (99_991,)])
def test_usual_multiples_are_compiled(multiples: tuple[float, ...]) -> None:
    check_multiples(schema(*multiples))


@pytest.mark.parametrize("multiples", [(999_983,), (9973, 9967), (1e7,), (0.01, 99_991), (1e-30,), (1e300,)])
def test_multiples_with_too_many_remainders_are_refused(multiples: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="multipleOf"):
        check_multiples(schema(*multiples))


@pytest.mark.parametrize(
    "text",
    [
        'start: %json {"type": "integer", "multipleOf": 999983}',
        'start: %json {"type": "integer", "multiple\\u004ff" : 999983}',
        '{"grammars": [{"lark_grammar": "start: %json {\\"multipleOf\\": 999983}"}]}',
    ],
)
def test_they_are_found_in_any_spelling(text: str) -> None:
    with pytest.raises(ValueError, match="multipleOf"):
        check_multiples(text)


@pytest.mark.parametrize("text", ['start: "multipleOf"', '{"multipleOf": 0}', '{"multipleOf": "x"}', ""])
def test_what_is_no_multiple_is_left_to_others(text: str) -> None:
    check_multiples(text)


@pytest.mark.parametrize(
    ("grammar", "text", "words"),
    [
        ({"json_schema": {"enum": [f"v{number}" for number in range(30_000)]}}, "", "its texts and patterns"),
        (
            {"json_schema": {"properties": {f"p{number}": {} for number in range(900)}, "type": "object"}},
            '{"p0',
            "too many alternatives at one place",
        ),
        ({"lark_grammar": "start: /a{99999}/"}, "aa", "its texts, patterns and lengths need too many steps"),
    ],
    ids=["texts", "alternatives", "steps"],
)
def test_the_limits_of_the_library_are_told_in_words(grammar: Any, text: str, words: str) -> None:
    tokenizer = LLTokenizer((DEMO_DIR / "tokenizer.json").read_text())
    matcher = LLMatcher(tokenizer, json.dumps({"grammars": [grammar]}), log_level=0, limits=LIMITS)
    for token in tokenizer.tokenize_str(text):
        if not matcher.is_error():
            matcher.compute_bitmask()
            matcher.consume_token(token)
    reason = failure_reason(matcher)
    assert reason.startswith("the grammar is too large")
    assert words in reason
    assert reason.endswith(")")
