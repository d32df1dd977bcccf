"""What a model writes as escapes in a call can be encoded, and is the same however it is cut."""

from __future__ import annotations

import itertools
import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.generation.parsers.calls import CallParser
from penstock.generation.parsers.delta import CallDelta, Delta, OutputParser
from penstock.generation.parsers.formats import TOOL_FORMATS
from penstock.generation.parsers.message import MessageFormat, MessageParser
from penstock.generation.parsers.named_call import NamedCallParser
from tests.generation.parsers.outputs import PARAMETERS

ESCAPES = (
    "\\ud83d",
    "\\ude00",
    "\\udC00",
    "\\\\",
    "\\u00e9",
    "\\n",
    '\\"',
    "\\u",
    "\\uD8",
    "\\",
    "a",
    "😀",
    "d83d",
)
bodies = st.lists(st.sampled_from(ESCAPES), max_size=7).map("".join)


def calls_of(format: MessageFormat, pieces: list[str]) -> list[CallDelta]:
    parser = MessageParser(format, new_id=lambda: "id")
    delta = Delta()
    for piece in pieces:
        delta.add(parser.push(piece, last=False))
    delta.add(parser.push("", last=True))
    for each in delta.pieces:
        (each.arguments + str(each.name) if isinstance(each, CallDelta) else each.text).encode()
    return delta.calls


def in_format(name: str, custom: frozenset[str] = frozenset()) -> MessageFormat:
    return MessageFormat(tools=partial(CallParser, TOOL_FORMATS[name], PARAMETERS), custom=custom)


NAMED: partial[OutputParser] = partial(NamedCallParser, "write")
FORMS: dict[str, tuple[MessageFormat, str]] = {
    "raw arguments": (
        in_format("hermes"),
        '<tool_call>{"name": "write", "arguments": {"path": "%s"}}</tool_call>',
    ),
    "as text": (in_format("hermes"), '<tool_call>{"name": "write", "arguments": "%s"}</tool_call>'),
    "name": (in_format("hermes"), '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'),
    "python": (in_format("pythonic"), '[write(path="%s")]'),
    "value": (
        in_format("qwen3_coder"),
        '<tool_call><function=write><parameter=tags>["%s"]</parameter></function>',
    ),
    "named": (MessageFormat(tools=NAMED), '{"path": "%s"}'),
    "custom": (MessageFormat(tools=NAMED, custom=frozenset({"write"})), '{"input": "%s"}'),
    "custom, in a format": (
        in_format("hermes", frozenset({"write"})),
        '<tool_call>{"name": "write", "arguments": {"input": "%s"}}</tool_call>',
    ),
    "custom, as it is": (MessageFormat(tools=NAMED, custom=frozenset({"write"})), '{"patch": "%s"}'),
}


@pytest.mark.parametrize("form", FORMS)
@given(body=bodies, cuts=st.lists(st.integers(0, 80), max_size=6))
def test_any_escapes_can_be_sent_and_cut(form: str, body: str, cuts: list[int]) -> None:
    format, frame = FORMS[form]
    text = frame % body
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    whole = calls_of(format, [text])
    assert calls_of(format, [text[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert calls_of(format, list(text)) == whole


@pytest.mark.parametrize(
    ("written", "passed"),
    [
        (r'{"path": "\ud83d\ude00 \u00e9 \n"}', r'{"path": "\ud83d\ude00 \u00e9 \n"}'),
        (r'{"path": "\ud83d"}', r'{"path": "\ufffd"}'),
        (r'{"path": "\ude00\ud83d"}', r'{"path": "\ufffd\ufffd"}'),
        (r'{"path": "\ud83d\ud83d\ude00"}', r'{"path": "\ufffd\ud83d\ude00"}'),
        (r'{"path": "\\ud83d"}', r'{"path": "\\ud83d"}'),
        (r'{"path": "\ud83d\n\u0041"}', r'{"path": "\ufffd\n\u0041"}'),
        (r'{"path": "\ud83d\u', r'{"path": "\ufffd\u'),
    ],
)
def test_arguments_keep_their_escapes_but_for_half_pairs(written: str, passed: str) -> None:
    [call] = calls_of(MessageFormat(tools=NAMED), list(written))
    assert call.arguments == passed


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        (r"\ud83d\ude00", "😀"),
        (r"\ud83d", "\ufffd"),
        (r"\ude00x", "\ufffdx"),
        (r"\U0000d83d\x41", "\ufffdA"),
        (r"\ud83d\u0041", "\ufffdA"),
    ],
)
def test_python_s_escapes(literal: str, value: str) -> None:
    [call] = calls_of(in_format("pythonic"), [f'[write(path="{literal}")]'])
    assert json.loads(call.arguments) == {"path": value}


@pytest.mark.parametrize("width", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("arguments", "input"),
    [
        ('{"input": "a\\n\\"b\\" \\ud83d\\ude00 \\u00e9 é"}', 'a\n"b" 😀 é é'),
        ('{ "input" : ""}', ""),
        ('{"input": "cut \\', "cut "),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ("plain", "plain"),
        ('{"input": "line\nbreak \\d"}', "line\nbreak \\d"),
        ('{"input": "a\\udc00b\\ud83d\\u0041b\\u12zz"}', "a\ufffdb\ufffdAb\\u12zz"),
    ],
)
def test_the_input_of_a_custom_tool(arguments: str, input: str, width: int) -> None:
    format = MessageFormat(tools=NAMED, custom=frozenset({"write"}))
    [call] = calls_of(format, [arguments[at : at + width] for at in range(0, len(arguments), width)])
    assert (call.arguments, call.custom) == (input, True)
