"""Calls that are write_calls in a format are read back as they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.generation.parsers.call_syntax import ElementCalls, Section
from penstock.generation.parsers.call_writing import write_calls
from penstock.generation.parsers.calls import CallParser
from penstock.generation.parsers.formats import TOOL_FORMATS
from penstock.generation.parsers.value_types import Parameters
from tests.generation.parsers.test_split import whole

SCHEMAS: dict[str, dict[str, Any] | None] = {
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "line": {"type": "integer"},
            "tags": {"type": "array"},
            "deep": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
SECTIONS: dict[Section, str] = {
    section: name
    for name, section in TOOL_FORMATS.items()
    if not section.begun and not isinstance(section, ElementCalls)
}
texts = st.text(alphabet="a1 \"'\\`\n\t,:;()[]{}<>/=|&ü😀", max_size=12).filter(
    lambda text: '<|"|>' not in text  # which Gemma's strings cannot have
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts | st.sampled_from([1.5, -0.25]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
writes = st.fixed_dictionaries(
    {"path": texts},
    optional={
        "line": st.integers(-99, 99),
        "tags": st.lists(values, max_size=3),
        "deep": st.dictionaries(texts, values, max_size=3),
    },
)
calls = st.lists(
    st.tuples(st.just("write"), writes) | st.tuples(st.just("now"), st.just({})), min_size=1, max_size=3
)


@pytest.mark.parametrize("section", SECTIONS, ids=SECTIONS.values())
@given(calls=calls, first=st.integers(0, 20))
def test_what_is_spelled_is_read(section: Section, calls: list[tuple[str, Any]], first: int) -> None:
    text = write_calls(calls, section, first)
    for pieces in ([text], list(text)):
        delta = whole(CallParser(section, Parameters(SCHEMAS)), pieces)
        assert [(call.name, json.loads(call.arguments)) for call in delta.calls] == calls, text
        assert not delta.content.strip(), text


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("lfm2", '<|tool_call_start|>[f(a="it\'s", b=[True, None, {"k": 1}]), g()]<|tool_call_end|>'),
        (
            "qwen3_coder",
            "<tool_call><function=f>\n<parameter=a>\nit's\n</parameter>\n<parameter=b>\n"
            '[true, null, {"k": 1}]\n</parameter>\n</function><function=g>\n</function></tool_call>',
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>"
            '{"a": "it\'s", "b": [true, null, {"k": 1}]}<|tool_call_end|><|tool_call_begin|>functions.g:4'
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        (
            "gemma4",
            '<|tool_call>call:f{a:<|"|>it\'s<|"|>,b:[true,null,{k:1}]}<tool_call|><|tool_call>call:g{}'
            "<tool_call|>",
        ),
        (
            "minimax_m3",
            '[{"name": "f", "parameters": {"a": "it\'s", "b": [true, null, {"k": 1}]}}, {"name": "g", '
            '"parameters": {}}]',
        ),
    ],
)
def test_spellings(format: str, text: str) -> None:
    given: list[tuple[str, Any]] = [("f", {"a": "it's", "b": [True, None, {"k": 1}]}), ("g", {})]
    assert write_calls(given, TOOL_FORMATS[format], 3) == text


def test_a_mark_in_a_value() -> None:
    given = [("write", {"path": "a</param> b"})]
    delta = whole(CallParser(TOOL_FORMATS["minicpm5"]), [write_calls(given, TOOL_FORMATS["minicpm5"])])
    assert [json.loads(call.arguments) for call in delta.calls] == [{"path": "a</param> b"}]


def test_arguments_that_are_no_object() -> None:
    broken: list[tuple[str, Any]] = [("f", '{"a": "x')]
    assert (
        write_calls(broken, TOOL_FORMATS["hermes"])
        == '<tool_call>{"name": "f", "arguments": {"a": "x}</tool_call>'
    )
    assert 'f(arguments="{\\"a\\": \\"x")' in write_calls(broken, TOOL_FORMATS["lfm2"])
    assert write_calls([("f", {"no name": 1})], TOOL_FORMATS["lfm2"]) == write_calls(
        [("f", {"no name": 1})], None
    )
