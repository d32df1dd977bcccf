"""Grammars of outputs with tool calls in a model's own format, for llguidance.

The text before a call is free. From a call's opening on it follows the tools: arguments match the schemas,
the input of custom tools matches their grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.generation.grammars.lark_in_json import (
    NotEmbeddable,
    in_json_string,
    regex_in_json_string,
    slashed,
)
from penstock.generation.parsers import harmony
from penstock.generation.parsers.call_syntax import JsonCalls, Section, TaggedCalls, XmlCalls
from penstock.generation.parsers.custom_input import CUSTOM_INPUT
from penstock.generation.parsers.reasoning import Reasoning
from penstock.generation.parsers.value_types import Parameters, ValueType

_INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
_FORCED = JsonCalls(key="parameters")
MAX_MARKER = 64
"""Characters at a prompt's end that may be a marker of reasoning and white space."""
_RULES = r"""
SPACE: /[ \n]{0,2}/
TEXT: /(.|\n)*/
KEY: /[^<>"\n]{1,128}/
"""


class InputGrammar(NamedTuple):
    """What the input of a custom tool must match."""

    syntax: str
    """lark, regex, or text: anything."""
    definition: str = ""


class CalledTool(NamedTuple):
    """A tool that the output may call."""

    name: str
    schema: dict[str, Any] | None
    """JSON schema of the arguments, with llguidance's options; None: any object."""
    input: InputGrammar | None = None
    """Grammar of a custom tool's input."""


class TokenIds(NamedTuple):
    """The tokens that grammars name by id: llguidance does not take their text for that of other tokens."""

    markers: Mapping[str, int]
    """Texts of a format that are one token."""
    special: tuple[int, ...]
    """All added tokens that do not end an output."""
    end: tuple[int, ...]
    """Tokens that end an output."""


def call_grammar(
    section: Section, tools: Sequence[CalledTool], ids: TokenIds, *, one_call: bool = False
) -> str | None:
    """The grammar of outputs that may call ``tools``; None if the format of calls has none. Raises
    NotEmbeddable for a grammar of an input that the format cannot have."""
    if not section.opens or section.begun or not isinstance(section, JsonCalls | TaggedCalls | XmlCalls):
        return None
    if isinstance(section, XmlCalls) and section.string and not section.other:  # its types have names
        return None
    opening = section.opens[0]
    if opening not in ids.markers and any(marker in opening for marker in ids.markers):
        return None
    if section.call == opening:  # each call opens a section of its own
        section = msgspec.structs.replace(section, call="", close="")
    builder = _Builder(ids)
    count = "?" if one_call else "*"
    rules = (
        f"start: (opened calls){count} {builder.free(opening)}",
        f"opened: {builder.up_to(opening)}",
        f"calls: {_body(section, tools, builder)}",
    )
    return builder.whole("\n".join(rules))


def forced_grammar(tools: Sequence[CalledTool], *, named: bool, one_call: bool) -> str:
    """The grammar of outputs that are calls, independent of the model: the arguments of the only tool if it
    is ``named``, otherwise a list of calls. Raises NotEmbeddable."""
    builder = _Builder(TokenIds({}, (), ()))
    if named:
        return builder.whole(f"start: {_arguments(tools[0], builder)}")
    calls = _one_of([_json_call(_FORCED, tool, builder) for tool in tools])
    more = "" if one_call else ' ("," " "? call)*'
    return builder.whole(f'start: "[" call{more} "]"\ncall: {calls}')


def reasoning_grammar(reasoning: Reasoning, prompt: str, ids: TokenIds) -> str:
    """The grammar of the reasoning that may precede an output under a constraint; empty if ``prompt``, the
    text before the output, has ended it already."""
    end = prompt[-MAX_MARKER:].rstrip()
    if end.endswith(reasoning.closes):
        return ""
    builder = _Builder(ids)
    thought = f"{builder.up_to(reasoning.closes[0])} SPACE"
    if not end.endswith(reasoning.opens):
        thought = f"(SPACE {builder.text(reasoning.opens[0])} {thought})?"
    return builder.whole(f"start: {thought}")


