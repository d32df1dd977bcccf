"""A call before the end of reasoning ends it, in every format; a mention of its marks does not."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.generation.parsers.calls import CallParser
from penstock.generation.parsers.delta import Delta
from penstock.generation.parsers.formats import TOOL_FORMATS
from penstock.generation.parsers.message import MessageFormat, MessageParser
from penstock.generation.parsers.registry import output_format
from penstock.generation.parsers.value_types import Parameters
from tests.generation.parsers.outputs import OUTPUTS, PARAMETERS, Output

OPENING = [
    each for each in OUTPUTS if TOOL_FORMATS[each.format].opens and not TOOL_FORMATS[each.format].begun
]
"""Those whose calls can follow any text."""
BARE = [each for each in OUTPUTS if each not in OPENING and not each.text.startswith("<|python_")]
"""Those of which only the form shows that they are calls."""


def message_of(tools: str, reasoning: str, pieces: list[str], *, prompt: str = "<think>\n") -> Delta:
    known = output_format(tools, reasoning, "")
    format = MessageFormat(
        known.reasoning_parser(prompt, calls=True, parameters=PARAMETERS), known.call_parser(PARAMETERS)
    )
    parser, delta = MessageParser(format, new_id=lambda: "id"), Delta()
    for piece in pieces:
        delta.add(parser.push(piece, last=False))
    delta.add(parser.push("", last=True))
    return delta


def calls_of(delta: Delta) -> list[tuple[str | None, str]]:
    return [(call.name, call.arguments) for call in delta.calls]


@pytest.mark.parametrize("width", [1, 7, 10_000])
@pytest.mark.parametrize("output", OPENING, ids=lambda output: output.format)
def test_a_call_ends_reasoning_in_every_format(
    output: tuple[str, str, str, list[tuple[str, str]]], width: int
) -> None:
    name, text, content, calls = output
    thought = "I think of <this> and [that]. "
    said = thought + text
    delta = message_of(name, "think", [said[at : at + width] for at in range(0, len(said), width)])
    assert calls_of(delta) == calls
    assert delta.reasoning.startswith(thought)
    assert (delta.reasoning + delta.content).split() == (thought + content).split()


MENTIONS = (
    "use <tool_call> or not",
    "<tool_call>\n<tool_call>",
    '<tool_call>{"name": "invented", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "write',
    '<tool_call>{"nam</think>',
    "<tool_call>write</tool_call>",
    "`<tool_call>{...}</tool_call>` </",
)


@pytest.mark.parametrize("mention", MENTIONS)
@pytest.mark.parametrize("width", [1, 5, 10_000])
def test_a_mention_does_not(mention: str, width: int) -> None:
    end = "" if mention.endswith("</think>") else "</think>"
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    text = f"So {mention}{end}Well{call}"
    delta = message_of("hermes", "think", [text[at : at + width] for at in range(0, len(text), width)])
    assert delta.reasoning == f"So {mention.removesuffix('</think>')}"
    assert delta.content == "Well"
    assert calls_of(delta) == [("now", "{}")]


@pytest.mark.parametrize("width", [1, 10_000])
def test_a_call_after_a_mention_ends_reasoning(width: int) -> None:
    text = 'So <tool_call> it is:\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    delta = message_of("hermes", "think", [text[at : at + width] for at in range(0, len(text), width)])
    assert (delta.reasoning, delta.content, calls_of(delta)) == (
        "So <tool_call> it is:\n",
        "",
        [("now", "{}")],
    )


FRAGMENTS = (
    *MENTIONS,
    "</think>",
    "<think>",
    '{"name": "now", "arguments": {}}',
    "<tool_call>",
    "<",
    "\n",
    "x",
)


@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join), width=st.integers(1, 9))
def test_any_cut_says_the_same(text: str, width: int) -> None:
    whole = message_of("hermes", "think", [text])
    assert (
        message_of("hermes", "think", [text[at : at + width] for at in range(0, len(text), width)]) == whole
    )


@pytest.mark.parametrize("to", ["functions.now", "now"])
def test_harmony_calls_a_function_of_the_request_by_its_bare_name(to: str) -> None:
    text = f"<|channel|>commentary to={to} <|constrain|>json<|message|>{{}}<|call|>"
    assert calls_of(message_of("openai", "", list(text), prompt="")) == [("now", "{}")]
    other = message_of("openai", "", [text.replace("now", "browser.search")], prompt="")
    assert not calls_of(other) or to != "now", "a tool of the model's own is none of the request's"


@pytest.mark.parametrize("output", BARE, ids=lambda output: output.format)
def test_without_an_opening_what_names_another_function_is_content(output: Output) -> None:
    parser = CallParser(TOOL_FORMATS[output.format], Parameters({"elsewhere": None}))
    delta = parser.push(output.text)
    delta.add(parser.finish(cut=False))
    assert not delta.calls
    marks = re.compile(r"<\|python_(start|end)\|>")  # those around text are no content
    said, given = (marks.sub("", text).split() for text in (delta.content, output.text))
    assert said == given or output.format == "functionary_v32"


@pytest.mark.parametrize("output", OPENING, ids=lambda output: output.format)
def test_a_call_has_the_name_that_the_model_wrote(output: Output) -> None:
    parser = CallParser(TOOL_FORMATS[output.format], Parameters({"elsewhere": None}))
    delta = parser.push(output.text)
    delta.add(parser.finish(cut=False))
    spelled = {name for name, _ in output.calls if name in output.text}
    assert {call.name for call in delta.calls} <= spelled
