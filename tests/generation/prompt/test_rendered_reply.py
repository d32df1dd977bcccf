"""Replies as models write them, found by their chat templates."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.generation.parsers.registry import output_format
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.rendered_reply import CannotRender, ReplyRenderer
from penstock.supervisor.startup.model_resolution import DEMO_DIR

HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{PROMPT}{% endif %}"
CALLS = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)


def renderer(body: str, prompt: str = "", tools: str = "auto", reasoning: str = "auto") -> ReplyRenderer:
    source = HEAD + body + TAIL.replace("{PROMPT}", prompt)
    return ReplyRenderer(ChatTemplate({"default": source}, {}), output_format(tools, reasoning, source))


def test_the_demo_model() -> None:
    template = ChatTemplate.load(DEMO_DIR)
    assert template is not None
    demo = ReplyRenderer(template, output_format("auto", "auto", template.source))
    assert demo.outputs("Hello", "", []) == ["Hello"]
    calls: list[tuple[str, dict[str, Any] | str]] = [("f", {"a": 1}), ("g", '{"b":2}')]
    assert demo.outputs("", "", calls) == [
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"b":2}}</tool_call>',
    ]
    assert demo.forced_outputs("", "", calls) == [
        '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": 2}}]',
        '{"a": 1}',
    ]
    with pytest.raises(CannotRender, match="--reasoning-parser"):
        demo.outputs("Hello", "hm", [])


def test_reasoning_before_calls() -> None:
    call: list[tuple[str, Any]] = [("f", {})]
    written = '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    first = renderer(CALLS + "{# </think> #}").outputs("Hi", "hm", call)
    assert first[:3] == [f"<think>hm</think>Hi{written}", f"Hi{written}", written]
    # a template that opens the reasoning in the prompt, and leaves it out of earlier replies
    opened = renderer(CALLS + "{# </think> #}", prompt="<think>\n")
    assert opened.outputs("Hi", "hm", call)[0] == f"hm</think>Hi{written}"
    assert opened.outputs("Hi", "", [])[0] == "</think>Hi"


def test_what_cannot_be_rendered() -> None:
    with pytest.raises(CannotRender, match="no chat template"):
        ReplyRenderer(None, output_format("auto", "auto", "")).outputs("", "", [("f", {})])
    with pytest.raises(CannotRender, match="--tool-call-parser"):
        renderer("{{ m.content }}").outputs("", "", [("f", {})])
    with pytest.raises(CannotRender, match="the chat template refuses it: only one"):
        renderer("{{ raise_exception('only one') if m.tool_calls }}", tools="hermes").outputs(
            "", "", [("f", {})]
        )
    with pytest.raises(CannotRender, match="which has the calls"):
        renderer("{{ m.content }}", tools="minimax_m3").outputs("", "", [("f", {})])


def test_an_opening_that_begins_as_the_prompt_ends() -> None:
    body = (
        "{% if m.tool_calls %}<TOOLCALL>[{% for c in m.tool_calls %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}]'
        "</TOOLCALL>{% else %}{{ m.content }}<end_of_text>{% endif %}"
    )
    made = renderer(body, prompt="<TOOLBOX>", tools="nemotron_json")
    assert made.outputs("", "", [("f", {})]) == [
        '<TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>',
    ]


def test_calls_that_the_template_does_not_show() -> None:
    assert renderer("{{ m.content }}", tools="hermes").outputs("Hi", "", [("f", {}), ("g", '{"a":1}')])[
        0
    ] == (
        'Hi\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"a":1}}</tool_call>'
    )
