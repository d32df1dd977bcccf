"""Grammars of texts within JSON strings accept what JSON escapes, and nothing else."""

from __future__ import annotations

import json
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.generation.grammars.lark_in_json import NotEmbeddable, in_json_string, regex_in_json_string

PATCH = r"""
start: begin hunk+ end
begin: "*** Start" LF
end: "*** Stop" LF?
hunk: remove | change
remove: "*** Remove: " path LF
change: "*** Change: " path LF line+ -> changed
path: /(.+)/
?line: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
SUM = """
start: sum
sum: NUMBER ("+" sum)? | "(" sum ")"
%import common.NUMBER
"""


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer(), grammar)
    assert not matcher.get_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


GOOD = '*** Start\n*** Change: a "b"\\c.py\n+\tx = "é\\n"\n-\n*** Remove: z\n*** Stop'


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (GOOD, True),
        (GOOD + "\n", True),
        (GOOD + "\n\n", False),
        ("*** Start\n*** Stop", False),
        ("*** Start\n*** Change: x\n?y\n*** Stop", False),
        ("*** Start\n*** Change: x\n+y *** Stop", False),
    ],
)
def test_a_patch(text: str, good: bool) -> None:
    assert accepts(PATCH, text) is good
    embedded = in_json_string(PATCH)
    assert accepts(embedded, in_json(text)) is good
    assert not accepts(embedded, text)


def test_a_patch_between_quotes() -> None:
    side = [
        {"name": "call", "lark_grammar": 'start: "{\\"input\\": \\"" @patch "\\"}"'},
        {"name": "patch", "lark_grammar": in_json_string(PATCH)},
    ]
    grammar = json.dumps({"grammars": side})
    assert not LLMatcher.validate_grammar(grammar)
    assert accepts(grammar, json.dumps({"input": GOOD}, ensure_ascii=False))
    assert accepts(grammar, json.dumps({"input": GOOD + "\n"}, ensure_ascii=False))
    assert not accepts(grammar, json.dumps({"input": GOOD + "x"}, ensure_ascii=False))


def test_recursion_is_possible_where_nothing_is_escaped() -> None:
    assert accepts(in_json_string(SUM), "(1+(2))")
    with pytest.raises(NotEmbeddable, match="refers to itself"):
        in_json_string(SUM.replace('"+"', '"\\n"'))


@pytest.mark.parametrize(
    ("regex", "text", "good"),
    [
        (r"[^a]+", 'b"\n\\', True),
        (r"[^a]+", "ba", False),
        (r"^[a-z\"]+$", 'x"y', True),
        (r"\S+\s\S+", "a\tb", True),
        (r"\S+\s\S+", "a b", True),
        (r"\d{2}/\w", "12/x", True),
        (r"https:\/\/\w", "https://x", True),
        (r"\\/[^\/]", '\\/"', True),
        (r".", "\n", False),
        (r"(?:a|\\)*", "a\\a\\", True),
        (r"\u00e9|\x41", "A", True),
        ('[“”"]+', '"“', True),
        ('[“”"]+', "x", False),
        (r"[\n\u00e9]", "é", True),
        (r"a.c", 'a"c', True),
        (r"\.", ".", True),
        (r"\.", "x", False),
    ],
)
def test_regular_expressions(regex: str, text: str, good: bool) -> None:
    assert accepts(regex_in_json_string(regex), in_json(text)) is good


@pytest.mark.parametrize("imports", ["%import common (INT, LF)", "%import common.LF\n%import common.INT"])
def test_terminals_are_imported_alone_or_as_a_list(imports: str) -> None:
    embedded = in_json_string(f"{imports}\n%import common.WORD -> NAME\nstart: (NAME INT LF)+")
    assert accepts(embedded, in_json("a1\nbc23\n"))
    assert not accepts(embedded, in_json("a1\nbc\n"))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: x "\\n"', "no rule 'x'"),
        ('begin: "a"', "no rule 'start'"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("start: A\n%import common.NAME -> A", "common.NAME"),
        ("start: A\n%import python.NAME", "'common' alone"),
        ("start: @other", "'@other'"),
        ("start: /a(?=b)\n/", "not supported"),
        ('start: /(?=b)"/', "look-around"),
        ('start: /[a"]/i', "flags"),
        ('start: "\\n"i', "ignore case"),
        ('start: "\\u0001"', "control character"),
        ("start: /[\\x00-\\x02]/", "control characters"),
        ("start: /[[a]b]/", "nested class"),
        ('start: "x" start | "\\n"', "refers to itself"),
        ("x" * 70_000, "at most"),
    ],
)
def test_what_cannot_be_embedded(grammar: str, reason: str) -> None:
    with pytest.raises(NotEmbeddable, match=reason):
        in_json_string(grammar)
