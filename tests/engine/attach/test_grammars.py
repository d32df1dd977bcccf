"""Grammars as vLLM's own backend takes them allow the same outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from penstock.engine.attach.grammars import structured_outputs
from penstock.engine.base import RequestRejected
from penstock.generation.grammars.call_grammar import (
    CalledTool,
    InputGrammar,
    forced_grammar,
    preceded,
)
from tests.engine.support import byte_level_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [1, 22]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(byte_level_tokenizer().to_str())


def in_vllm(params: dict[str, Any]) -> str:
    """The llguidance grammar that vLLM's backend makes of the fields (serialize_guidance_grammar)."""
    assert params.pop("_backend") == "guidance"
    ((kind, text),) = params.items()
    if kind == "json":
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": True})
    assert kind == "grammar"
    return grammar_from("grammar", text)


def allows(grammar: str, text: str, tokenizer: LLTokenizer) -> bool:
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return bool(matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens)) and bool(
        matcher.is_accepting()
    )


NAMED = '{"name": "ab", "age": 22}'
TOOLS = [
    CalledTool("weather", SCHEMA),
    CalledTool("run", None, InputGrammar("lark", 'start: "go" /[a-z]{1,3}/ "@reasoning"')),
    CalledTool("sum", None, InputGrammar("regex", r"[0-9]+\+[0-9]+")),
]
CASES = [
    (
        LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), defaults={"whitespace_flexible": False}),
        ['{"name":"ab","age":1}', NAMED, '{"age":1}', "x"],
    ),
    (LLMatcher.grammar_from_regex("a+b"), ["aab", "b", "ab"]),
    (grammar_from("choice", ["yes", "no"]), ["yes", "no", "maybe"]),
    ('start: "a" | b\nb: "c"+\n', ["a", "ccc", "b"]),
    (
        forced_grammar(TOOLS, named=False, one_call=False),
        [
            '[{"name":"weather","parameters":{"name":"x","age":1}}]',
            '[{"name":"run","parameters":{"input":"goabc@reasoning"}}]',
            '[{"name":"run","parameters":{"input":"goABC"}}]',
            '[{"name":"sum","parameters":{"input":"1+22"}}]',
            "[]",
        ],
    ),
    (forced_grammar(TOOLS[1:2], named=True, one_call=True), ['{"input":"goa@reasoning"}', '{"input":"a"}']),
    (
        preceded(
            LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA), defaults={"whitespace_flexible": False}),
            'start: "<think>" /[a-z ]*/ "</think>"',
        ),
        ['<think>so it is</think>{"name":"ab","age":1}', '{"name":"ab","age":1}', "<think></think>"],
    ),
    (
        preceded(forced_grammar(TOOLS, named=False, one_call=True), 'start: "<think>" /[a-z ]*/ "</think>"'),
        ['<think>x</think>[{"name":"sum","parameters":{"input":"1+22"}}]', "<think>x</think>"],
    ),
]


@pytest.mark.parametrize(("grammar", "texts"), CASES)
def test_the_same_texts_are_allowed(grammar: str, texts: list[str], tokenizer: LLTokenizer) -> None:
    translated = in_vllm(structured_outputs(grammar))
    expected = [allows(grammar, text, tokenizer) for text in texts]
    assert [allows(translated, text, tokenizer) for text in texts] == expected
    assert True in expected


def test_what_vllm_would_rewrite_is_refused() -> None:
    with pytest.raises(RequestRejected, match="GBNF"):
        structured_outputs('root ::= "a"')


def test_grammars_that_refer_to_themselves_are_refused() -> None:
    grammar = {"grammars": [{"name": "a", "lark_grammar": "start: @a"}]}
    with pytest.raises(RequestRejected, match="too deeply"):
        structured_outputs(json.dumps(grammar))
