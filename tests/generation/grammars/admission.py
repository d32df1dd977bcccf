"""What the checked grammar of a JSON schema admits."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from penstock.generation.grammars.schema_check import check_schema
from penstock.generation.grammars.validation import ValidationResult

TOKENIZER = LLTokenizer("byte")
OPTIONS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", "lenient": True}


def checked(schema: Any, *, strict: bool = True) -> tuple[str, ValidationResult]:
    """The grammar of ``schema``, and what was said of it."""
    given = json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": OPTIONS}}]})
    verdict = check_schema(given, () if strict else ((),))
    return verdict.grammar or given, verdict


def admits(schema: Any, text: str, *, strict: bool = True) -> bool:
    """Whether the checked grammar of ``schema`` allows ``text`` as a whole."""
    grammar, verdict = checked(schema, strict=strict)
    assert verdict.problem == ""
    return grammar_admits(grammar, text)


def grammar_admits(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(TOKENIZER.tokenize_bytes(text.encode())) and matcher.is_accepting()
