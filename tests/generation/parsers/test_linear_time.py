"""Parsing takes time in proportion to an output's length, whatever its text and however it is cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

import pytest

from penstock.generation.parsers.answer_tags import Tags
from penstock.generation.parsers.call_syntax import Section
from penstock.generation.parsers.calls import CallParser, RequiredCallsParser
from penstock.generation.parsers.delta import Delta, OutputParser
from penstock.generation.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from penstock.generation.parsers.harmony import HarmonyParser
from penstock.generation.parsers.message import MessageFormat, MessageParser
from penstock.generation.parsers.named_call import NamedCallParser
from penstock.generation.parsers.reasoning import ReasoningParser
from tests.generation.parsers.outputs import OUTPUTS, PARAMETERS

MOST = 2.5
"""Times the time that a text of twice the length may take."""
ATTEMPTS = 6
"""A measurement that was disturbed is repeated; a time that grows with the square is 4 times as long each
time."""
SHORT_S = 0.004
"""A time that is too short to be compared."""
WIDTHS = {"characters": (1, 4), "pieces": (64, 1), "whole": (1 << 30, 1)}
"""Characters per piece, and the part of a text, one in so many, that is parsed in such pieces."""
SECTIONS: dict[Section, str] = {section: name for name, section in TOOL_FORMATS.items()}


def seconds(make: Callable[[], MessageParser], text: str, width: int) -> float:
    parser, delta = make(), Delta()
    pieces = [text[at : at + width] for at in range(0, len(text), width)]
    start = time.process_time()
    for piece in pieces:
        delta.add(parser.push(piece, last=False))
    delta.add(parser.push("", last=True))
    assert delta.pieces is not None
    return time.process_time() - start


def assert_linear(
    make: Callable[[], MessageParser],
    unit: str,
    size: int,
    *,
    head: str = "",
    widths: Iterable[str] = WIDTHS,
) -> None:
    """``unit`` repeated to so many characters, and to twice as many, after ``head``."""
    text = head + unit * (size // len(unit))
    twice = head + unit * (2 * size // len(unit))
    for width, share in map(WIDTHS.__getitem__, widths):
        once = text[: len(text) // share], twice[: len(twice) // share]
        ratios = []
        for _ in range(ATTEMPTS):
            longer = seconds(make, once[1], width)
            if longer < SHORT_S:
                ratios.append(0.0)
                break
            ratios.append(longer / max(seconds(make, once[0], width), 1e-6))
            if ratios[-1] <= MOST:
                break
        assert min(ratios) <= MOST, f"{head + unit!r} in pieces of {width}: {ratios}"


def message(
    reasoning: Callable[[], OutputParser] | None = None,
    tools: Callable[[], OutputParser] | None = None,
    tags: Tags = (),
) -> Callable[[], MessageParser]:
    custom = frozenset({"write"})
    return partial(
        MessageParser, MessageFormat(reasoning, tools, custom=custom, tags=tags), new_id=lambda: "id"
    )


def units(section: Section) -> list[tuple[str, str]]:
    """Texts to repeat, each after a head."""
    texts = section.texts()
    opening = (section.opens or (section.optional or "",))[0]
    whole = next(output.text for output in OUTPUTS if TOOL_FORMATS[output.format] == section)
    start = whole[: whole.index("write") + 5 if "write" in whole else 40]
    found = [("", text) for text in texts]
    found += [("", whole), ("", start), ("", opening[:-1] or "["), (opening, " "), ("x", " \n")]
    found += [(start, each) for each in ('"', "\\", "[", "1,", "</", "{", " ", "\\ud83d", "x=")]
    found += [(f"{start}{each}", "1,") for each in ("(a=[", '", "arguments": {"a": [', '": ["')]
    found += [
        (opening + '{"arguments": {"a": "', "a"),
        (opening + '{"x": "', "\\n"),
        (opening + '{"x": ', "1"),
    ]
    found += [(f"{start}(path='", each) for each in ("' ", "'", "'a", "\\'")]
    parameter = getattr(section, "parameter", "")
    if parameter:
        key = parameter + "tags" + getattr(section, "parameter_end", "") + getattr(section, "value", "")
        found += [
            (start + getattr(section, "call_end", "") + key, each)
            for each in ("[", "1,", "</", "\n", "null", section.texts()[-1], f"{section.close}a")
        ]
    if not section.opens:
        found += [("[", "other(), "), ("", '{"name": "other", "parameters": {}}; ')]
    return found


SIZE = 6_000


@pytest.mark.parametrize("width", ["characters", pytest.param("pieces", marks=pytest.mark.slow), "whole"])
@pytest.mark.parametrize("section", SECTIONS, ids=SECTIONS.values())
def test_calls(section: Section, width: str) -> None:
    make = message(tools=partial(CallParser, section, PARAMETERS))
    for head, unit in units(section):
        assert_linear(make, unit, SIZE, head=head, widths=[width])


@pytest.mark.parametrize("name", ["kimi_k2", "granite", "think", "mistral", "ernie45"])
def test_reasoning(name: str) -> None:
    format = REASONING_FORMATS[name]
    opening = format.opens[0]
    tools = partial(CallParser, TOOL_FORMATS["hermes"], PARAMETERS)
    for mark in format.markers():
        heads = [("", mark), (opening, mark), (opening, mark[:-1]), ("", " "), (opening, " ")]
        heads += [
            (tag, each) for tag, close in format.tags for each in (" ", close, close[:-1], f" {close} ")
        ]
        for head, unit in heads:
            assert_linear(
                message(partial(ReasoningParser, "", format), tools, format.tags), unit, SIZE, head=head
            )


MESSAGES = (
    "<|channel|>",
    "<|start|>",
    "<|chan",
    "<",
    " ",
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant",
    "<|channel|>commentary to=functions.write <|constrain|>json<|message|>{}<|call|>",
    "<|channel|>commentary to=functions.write",
    "<|message|>",
)


@pytest.mark.parametrize("unit", MESSAGES)
def test_harmony(unit: str) -> None:
    for head in ("", "<|channel|>analysis<|message|>", "<|channel|>commentary to=functions.write<|message|>"):
        assert_linear(message(partial(HarmonyParser, "")), unit, SIZE, head=head)


@pytest.mark.parametrize(
    "unit", ["[", '{"name": "write", "parameters": {"a": 1}},', '{"name"', '"', "\\", " ", "1,"]
)
def test_forced_calls(unit: str) -> None:
    for head in ("", '{"input": "', '{"input"', '{"other": ["', '[{"name": "write", "parameters": {"a": ['):
        assert_linear(message(tools=RequiredCallsParser), unit, SIZE, head=head)
        assert_linear(message(tools=partial(NamedCallParser, "write")), unit, SIZE, head=head)
