"""The formats of the model families: what their outputs say, however they are cut, and how they are found."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.options.models import ModelOptions
from penstock.generation.parsers.calls import CallParser
from penstock.generation.parsers.delta import CallDelta, Delta, OutputParser, TextDelta
from penstock.generation.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from penstock.generation.parsers.harmony import HarmonyParser
from penstock.generation.parsers.message import MessageFormat, MessageParser
from penstock.generation.parsers.reasoning import ReasoningParser
from penstock.generation.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, output_format
from penstock.generation.parsers.value_types import Parameters
from penstock.generation.request.schemas import Function, Tool
from penstock.generation.request.tool_choice import ToolChoice, message_format
from tests.generation.parsers.outputs import OUTPUTS, PARAMETERS, Output
from tests.generation.parsers.test_split import Message, pieces_of, whole

HARMONY = (
    "<|channel|>analysis<|message|>Let me < see.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "I will.<|end|><|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
    '{"path": "a"}<|call|>'
)
REASONED = {
    "qwen3": "<think>\nhm </th\n</think>\n\nYes.",
    "mistral": "[THINK]hm[/THINK]Yes.",
    "seed_oss": "<seed:think>hm</seed:think>Yes.",
    "granite": "Here is my thought process:\nhm\nHere is my response:\nYes.",
    "kimi_k2": "<think>hm<|tool_calls_section_begin|>",
    "apertus": "<|inner_prefix|>hm<|inner_suffix|>Yes.",
    "cohere_command4": "<|START_THINKING|>hm<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
    "ernie45": "<think>hm\n</think>\n\n<response>\nYes.\n</response>\n",
    "gemma4": "<|channel>thought\nhm<channel|>Yes.",
    "hunyuan_a13b": "<think>\nhm\n</think>\n<answer>\nYes.\n</answer>",
    "hy_v3": "<think:opensource>hm</think:opensource>Yes.",
    "kimi_k3": "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response"
    "<|sep|>",
    "minimax_m3": "<mm:think>hm</mm:think>Yes.",
    "plamo3": "<|plamo:begin_think:plamo|>hm<|plamo:end_think:plamo|>Yes.",
}
NAMES = [f"{number}-{output.format}" for number, output in enumerate(OUTPUTS)]


def maker(format: str) -> Callable[[], OutputParser]:
    return partial(CallParser, TOOL_FORMATS[format], PARAMETERS)


@pytest.mark.parametrize("output", OUTPUTS, ids=NAMES)
def test_what_an_output_says(output: Output) -> None:
    delta = whole(maker(output.format)(), [output.text])
    assert delta.content == output.content
    assert [(call.name, call.arguments) for call in delta.calls] == output.calls
    assert [call.index for call in delta.calls] == list(range(len(output.calls)))
    for call in delta.calls:
        json.loads(call.arguments)


@pytest.mark.parametrize("output", OUTPUTS, ids=NAMES)
def test_an_output_cut_anywhere(output: Output) -> None:
    """In two pieces, in letters, in random pieces; and ended anywhere, by the model or by max_tokens."""
    make, text = maker(output.format), output.text
    expected = whole(make(), [text])
    dice = random.Random(output.text)
    assert whole(make(), list(text)) == expected
    for place in range(len(text)):
        assert whole(make(), [text[:place], text[place:]]) == expected
        cuts = [dice.randrange(len(text)) for _ in range(4)]
        assert whole(make(), pieces_of(text, cuts)) == expected
        for cut in (False, True):
            head = whole(make(), [text[:place]], cut=cut)
            assert whole(make(), pieces_of(text[:place], cuts), cut=cut) == head
            if cut and TOOL_FORMATS[output.format].opens:  # a few characters of a marker are no marker
                assert expected.content.startswith(re.sub(r"\s*([<\[\]fA>]\S{0,3})?$", "", head.content))
            for call, full in zip(head.calls, expected.calls, strict=False):
                assert call.name == full.name
                raw = "many" in text or "012" in text  # a cut value is as the model wrote it, JSON or not
                arguments = re.sub(r"(\\n|\n)?[<\]]\S{0,4}$", "", call.arguments)
                assert full.arguments.startswith(arguments) or not cut or raw
            if not head.calls and not cut:
                plain = getattr(TOOL_FORMATS[output.format], "content", "") or "\n"
                section, given = TOOL_FORMATS[output.format], text[:place]
                around = given.removeprefix(section.around).replace(section.close, "", 1).lstrip()
                allowed = (given, given.removeprefix(plain).removeprefix("\n"))
                assert head.content in (*allowed, *([around] if section.around else []))


MARKS = {
    format: sorted(
        {piece for each in OUTPUTS if each.format == format for piece in re.split(r"(\W+)", each.text)}
    )
    for format in sorted({each.format for each in OUTPUTS})
}
"""Pieces of a format's outputs."""