def channel_grammar(prompt: str, ids: TokenIds, *, calls: bool) -> str:
    """Grammar of a harmony output: reasoning on its channel, if any, and the header of the text that the
    constraint holds for. ``calls``: that is calls, otherwise it is the answer."""
    if prompt.endswith(harmony.MESSAGE):
        return ""
    builder = _Builder(ids)
    analysis = builder.text(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}")
    thought = f"{analysis} {builder.up_to(harmony.END)} {builder.text(f'{harmony.START}assistant')}"
    channel = builder.text(harmony.CHANNEL + (harmony.COMMENTARY if calls else harmony.FINAL))
    json = f'(SPACE {builder.text(harmony.CONSTRAIN)} "json")?'
    return builder.whole(f"start: ({thought})? {channel} {json} {builder.text(harmony.MESSAGE)}")


def preceded(grammar: str, first: str) -> str:
    """The texts of ``first`` followed by those of ``grammar``; both are llguidance's."""
    parts = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    name = parts[0].setdefault("name", "constrained")
    start = {"name": "reasoned", "lark_grammar": f"start: @reasoning @{name}"}
    return json.dumps({"grammars": [start, {"name": "reasoning", "lark_grammar": first}, *parts]})


class _Builder:
    """Writes the parts of one grammar."""

    def __init__(self, ids: TokenIds) -> None:
        self._ids = ids
        marks = sorted(ids.markers, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None
        self._rules: list[str] = []
        self._side: list[dict[str, str]] = []
        self._ends: dict[str, str] = {}

    def whole(self, lark: str) -> str:
        """The grammar whose first rules are ``lark``."""
        lark = "\n".join([lark, *self._rules]) + _RULES
        if not self._side:
            return lark
        return json.dumps({"grammars": [{"name": "output", "lark_grammar": lark}, *self._side]})

    def text(self, text: str) -> str:
        """A text, some parts of which may be tokens of their own."""
        markers = self._ids.markers
        parts = self._split.split(text) if self._split else [text]
        return " ".join(
            [f"<[{markers[part]}]>" if part in markers else _quoted(part) for part in parts if part]
        )

    def up_to(self, end: str) -> str:
        """Any text, and ``end``."""
        marker = self._ids.markers.get(end)
        if marker is not None:
            return f"{self.free(end)} <[{marker}]>"
        if end not in self._ends:
            self._ends[end] = f"end_{len(self._ends)}"
            self._rules.append(f"{self._ends[end]}[lazy]: TEXT {_quoted(end)}")
        return f"{self._tokens()}{self._ends[end]}"

    def free(self, end: str) -> str:
        """Any text; without ``end`` if that is a token."""
        marker = self._ids.markers.get(end)
        if marker is not None:
            return f"<[^{','.join(map(str, (marker, *self._ids.end)))}]>*"
        return f"{self._tokens()}TEXT"

    def _tokens(self) -> str:
        """Text with added tokens, of which TEXT matches none."""
        return f"(TEXT <[{','.join(map(str, self._ids.special))}]>)* " if self._ids.special else ""

    def input(self, tool: CalledTool, *, escaped: bool) -> str:
        """The input of a custom tool. ``escaped``: within a JSON string."""
        grammar = tool.input
        assert grammar is not None
        try:
            lark = self._input(grammar, escaped=escaped)
        except NotEmbeddable as error:
            raise NotEmbeddable(f"the grammar of {tool.name!r}: {error}") from None
        name = f"input_{len(self._side)}"
        self._side.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    @staticmethod
    def _input(grammar: InputGrammar, *, escaped: bool) -> str:
        if grammar.syntax == "lark":
            return in_json_string(grammar.definition) if escaped else grammar.definition
        return (
            regex_in_json_string(grammar.definition) if escaped else f"start: {slashed(grammar.definition)}"
        )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _one_of(options: Sequence[str]) -> str:
    return "(" + " | ".join(options) + ")"


def _body(section: Section, tools: Sequence[CalledTool], builder: _Builder) -> str:
    """What follows the opening of a section, to its end."""
    if isinstance(section, JsonCalls):
        calls = _one_of([_json_call(section, tool, builder) for tool in tools])
        if section.listed:
            builder._rules.append(f"call: {calls}")
            calls = '"[" call ("," " "? call)* "]"'
        return f"SPACE {calls}" + (f" SPACE {builder.text(section.close)}" if section.close else "")
    if isinstance(section, TaggedCalls):
        calls = _one_of([_tagged_call(section, tool, builder) for tool in tools])
    else:
        assert isinstance(section, XmlCalls)
        calls = _one_of([_xml_call(section, tool, builder) for tool in tools])
    if not section.call:
        return calls
    builder._rules.append(f"call: SPACE {calls}")
    separator = (
        f"{_quoted(section.separator)} " if isinstance(section, TaggedCalls) and section.separator else ""
    )
    return f"call ({separator}call)*" + (f" SPACE {builder.text(section.close)}" if section.close else "")


def _arguments(tool: CalledTool, builder: _Builder) -> str:
    """The arguments as JSON."""
    if tool.input is not None and tool.input.syntax != "text":
        start = _quoted(f'{{"{CUSTOM_INPUT}":')
        return f'{start} " "? "\\"" {builder.input(tool, escaped=True)} "\\"}}"'
    schema = _INPUT_SCHEMA if tool.input is not None else tool.schema or {"type": "object"}
    return f"%json {json.dumps(schema)}"


def _json_call(section: JsonCalls, tool: CalledTool, builder: _Builder) -> str:
    def key(text: str) -> str:
        return f'{_quoted(json.dumps(text) + ":")} " "?'

    id = f'({key(section.id)} "\\"" /[0-9]{{1,6}}/ "\\"," " "?)? ' if section.id else ""
    name = _quoted(json.dumps(tool.name, ensure_ascii=False) + ",")
    start = f'"{{" {id}{key(section.name)} {name} " "? {key(section.key)}'
    return f'{start} {_arguments(tool, builder)} "}}"'


def _tagged_call(section: TaggedCalls, tool: CalledTool, builder: _Builder) -> str:
    opening, closing = section.fence
    parts = [builder.text(section.call), _quoted(f"{section.prefix}." * bool(section.prefix) + tool.name)]
    if section.prefix:
        parts.append('":" /[0-9]{1,6}/')
    parts.append(builder.text(section.before) + ' " "?' * section.before.endswith(":"))
    parts.append(f'"\\n" {_quoted(opening)} "\\n"' if opening else "")
    parts.append(_arguments(tool, builder))
    parts.append(f'"\\n" {_quoted(closing)}' if closing else "")
    parts.append(builder.text(section.end))
    return " ".join(part for part in parts if part)


def _xml_call(section: XmlCalls, tool: CalledTool, builder: _Builder) -> str:
    quote = section.quote
    parts = [builder.text(section.call + quote + tool.name + quote + section.call_end), "SPACE"]
    if tool.input is None and tool.schema is None:
        any_parameter = [builder.text(section.parameter + quote), "KEY"]
        said = [
            builder.text(f"{quote}{each}{section.parameter_end}") for each in (section.string, section.other)
        ]
        any_parameter.append(_one_of(said) if section.string else said[0])
        parts.append(f"({' '.join(any_parameter)} {builder.up_to(section.value_end)} SPACE)*")
    else:
        schema = tool.schema if tool.input is None else _INPUT_SCHEMA
        assert schema is not None
        listed, properties = schema.get("required"), schema.get("properties")
        required = listed if isinstance(listed, list) else []
        for key, value in properties.items() if isinstance(properties, dict) else ():
            parameter = _xml_parameter(section, tool, schema, key, value, builder)
            parts.append(f"({parameter} SPACE){'' if key in required else '?'}")
    parts += [builder.text(section.end), builder.text(section.after)]
    return " ".join(part for part in parts if part)


def _xml_parameter(
    section: XmlCalls, tool: CalledTool, schema: dict[str, Any], key: str, value: Any, builder: _Builder
) -> str:
    type = Parameters({"": schema}).type_of("", key)
    said = section.string if type.is_text else section.other
    name = f"{section.quote}{key}{section.quote}{said}"
    start = builder.text(section.parameter + name + section.parameter_end)
    if section.value:
        start += f" SPACE {builder.text(section.value)}"
    line = ' "\\n" ' if section.lines else " "
    end = builder.text(section.value_end)
    if tool.input is not None and tool.input.syntax != "text":
        return f"{start}{line}{builder.input(tool, escaped=False)}{line}{end}"
    if not type.is_text and isinstance(value, dict) and value:
        options = {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}
        return f"{start}{line}%json {json.dumps({**value, **options})}{line}{end}"
    texts = value.get("enum") if isinstance(value, dict) else None
    if type is ValueType.STRING and texts and all(isinstance(each, str) for each in texts):
        return f"{start}{line}{_one_of([_quoted(each) for each in texts])}{line}{end}"
    return f"{start}{line}{builder.up_to(section.value_end)}"
