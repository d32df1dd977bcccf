"""Calls that the templates of real models spell are read back as they are, in the format that is detected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.templates.archives import PACKAGES, real_templates

if not PACKAGES.exists():
    pytest.skip('the packages are missing: run "make test-templates"', allow_module_level=True)

from penstock.generation.parsers.message import MessageFormat, MessageParser
from penstock.generation.parsers.registry import OutputFormat, output_format
from penstock.generation.parsers.value_types import Parameters
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.rendered_reply import CannotRender, ReplyRenderer
from tests.templates.known import SKIPPED, SPELLED_OTHERWISE, TAKES_ONE_CALL
from tests.templates.reference import TOKENS

FORMATS = {name: output_format("auto", "auto", text) for name, text in real_templates().items()}
TEMPLATES = {
    name: text for name, text in real_templates().items() if FORMATS[name].calls_tools and name not in SKIPPED
}
SCHEMAS: dict[str, Any] = {
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "line": {"type": "integer"},
            "tags": {"type": "array"},
            "deep": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
WRITE = {"path": 'a "quoted" ü.py', "line": 12, "tags": ["x", "}", {"n": None}]}
Calls = list[tuple[str, dict[str, Any]]]
CALLS: tuple[Calls, ...] = (
    [("write", WRITE)],
    [("write", WRITE), ("now", {})],
    [("write", {"path": "two\nlines \\ of 😀 <b>&</b> it's", "deep": {"k": [True, {"n": 1.5}], "l": {}}})],
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_renders_is_read(name: str) -> None:
    format = FORMATS[name]
    renderer = ReplyRenderer(ChatTemplate({"default": TEMPLATES[name]}, TOKENS), format)
    thought = "hm" if format.reasoning or format.harmony else ""
    differs = False
    for calls in CALLS:
        if name in TAKES_ONE_CALL and len(calls) > 1:
            with pytest.raises(CannotRender):
                renderer.outputs("", thought, calls)
            continue
        for output in renderer.outputs("", "", calls):
            found = _read(format, output)
            assert [each for each, _ in found] == [each for each, _ in calls], output
            differs = differs or found != calls
        assert renderer.outputs("", thought, calls)
    assert differs == (name in SPELLED_OTHERWISE), name


def _read(format: OutputFormat, output: str) -> Calls:
    parameters = Parameters(SCHEMAS)
    reasoning = format.reasoning_parser("", calls=True, parameters=parameters)
    parser = MessageParser(MessageFormat(reasoning, format.call_parser(parameters)))
    delta = parser.push(output, last=True)
    return [(call.name or "", json.loads(call.arguments)) for call in delta.calls]