@pytest.mark.parametrize("format", [*MARKS, "harmony"])
@settings(max_examples=40)
@given(data=st.data(), cuts=st.lists(st.integers(0, 1000), max_size=8), cut=st.booleans())
def test_whatever_a_model_writes(format: str, data: st.DataObject, cuts: list[int], *, cut: bool) -> None:
    if format == "harmony":
        make: Callable[[], OutputParser] = partial(HarmonyParser, "")
        source = [HARMONY]
    else:
        make, source = maker(format), [each.text for each in OUTPUTS if each.format == format]
    slices = st.tuples(st.sampled_from(source), st.integers(0, 300), st.integers(0, 120)).map(
        lambda each: each[0][each[1] % len(each[0]) :][: each[2]]
    )
    text = data.draw(
        st.lists(slices | st.sampled_from(MARKS.get(format, ["<|end|>"])), max_size=5).map("".join)
    )
    expected = whole(make(), [text], cut=cut)
    assert whole(make(), pieces_of(text, cuts), cut=cut) == expected == whole(make(), list(text), cut=cut)
    assert [call.index for call in expected.calls] == list(range(len(expected.calls)))
    assert all(call.name for call in expected.calls)
    marked = ("harmony", "functionary_v32", "llama4_json")  # their marks around text are no content
    if not expected.calls and not cut and format not in marked:
        assert expected.content == text
    parser, twin = make(), make()
    delta, same = parser.push(text), twin.push(text)
    if parser.open:
        plain = data.draw(st.text(alphabet="[(f]})= é", max_size=6))
        if not set(plain) & set(parser.guard) and plain == plain.rstrip():
            assert twin.push(plain) == Delta(content=plain)
            assert twin.open
            for each in (parser, twin):
                rest = each.push(source[0])
                rest.add(each.finish(cut=False))
                (delta if each is parser else same).add(rest)
            assert delta == same


