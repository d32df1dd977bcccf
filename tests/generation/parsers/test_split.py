"""However an output is cut into pieces, its parsers say the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.generation.parsers.calls import CallParser
from penstock.generation.parsers.delta import Delta, OutputParser, TextKind
from penstock.generation.parsers.formats import TOOL_FORMATS
from penstock.generation.parsers.message import MessageFormat, MessageParser
from penstock.generation.parsers.named_call import NamedCallParser
from penstock.generation.parsers.reasoning import ReasoningParser

HERMES = partial(CallParser, TOOL_FORMATS["hermes"])
LLAMA3 = partial(CallParser, TOOL_FORMATS["llama3_json"])
PARSERS: dict[str, Callable[[], OutputParser]] = {
    "hermes": HERMES,
    "llama3_json": LLAMA3,
    "think": partial(ReasoningParser, "hi"),
    "think, opened by the prompt": partial(ReasoningParser, "hi<think>\n"),
    "named": partial(NamedCallParser, "f"),
}


class Message:
    """A message's parsers, as one."""

    def __init__(self, format: MessageFormat) -> None:
        self._parser = MessageParser(format, new_id=lambda: "id")

    def push(self, text: str) -> Delta:
        return self._parser.push(text, last=False)

    def finish(self, *, cut: bool) -> Delta:
        return self._parser.push("", last=True, cut=cut)

    @property
    def idle(self) -> bool:
        return self._parser.idle

    @property
    def open(self) -> bool:
        return self._parser.open

    @property
    def guard(self) -> str:
        return self._parser.guard


WHOLE = MessageFormat(partial(ReasoningParser, ""), HERMES)
MAKERS: dict[str, Callable[[], OutputParser]] = {
    **PARSERS,
    "message": partial(Message, WHOLE),
    "tagged message": partial(Message, WHOLE._replace(tags=(("<answer>", "</answer>"), ("", "</end>")))),
}
FRAGMENTS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "</end>",
    "<|python_tag|>",
    '{"name": "f", "arguments": {"x": [1, {"y": "}\\"<tool_call>"}]}}',
    '{"parameters": {"é": "\\u00e9"}, "name": "g"}',
    '{"name": "h"}',
    '{"name": "i", "arguments": "{\\"x\\": 1}"}',
    '{"name": "j", "arguments": null, "id": 3}',
    '{"name": 5}',
    '{"name": "k", "arguments": {"x": ',
    "{",
    "}",
    '"',
    "\\",
    ";",
    "[",
    ",",
    "]",
    " ",
    "\n",
    "<",
    "text ",
    "täxt",
)
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


def whole(parser: OutputParser, pieces: list[str], *, cut: bool = False) -> Delta:
    delta = Delta()
    for piece in pieces:
        delta.add(parser.push(piece))
    delta.add(parser.finish(cut=cut))
    return delta


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("name", MAKERS)
@given(text=texts, cuts=st.lists(st.integers(0, 1000), max_size=12))
def test_any_split_gives_what_the_whole_gives(name: str, text: str, cuts: list[int]) -> None:
    make = MAKERS[name]
    expected = whole(make(), [text])
    assert whole(make(), pieces_of(text, cuts)) == expected
    assert whole(make(), list(text)) == expected


@given(text=texts, cuts=st.lists(st.integers(0, 1000), max_size=12))
def test_reasoning_then_calls_are_split_alike(text: str, cuts: list[int]) -> None:
    def run(pieces: list[str]) -> Delta:
        parser = MessageParser(MessageFormat(partial(ReasoningParser, ""), HERMES), new_id=lambda: "id")
        delta = Delta()
        for piece in pieces:
            delta.add(parser.push(piece, last=False))
        delta.add(parser.push("", last=True))
        return delta

    assert run(list(text)) == run(pieces_of(text, cuts)) == run([text])


@pytest.mark.parametrize("name", sorted(PARSERS.keys() - {"named"}))
@given(text=st.text(alphabet="ab é\n.,", max_size=40))
def test_text_without_marks_is_content(name: str, text: str) -> None:
    delta = whole(PARSERS[name](), list(text))
    assert delta.content + delta.reasoning == text
    assert not delta.calls


@given(text=texts)
def test_a_parser_that_is_idle_passes_everything_on(text: str) -> None:
    for make in (LLAMA3, partial(ReasoningParser, "")):
        parser = make()
        parser.push(text)
        if parser.idle:
            assert parser.push("<tool_call>{<think> x") == Delta(content="<tool_call>{<think> x")
            assert parser.finish(cut=False) == Delta()


@pytest.mark.parametrize("name", MAKERS)
@given(before=texts, plain=st.text(alphabet="<[{}]>( )f\n,é", max_size=12), after=texts)
def test_text_may_pass_by_an_open_parser(name: str, before: str, plain: str, after: str) -> None:
    parser, twin = MAKERS[name](), MAKERS[name]()
    said, expected = Delta(), Delta()
    said.add(parser.push(before))
    expected.add(twin.push(before))
    if parser.open and not set(plain) & set(parser.guard) and plain == plain.rstrip():
        passed = Delta(content=plain) if parser.open is TextKind.CONTENT else Delta(reasoning=plain)
        said.add(passed)  # not pushed
        assert twin.push(plain) == passed
        expected.add(passed)
        assert twin.open is parser.open
        assert set(twin.guard) == set(parser.guard)
    for each, delta in ((parser, said), (twin, expected)):
        delta.add(each.push(after))
        delta.add(each.finish(cut=False))
    assert said == expected


def test_parsers_open_after_reasoning_and_calls() -> None:
    parser = MessageParser(MessageFormat(partial(ReasoningParser, ""), HERMES))
    assert not parser.open
    parser.push("<think>a", last=False)
    assert parser.open is TextKind.REASONING
    parser.push("</think>", last=False)
    assert (parser.open, set(parser.guard)) == (TextKind.CONTENT, {"<"})
    parser.push("text ", last=False)
    assert not parser.open, "white space may precede a call"
    parser.push('<tool_call>{"name": "f"}</tool_call>', last=False)
    assert parser.open
    opened = MessageParser(MessageFormat(partial(ReasoningParser, "<think>")))
    assert opened.open is None, "the model may open it again"
    opened.push("a", last=False)
    assert opened.open is TextKind.REASONING
    hidden = MessageParser(MessageFormat(partial(ReasoningParser, "<think>"), show_reasoning=False))
    hidden.push("a", last=False)
    assert hidden.open is None, "reasoning that is not shown must be dropped"
