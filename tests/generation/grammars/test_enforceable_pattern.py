from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given, settings, strategies

from penstock.generation.grammars.enforceable_pattern import enforceable
from penstock.generation.grammars.pattern_syntax import Unenforceable
from tests.generation.grammars.admission import TOKENIZER, admits, checked

PATTERNS = [
    r"^\bfoo\b$",
    r"\bfoo\b",
    r"foo\b.*bar",
    r"(\bfoo|bar\b) ?x",
    r"a\Bb?",
    r"a|^b\b|o$",
    r"^https?:\/\/[-\w@:%.]{1,9}\.[a-z()]{1,6}\b([-\w()@]*)$",
    r"^(?=.*\d)(?=.*[a-z]).{3,}$",
    r"foo(?=bar)",
    r"(?<=a)b",
    r"^(?!a)[a-x]",
    r"^(?!foo|a[b/]$)[a-z/]+$",
    r"^(?!\.)(?!.*\.\.)[a-z.]+$",
    r"^(?!.*-b)(?!.*é)\S*$",
    r"^(?!^[-x.]*$)[-x]?\S*",
    r"^(?![ab]+$)[ab]*o?$",
    r"^[a-zA-Z-_.]+\d",
    r"^[\s\S]*\w[^\s]\S+",
    r"(?i)^FOO",
    r"^x{2,3}[^-a]",
    r"^\-\_\ \/",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_what_it_did(pattern: str) -> None:
    """Judged by Python's own engine, where it is of one mind with ECMAScript."""
    from llguidance import LLMatcher

    grammar, verdict = checked({"type": "string", "pattern": pattern})
    assert verdict.problem == ""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)

    @settings(max_examples=150, deadline=None)
    @given(strategies.text(alphabet="ab foxr-x1_.é:/h)", max_size=12))
    @example("foo bar")
    @example("http://a.co")
    @example("https://a.b(")
    @example("foobar x")
    def agree(text: str) -> None:
        walked = matcher.deep_copy()
        whole = walked.consume_tokens(TOKENIZER.tokenize_bytes(json.dumps(text, ensure_ascii=False).encode()))
        assert (whole and walked.is_accepting()) == bool(re.search(pattern, text, re.ASCII))

    agree()


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        (r"^[[0-9]$", ["[", "5"], ["", "a"]),
        (r"^[a&&b]$", ["&", "a"], ["c"]),
        (r"^[+--]$", ["+", ",", "-"], ["."]),
        (r"^[^]$", ["\n", "a"], [""]),
        (r"^\cC$", ["\x03"], ["C"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^\ud83d\ude00\u{61}\x41$", ["\U0001f600aA"], ["a"]),
        (r"^${a}{,3}$", [], ["${a}{,3}"]),
        (r"^\${a}$", ["${a}"], ["$a"]),
        (r"^.$", ["a", "é"], ["\r", "\u2028", "\n"]),
        (r"^\S$", ["a"], ["\ufeff", "\x1c", "\xa0"]),
        (r"^\d\w$", ["1a"], ["١a", "1é"]),
        (r"^\<b\>$", ["<b>"], ["b"]),
        (r"^(?!$)a*", ["a", "b"], [""]),
    ],
)
def test_ecma_script_is_what_counts(pattern: str, texts: list[str], others: list[str]) -> None:
    schema = {"type": "string", "pattern": pattern}
    if not texts:  # an assertion in the middle
        assert checked(schema)[1].problem
        return
    for text in (*texts, *others):
        assert admits(schema, json.dumps(text, ensure_ascii=False)) == (text in texts)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        (r"^(a)\1$", "the back reference at character 4"),
        (r"^ab(?<x>c)\k<x>", "the back reference at character 10"),
        (r"^(?!a*b)c", "the negative look-ahead at character 1"),
        (r"^a(?!b)c", "the look-around at character 2"),
        (r"a(?=b)c", "the look-around at character 1"),
        (r"a(?<!b)", "the look-around at character 1"),
        (r"(?:a|b\b)+", "the word boundary within the group at character 0"),
        (r"^a\bb$", "a word boundary that no text has"),
        (r"[a", "class"),
        (r"(a", "the group at character 0 is not closed"),
        (r"a)", "the parenthesis at character 1 closes nothing"),
        (r"a**", "the repetition at character 2 repeats nothing"),
        (r"[z-a]", "the range at character 1 is empty"),
        (r"\ud800", "the escape at character 0 is no character"),
        (r"\e", "the escape '\\e' at character 0 is unknown"),
        (r"^\Aabc\z$", "the escape '\\A' at character 1 is unknown"),
        (r"^abc\Z$", "the escape '\\Z' at character 4 is unknown"),
        (r"^abc\z$", "the escape '\\z' at character 4 is unknown"),
        (r"^[\pL]$", "the escape '\\p' at character 2 is unknown"),
        (r"^\01$", "the octal escape '\\01' at character 1"),
        (r"^[\00]$", "the octal escape '\\00' at character 2"),
        ("(" * 2000, "its groups are nested too deeply"),
        (r"(\ba|b)" * 40, "its word boundaries have too many alternatives"),
    ],
)
def test_what_no_grammar_can_have_is_named_with_its_place(pattern: str, problem: str) -> None:
    with pytest.raises(Unenforceable, match=re.escape(problem)):
        enforceable(pattern)
    _, verdict = checked({"type": "object", "properties": {"a": {"pattern": pattern}}})
    assert verdict.path == ("properties", "a")
    assert verdict.problem.endswith("the keyword 'pattern' cannot be enforced")
    assert admits({"type": "string", "pattern": pattern}, '"any"', strict=False)


def test_patterns_of_names() -> None:
    schema = {"type": "object", "patternProperties": {r"^\bx\b$": {"type": "integer"}}}
    assert admits(schema, '{"x": 1}')
    assert not admits(schema, '{"y": 1}')
    refused = {"type": "object", "patternProperties": {"^(?!a)b": {"type": "integer"}}}
    assert "look-ahead" in checked(refused)[1].problem
    assert admits(refused, '{"y": 1}', strict=False)
