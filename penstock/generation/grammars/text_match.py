"""Whether texts match what a JSON schema says of strings, by the grammar that llguidance makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LIMITS = LLParserLimits(verbose_errors=False)
_KEYWORDS = ("pattern", "minLength", "maxLength")


def none_matches(texts: Iterable[str], schemas: Sequence[dict[str, Any]]) -> bool:
    """Whether none of ``texts`` matches the pattern and length of all ``schemas``; False if nobody knows."""
    said = [{key: part[key] for key in _KEYWORDS if key in part} for part in schemas]
    said = [each for each in said if each]
    if not said:
        return False
    schema = {"type": "string", "allOf": said}
    matcher = LLMatcher(
        _bytes(), LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0, limits=LIMITS
    )
    return not matcher.is_error() and not any(_matches(matcher, text) for text in texts)


def _matches(matcher: LLMatcher, text: str) -> bool:
    walked = matcher.deep_copy()
    tokens = _bytes().tokenize_bytes(json.dumps(text, ensure_ascii=False).encode())
    return walked.consume_tokens(tokens) and walked.is_accepting()


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")