def test_harmony() -> None:
    delta = whole(HarmonyParser(""), list(HARMONY))
    assert delta.pieces == [
        TextDelta("Let me < see.", reasoning=True),
        TextDelta("I will."),
        CallDelta(0, "write", '{"path": "a"}'),
    ]
    for place in range(len(HARMONY)):
        assert whole(HarmonyParser(""), [HARMONY[:place], HARMONY[place:]]) == delta
    final = "<|channel|>final<|message|>Yes.<|return|>"
    assert whole(HarmonyParser(""), [final]) == Delta(content="Yes.")
    assert whole(HarmonyParser("<|start|>assistant<|channel|>final<|message|>"), ["Yes."]) == Delta(
        content="Yes."
    )
    assert whole(HarmonyParser(""), ["Hello <b>"]) == Delta(content="Hello <b>")
    early = "<|start|>assistant to=functions.now<|channel|>commentary json<|message|><|call|>"
    assert whole(HarmonyParser(""), [early]) == Delta(calls=[CallDelta(0, "now", "{}")])
    assert whole(HarmonyParser("", None), [early]) == Delta()
    python = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert whole(HarmonyParser(""), [python]) == Delta(reasoning="print(1)")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (
            "<|channel|>analysis<|message|>use <|channel|> tag<|end|><|start|>assistant<|channel|>final"
            "<|message|>Use <|channel|>: it.<|return|>",
            "use <|channel|> tag",
            "Use <|channel|>: it.",
        ),
        ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>Yes.<|return|>", "hm", "Yes."),
        ("<|channel|>analysis<|message|>hm<|channel|> final<|message|>Yes.<|return|>", "hm", "Yes."),
    ],
)
def test_a_channel_of_harmony_has_a_known_name(text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert whole(HarmonyParser(""), pieces) == Delta(content=content, reasoning=reasoning)


@pytest.mark.parametrize("name", REASONED)
def test_reasoning(name: str) -> None:
    text = REASONED[name]
    format = REASONING_FORMATS[name]
    make = partial(Message, MessageFormat(partial(ReasoningParser, "", format), tags=format.tags))
    delta = whole(make(), [text])
    assert "hm" in delta.reasoning
    assert delta.content.strip() in ("Yes.", "<|tool_calls_section_begin|>")
    for place in range(len(text)):
        assert whole(make(), [text[:place], text[place:]]) == delta
        whole(make(), [text[:place]], cut=True)


def test_text_between_calls_keeps_its_place() -> None:
    text = '<tool_call>{"name": "now"}</tool_call> and <tool_call>{"name": "write"}</tool_call>.'
    delta = whole(maker("hermes")(), list(text))
    assert delta.pieces == [
        CallDelta(0, "now", "{}"),
        TextDelta(" and"),
        CallDelta(1, "write", "{}"),
        TextDelta("."),
    ]


def test_ids_of_the_model_are_kept() -> None:
    known = output_format("kimi_k2", "none", "")
    format = message_format(ToolChoice([Tool(function=Function(name="f"))], may_call=True), known, "")
    assert format is not None
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    assert MessageParser(format).push(text, last=True).calls == [CallDelta(0, "f", "{}", "functions.f:3")]


@pytest.mark.parametrize(
    ("id", "name"),
    [
        ("functions.get_time:0", "get_time"),
        ("functions.get_time:  12", "get_time"),
        ("get_time:3", "get_time"),
        ("get_time", "get_time"),
        ("functions_get_time_1", "get_time"),
        ("functionsget_time1", "get_time"),
        ("functions.get_time2:0", "get_time2"),  # the longest name
        ("functions.other-tool.x:0", "other-tool.x"),  # of no tool, but what the model wrote
        ("functions.invalid.0", None),
        ("functions other", None),
    ],
)
def test_an_id_calls_the_tool_it_names(id: str, name: str | None) -> None:
    output = (
        f"<|tool_calls_section_begin|><|tool_call_begin|>{id}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )
    parameters = Parameters({"get_time": None, "get_time2": None, "time": None})
    delta = whole(CallParser(TOOL_FORMATS["kimi_k2"], parameters), list(output))
    assert [call.name for call in delta.calls] == ([name] if name else [])
    assert delta.content == ("" if name else output)


@pytest.mark.parametrize(
    ("format", "output"),
    [
        ("hermes", '<tool_call>{"name": "functions.now", "arguments": {}}</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=functions.now>\n</function>\n</tool_call>"),
        ("mistral", "[TOOL_CALLS]functions.now[ARGS]{}"),
        ("pythonic", "[functions.now()]"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}</tool_call>'),  # a missing brace
        ("hermes", '<tool_call>{"name": "now", "arguments": " "}</tool_call>'),
    ],
)
def test_what_a_model_varies_is_understood(format: str, output: str) -> None:
    for pieces in ([output], list(output)):
        delta = whole(maker(format)(), pieces)
        assert [(call.name, call.arguments) for call in delta.calls] == [("now", "{}")]
        assert not delta.content


def test_a_missing_brace_takes_nothing_but_itself() -> None:
    broken = '{"path": "<|tool_call_end|>", "other": {}'
    text = (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>{broken}"
        "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )
    for place in range(len(text)):
        delta = whole(maker("kimi_k2")(), [text[:place], text[place:]])
        assert [(call.name, call.arguments) for call in delta.calls] == [("write", broken), ("now", "{}")]
        assert not delta.content


def test_strings_are_sent_as_they_come() -> None:
    parser = maker("qwen3_coder")()
    parser.push("<tool_call>\n<function=write>\n<parameter=path>\n")
    assert parser.push('a "b').calls == [CallDelta(0, None, 'a \\"b')]
    assert parser.push("\nc").calls == [CallDelta(0, None, "\\nc")]
    assert parser.push("\n</para").calls == []
    assert parser.push("meter>").calls == [CallDelta(0, None, '"')]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, "5", 5),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nu", "nu"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({"oneOf": [{"type": "string"}, {"enum": ["a"]}]}, "1", "1"),
        ({"$ref": "#/$defs/s"}, "1", "1"),
        ({"$ref": "#/$defs/loop"}, "1", 1),
        ({"type": "boolean"}, "True", True),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({}, "text", "text"),
        ({}, "{'a': [True, None, (1,)]}", {"a": [True, None, [1]]}),
        ({"type": "array"}, "['x', \"y's\"]", ["x", "y's"]),
        ({"type": "array"}, "{'x'}", ["x"]),
        ({"type": "array"}, "[__import__('os')]", "[__import__('os')]"),
        ({"type": "array"}, "[1e999, 'a']", "[1e999, 'a']"),
        ({"type": "string"}, "['x']", "['x']"),
        ({"type": "integer"}, "007", 7),
        ({"type": "integer"}, "-0.5", -0.5),
        (True, "5", 5),
    ],
)
def test_the_schema_says_what_is_a_string(schema: object, text: str, value: object) -> None:
    parameters = Parameters(
        {
            "f": {
                "properties": {"x": schema},
                "$defs": {"s": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}},
            }
        }
    )
    output = f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>"
    pieces = list(output) if len(output) < 200 else [output]
    [call] = whole(CallParser(TOOL_FORMATS["glm45"], parameters), pieces).calls
    assert json.loads(call.arguments) == {"x": value}


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ('<tool_call>\n{"name": <function-name>', "hermes", None),
        ("<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder", None),
        ("<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key>{{ '</think>' }}", "glm45", "think"),
        ("{{ '<|python_tag|>' }}", "llama3_json", None),
        ("{% if '</think>' in content %}<tool_call>", "hermes", "think"),
        ("<|tool_calls_section_begin|></think>", "kimi_k2", "kimi_k2"),
        ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>\n```json</think>", "deepseek_v3", "think"),
        ("<｜tool▁calls▁begin｜>{{ name }}<｜tool▁sep｜></think>", "deepseek_v31", "think"),
        ("<minimax:tool_call>\n<invoke name=</think>", "minimax_m2", "think"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS][THINK][/THINK]", "mistral", "mistral"),
        ("<seed:tool_call><function=x></seed:think>", "seed_oss", "seed_oss"),
        ("functools[{{ name }}", "phi4_mini_json", None),
        ("Use [func_name1(a=1)]", "llama4_pythonic", None),
        ("<function_calls>", "olmo3", None),
        ("<tool_calls>[]</tool_calls></think>", "hunyuan_a13b", "think"),
        ("<|function_call_library|>", "granite-20b-fc", None),
        (
            "{%- set dsml_token = '｜DSML｜' -%}<' + dsml_token + 'function_calls></think>",
            "deepseek_v32",
            "think",
        ),
        ("{%- set dsml_token = '｜DSML｜' -%}<' + dsml_token + 'tool_calls></think>", "deepseek_v4", "think"),
        ("<｜DSML｜ calls></think>", "deepseek_v41", "think"),
        (
            "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=<mm:think></mm:think>",
            "minimax_m3",
            "minimax_m3",
        ),
        ("<|open|>tools<|sep|><|open|>think<|sep|>", "kimi_k3", "kimi_k3"),
        ("<|tool_call>call:<tool_call|><|channel>thought<channel|>", "gemma4", "gemma4"),
        ("<|START_THINKING|><|START_ACTION|><|START_RESPONSE|>", "cohere_command3", "cohere_command3"),
        ("<|START_THINKING|><|START_ACTION|><|START_TEXT|>", "cohere_command4", "cohere_command4"),
        ("Write 'Action:' and use the `directly-answer` tool", "command_r", None),
        ("<{start_tag}={function_name}>{parameters}{end_tag}<|python_tag|>", "functionary_v31", None),
        (">>>${recipient}", "functionary_v32", None),
        ("# 可用工具<|observation|>", "glm4", None),
        ("<tool_calls>[]</tool_calls><|extra_0|><think></think>", "hunyuan_a13b", "hunyuan_a13b"),
        ("set HYTK = ':opensource'<tool_calls{}></think{}>", "hy_v3_opensource", "hy_v3"),
        ("{{ messages }}", None, None),
    ],
)
def test_the_template_decides(template: str, tools: str | None, reasoning: str | None) -> None:
    found = output_format("auto", "auto", template)
    assert found.tools == (TOOL_FORMATS[tools] if tools else None)
    assert found.reasoning == (REASONING_FORMATS[reasoning] if reasoning else None)
    none = output_format("none", "none", template)
    assert (none.tools, none.reasoning, none.markers, none.guard) == (None, None, (), "")
    named = output_format("llama3_json", "qwen3", template)
    assert (named.tools, named.reasoning) == (TOOL_FORMATS["llama3_json"], REASONING_FORMATS["think"])


def test_harmony_is_one_format() -> None:
    found = output_format("auto", "auto", "<|start|>assistant<|channel|>final<|message|>")
    assert found.harmony
    assert "<|call|>" in found.markers
    assert output_format("openai", "none", "").harmony
    assert output_format("auto", "auto", "", "gpt_oss").harmony
    assert output_format("auto", "auto", "", "kimi_k2").reasoning == REASONING_FORMATS["kimi_k2"]
    assert output_format("auto", "auto", "", "mistral").tools == TOOL_FORMATS["mistral"]
    assert not output_format("none", "none", "", "gpt_oss").harmony


def test_markers_that_may_be_special_tokens() -> None:
    assert {"<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>"} <= set(
        output_format("deepseek_v3", "none", "").markers
    )
    assert {"[TOOL_CALLS]", "[ARGS]", "[THINK]"} <= set(output_format("mistral", "mistral", "").markers)
    assert {"<tool_call>", "</tool_call>"} <= set(output_format("qwen3_coder", "none", "").markers)


def test_the_options_have_all_formats() -> None:
    hints = get_type_hints(ModelOptions)
    for field, names in (("tool_call_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        assert sorted(get_args(hints[field])) == sorted([*names, "auto", "none"])


def test_nested_literals_are_bounded() -> None:
    text = f"[now(x={'[' * 10_000})]"
    for pieces in ([text], list(text)):
        delta = whole(maker("pythonic")(), pieces)
        assert delta.calls[0].arguments.count("[") == 64
