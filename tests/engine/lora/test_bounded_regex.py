"""Regular expressions that take bounded time, compared with Python's."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.lora.bounded_regex import BoundedRegex, PatternError, StepBudget


def matches(pattern: str, text: str, steps: int = 10_000_000) -> bool:
    return BoundedRegex(pattern, StepBudget(steps)).fullmatch(text)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.layers\.(0|1|2)\..*q_proj",
        r"^model\.layers\.\d+\.self_attn\.[qkv]_proj$",
        r"model\.layers\.(?:[0-9]|1[0-5])\..+",
        r".*layers\.[^0]{1,2}\..*",
        r"(.*\.)?(q_proj|v_proj)",
        r"\w+(\.\w+)*",
        r"model.layers.1{2}.mlp.up_proj|x",
        r"model\.layers\.1{2,}\.mlp\.up_proj",
        "",
        "|a",
        "(^|x)model.*?",
        r"[]a][a\]-]+[\d_]?",
    ],
)
def test_it_agrees_with_python_on_patterns_of_layers(pattern: str) -> None:
    layers = [
        f"model.layers.{number}.{end}"
        for number in (0, 1, 2, 9, 10, 11, 15, 16, 111)
        for end in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "a")
    ]
    for text in [*layers, "", "a", "x", "q_proj", "]a", "a-_", "a]-3"]:
        assert matches(pattern, text) == bool(re.fullmatch(pattern, text)), text


ATOM = st.sampled_from(["a", "b", "_", r"\.", ".", r"\d", r"\W", "[ab]", "[^a-c]", r"[\d.]", "1", "^", "$"])
PATTERN = st.recursive(
    ATOM,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)


@given(pattern=PATTERN, texts=st.lists(st.text("ab.1_", max_size=6), max_size=5))
def test_it_agrees_with_python(pattern: str, texts: list[str]) -> None:
    for text in texts:
        assert matches(pattern, text) == bool(re.fullmatch(pattern, text))


@given(pattern=st.text(r"ab.*+?()[]{}|^$\d,-1", max_size=12), text=st.text("ab1", max_size=4))
def test_what_it_accepts_means_what_it_means_to_python(pattern: str, text: str) -> None:
    try:
        matched = matches(pattern, text)
    except PatternError:
        return
    try:
        expected = re.compile(pattern)
    except re.error:
        return  # Python refuses to repeat an anchor
    assert matched == bool(expected.fullmatch(text))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a|a)*b",
        "(a|aa)+b",
        "(.*)*x",
        "(.*a){12}b",
        "a?" * 300 + "a" * 300 + "b",
        "(a*)*" * 100 + "b",
    ],
)
def test_patterns_that_keep_a_backtracking_engine_busy(pattern: str) -> None:
    assert not matches(pattern, "a" * 500, 50_000_000)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a" * 1001, "it has 1001 characters; the maximum is 1000"),
        ("(a{1000}){1000}", "it is too long"),
        ("(){9999}", "it is too long"),
        ("(((a{20}){20}){20}){20}", "it is too long"),
        ("(" * 60 + ")" * 60, "more than 50 groups within groups"),
        ("(a", r"a \( without its \)"),
        ("a)", r"a \) without its \("),
        ("[a", "it ends too early"),
        ("a\\", "it ends too early"),
        ("[]", "it ends too early"),
        ("*a", "'\\*' has nothing to repeat"),
        ("a{x}", "'{' has nothing to repeat"),
        ("a**", "'\\*' follows a repetition"),
        ("a++", "'\\+' follows a repetition"),
        ("a{3,2}", "no number of repetitions"),
        ("(?=a)", r"'\(\?=' is not supported"),
        ("(?i)a", r"'\(\?i' is not supported"),
        (r"(a)\1", r"'\\1' is not supported"),
        (r"\ba", r"'\\b' is not supported"),
        (r"[\d-z]", r"is not supported"),
        ("[z-a]", "'z-a' is not supported"),
    ],
)
def test_what_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        matches(pattern, "a")


def test_steps_run_out() -> None:
    expression = BoundedRegex("(a|b)*c", StepBudget(2000))
    assert not expression.fullmatch("ab")
    with pytest.raises(PatternError, match="to match it takes too long"):
        expression.fullmatch("ab" * 1000)
