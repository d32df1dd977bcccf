"""What models leave out, vary or write too much of is read as they mean it."""

from __future__ import annotations

import pytest

from penstock.generation.parsers.calls import CallParser
from penstock.generation.parsers.formats import TOOL_FORMATS
from penstock.generation.parsers.value_types import Parameters
from tests.generation.parsers.test_split import whole

PARAMETERS = Parameters({"f": {"type": "object", "properties": {"s": {"type": "string"}}}, "g": None})
TWO = '{"s": "x", "t": 1}'
F, G = ("f", '{"s": "x"}'), ("g", "{}")
JSON = '{"name": "f", "arguments": {"s": "x"}}'
OTHER = '{"name": "other", "parameters": {}}'
QWEN = "<tool_call>\n<function=f>\n<parameter=s>\n%s\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
HUNYUAN = (
    "<tool_calls><tool_call>f<tool_sep><arg_key>s</arg_key><arg_value>%s</arg_value></tool_call></tool_calls>"
)
UNCLOSED = QWEN.replace("</parameter>\n", "")
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"s": "x"}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
Calls = list[tuple[str, str]]


def said(format: str, pieces: list[str], *, cut: bool = False) -> tuple[str, Calls]:
    delta = whole(CallParser(TOOL_FORMATS[format], PARAMETERS), pieces, cut=cut)
    return delta.content, [(call.name or "", call.arguments) for call in delta.calls]


def assert_says(format: str, text: str, content: str, calls: Calls) -> None:
    """However the text is cut."""
    assert said(format, [text]) == (content, calls)
    assert said(format, list(text)) == (content, calls)
    for place in range(len(text)):
        assert said(format, [text[:place], text[place:]]) == (content, calls)
        for cut in (False, True):
            head = text[:place]
            assert said(format, [head], cut=cut) == said(format, list(head), cut=cut)


@pytest.mark.parametrize(
    ("format", "text", "calls"),
    [
        ("llama3_json", f'[{OTHER}, {{"name": "f", "parameters": {{"s": "x"}}}}]', [("other", "{}"), F]),
        ("llama3_json", f'{OTHER}; {{"name": "g", "parameters": {{}}}}', [("other", "{}"), G]),
        ("pythonic", "[other(a=[1]), f(s='x')]", [("other", '{"a": [1]}'), F]),
        ("llama4_pythonic", "[other(), f(s='x')]", [("other", "{}"), F]),
        ("llama4_pythonic", "<|python_start|>[other()]<|python_end|>", [("other", "{}")]),
        ("llama3_json", f"<|python_tag|>{OTHER}", [("other", "{}")]),
        ("mistral", f"[TOOL_CALLS][{OTHER}, {JSON}]", [("other", "{}"), F]),
        ("olmo3", "<function_calls>other()\nf(s='x')</function_calls>", [("other", "{}"), F]),
    ],
)
def test_any_call_to_a_function_of_the_request_shows_that_these_are_calls(
    format: str, text: str, calls: Calls
) -> None:
    assert_says(format, text, "", calls)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("llama3_json", f"[{OTHER}, {OTHER}]"),
        ("llama3_json", OTHER),
        ("llama3_json", f'{OTHER}; {{"na'),
        ("pythonic", "[other(), another(1)]"),
        ("pythonic", "[other()]"),
        ("llama4_pythonic", "[other()] and so on"),
    ],
)
def test_calls_to_other_functions_alone_are_text(format: str, text: str) -> None:
    assert_says(format, text, text, [])
    assert said(format, [OTHER], cut=True) == (OTHER, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("So: <|python_start|>[f(s='x')]<|python_end|>\n<|python_start|>[g()]<|python_end|>", "So:", [F, G]),
        ("[f(s='x')]<|python_end|> then <|python_start|>[g()]<|python_end|>", " then", [F, G]),
        ("A <|python_start|> is a mark.", "A <|python_start|> is a mark.", []),
    ],
)
def test_marks_of_a_format_without_an_opening_are_one_within_text(
    text: str, content: str, calls: Calls
) -> None:
    assert_says("llama4_pythonic", text, content, calls)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("qwen3_coder", QWEN),
        ("glm45", GLM),
        ("hy_v3", HUNYUAN),
        ("seed_oss", QWEN.replace("tool_call>", "seed:tool_call>")),
    ],
)
def test_marks_within_a_value_are_text_if_its_own_end_follows(format: str, text: str) -> None:
    for mark in (TOOL_FORMATS[format].close, TOOL_FORMATS[format].end):  # type: ignore[attr-defined]
        for value in (f"say {mark} ok", f"{mark}", f"a {mark}\n{mark} b"):
            assert_says(format, text % value, "", [("f", f'{{"s": "{value}"}}'.replace("\n", "\\n"))])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (UNCLOSED % "x", "", [F]),
        (f"{UNCLOSED % 'x'}\nDone.", "\nDone.", [F]),
        (f"{UNCLOSED % 'x'}\n{QWEN % 'x'} Done.", " Done.", [F, F]),
        (UNCLOSED.replace("</function>\n", "") % "x", "", [F]),
        (UNCLOSED.replace("</f", "<parameter=t>\n1\n</parameter>\n</f") % "x", "", [("f", TWO)]),
    ],
)
def test_a_value_without_an_end(text: str, content: str, calls: Calls) -> None:
    assert_says("qwen3_coder", text, content, calls)


@pytest.mark.parametrize(
    ("format", "text", "content"),
    [
        ("mistral", f"[TOOL_CALLS][{JSON}]\nDone.", "\nDone."),
        ("granite", f"<|tool_call|>[{JSON}]\nDone.", "\nDone."),
        ("phi4_mini_json", f"functools[{JSON}] Done.", " Done."),
        ("lfm2", "<|tool_call_start|>[f(s='x')] Done.", " Done."),
        ("hermes", f"<tool_call>\n{JSON}}}\n</tool_call> Done.", " Done."),
        ("hermes", f"<tool_call>\n{JSON}}}", ""),
        ("hunyuan_a13b", f"<tool_calls>[{JSON}}}]</tool_calls>", ""),
        ("deepseek_v3", DEEPSEEK, ""),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "x"}}', ""),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "x"} } so', " } so"),
    ],
)
def test_brackets_after_a_call_are_no_content(format: str, text: str, content: str) -> None:
    assert_says(format, text, content, [F])
