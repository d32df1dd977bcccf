"""What is found of templates of several kinds."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.renderer import ConversationRenderer
from penstock.generation.prompt.template_rules import (
    CALLS,
    EMPTY_SCHEMA,
    PARAMETER_DESCRIPTIONS,
    PROPERTIES,
    THINKING_PART,
    BeforeCalls,
    CallIds,
    TemplateRules,
)
from penstock.generation.request.schemas import Function, FunctionCall, Message, Tool, ToolCall

LOOP = "{% for m in messages %}<{{ m.role }}>BODY{% endfor %}"
CALL = (
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
)
TEXT = "{{ m.content or '' }}"


def renderer(source: str) -> ConversationRenderer:
    return ConversationRenderer(ChatTemplate({"default": source}, {}))


def rules(body: str, *, tools: bool = False) -> TemplateRules:
    return renderer(LOOP.replace("BODY", body)).rules(tools=tools)


def test_a_template_that_takes_everything() -> None:
    found = rules(TEXT + CALL)
    assert found.as_text >= {"system", "developer", "user", "assistant", CALLS, "tool"}
    assert found.as_parts == set()
    assert (found.calls, found.results, found.parallel, found.beside) == (True,) * 4
    assert found.ids is CallIds.ANY
    assert found.object_arguments
    assert found.may_follow("system", "tool")


def test_a_template_that_shows_nothing_has_the_usual_rules() -> None:
    assert rules("") == TemplateRules()


@pytest.mark.parametrize(
    ("content", "text", "parts", "part"),
    [
        ("{{ m.content }}", True, False, False),
        ("{% for p in m.content %}{{ p.text }}{% endfor %}", False, True, False),
        ("{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
         "{% endfor %}{% endif %}", True, True, False),
        ("{{ m.content[0].text }}", False, False, True),
        ("{{ m.content | tojson }}", True, False, False),
    ],
)  # fmt: skip
def test_content_is_found_by_role(content: str, text: bool, parts: bool, part: bool) -> None:
    body = "{% if m.role == 'ROLE' %}" + content + "{% else %}{{ m.content or '' }}" + CALL + "{% endif %}"
    for role in ("system", "user", "tool"):
        found = rules(body.replace("ROLE", role))
        assert (role in found.as_text, role in found.as_parts, role in found.as_part) == (text, parts, part)
        assert "assistant" in found.as_text
        assert "assistant" not in found.as_parts


@pytest.mark.parametrize(
    ("condition", "absent"),
    [
        ("m.content is none", (None,)),
        ("m.content is not defined", (UNSET,)),
        ("m.content == ''", ("",)),
        ("not m.content", (None, UNSET, "", [])),
    ],
)
def test_what_stands_for_no_content_beside_calls(condition: str, absent: tuple[Any, ...]) -> None:
    refuse = "{% if m.tool_calls and not (" + condition + ") %}{{ raise_exception('no') }}{% endif %}"
    assert rules(refuse + TEXT + CALL).absent == absent


def test_none_that_would_be_printed_is_not_absent() -> None:
    assert None not in rules("{{ m.content }}" + CALL).absent
    assert None in rules(TEXT + CALL).absent


@pytest.mark.parametrize(
    ("shown", "as_object", "as_text"),
    [
        ("{{ a | tojson }}", True, True),
        ("{{ '(' + a + ')' }}", False, True),
        ("{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}", True, False),
        ("{{ a }}", False, True),  # Python's spelling of an object is no JSON
    ],
)
def test_arguments(shown: str, as_object: bool, as_text: bool) -> None:
    call = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% set a = c.function.arguments %}" + shown
    found = rules(TEXT + call + "{% endfor %}")
    assert (found.object_arguments, found.text_arguments) == (as_object, as_text)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_the_name_of_reasoning(name: str) -> None:
    assert rules("{{ m.NAME or '' }}".replace("NAME", name) + TEXT + CALL).reasoning == (name,)


def test_reasoning_in_parts() -> None:
    parts = "{% for p in m.content if m.content is not string %}{{ p.thinking }}{{ p.text }}{% endfor %}"
    found = rules(parts + "{% if m.content is string %}{{ m.content }}{% endif %}" + CALL)
    assert found.reasoning == (THINKING_PART,)


def test_a_template_that_knows_no_calls_or_results() -> None:
    refuse = "{% if m.role in ['system', 'developer', 'tool'] %}{{ raise_exception('no') }}{% endif %}"
    found = rules(refuse + TEXT)
    assert (found.calls, found.results) == (False, False)
    assert not found.may_follow("system", "start")


def test_calls_one_by_one() -> None:
    one = "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    assert not rules(one + TEXT + CALL).parallel
    first = "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}"
    assert not rules(TEXT + first).parallel


def test_text_beside_calls_that_is_dropped() -> None:
    found = rules("{% if m.tool_calls %}CALLS:" + CALL + "{% else %} {{ m.content }}{% endif %}")
    assert not found.beside
    assert found.before_calls == BeforeCalls(" ", "CALLS:[")


def test_ids() -> None:
    nine = "{% for c in m.tool_calls or [] if c.id | length != 9 %}{{ raise_exception('nine') }}{% endfor %}"
    assert rules(nine + TEXT + CALL).ids is CallIds.SHORT


def test_a_call_whose_id_alone_has_the_name() -> None:
    id = "{% for c in m.tool_calls or [] %}<{{ c.id }}>{{ c.function.arguments | tojson }}{% endfor %}"
    result = "{% if m.role == 'tool' %}Return of {{ m.tool_call_id }} {{ m.name }} {% endif %}"
    for tools in (False, True):
        found = rules(result + TEXT + id, tools=tools)
        assert found.ids is CallIds.NAMED
        assert (found.calls, found.results, found.parallel, found.beside) == (True,) * 4


def test_a_template_may_queue_ids() -> None:
    queue = "{% set q = namespace(ids=[]) %}"
    call = "{% for c in m.tool_calls or [] %}{% set _ = q.ids.append(c.id) %}{{ c.function }}{% endfor %}"
    source = queue + LOOP.replace("BODY", TEXT + call + "{{ q.ids.pop(0) if m.role == 'tool' }}")
    found = renderer(source).rules(tools=False)
    assert (found.calls, found.results, found.parallel) == (True,) * 3


def test_parameters_get_the_description_that_the_template_needs() -> None:
    tool = "{% for p in t.function.parameters.properties.values() %}{{ '#' + p.description }}{% endfor %}"
    source = "{% for t in tools or [] %}{{ t.function.name }}" + tool + "{% endfor %}" + LOOP
    schema = {"type": "object", "properties": {"x": {"type": "string"}, "y": {"description": "Y"}, "z": True}}
    tools = [Tool(function=Function(name="f", parameters=schema))]
    source = source.replace("BODY", TEXT).replace(
        "'#' + p.description", "'#' + p.description if p is mapping"
    )
    assert renderer(source).render([Message("user", "A")], tools=tools).startswith("f##Y<user>A")
    assert "description" not in schema["properties"]["x"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("shown", "fields"),
    [
        ("{{ t.function.name }}", ()),
        ("{{ t.function.name + t.function.description }}", ("description",)),
        ("{{ t.function.name }}{% for k in t.function.parameters['properties'].keys() %}{% endfor %}",
         ("parameters", EMPTY_SCHEMA, PROPERTIES)),
        ("{{ t.function.name }}{{ (t.function.parameters or {'type': ''}).type }}", ()),
        ("{{ t.function.name }}{% for k in t.function.parameters.properties %}{% endfor %}", ("parameters",)),
        ("{{ t.function.name }}{% for p in ((t.function.parameters or {}).properties or {}).values() %}"
         "{{ '#' + p.description }}{% endfor %}", (PARAMETER_DESCRIPTIONS,)),
        ("{{ t.function.name }}: {{ t.function.description | string + t.function.parameters.type }}",
         ("parameters", EMPTY_SCHEMA)),
    ],
)  # fmt: skip
def test_fields_that_functions_need(shown: str, fields: tuple[str, ...]) -> None:
    body = "{% for t in tools or [] %}" + shown + "{% endfor %}" + LOOP.replace("BODY", TEXT + CALL)
    assert renderer(body).rules(tools=True).function_fields == fields


def test_a_template_that_loops_over_tools_that_are_absent() -> None:
    source = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + LOOP.replace("BODY", TEXT)
    assert renderer(source).render([Message("user", "A")]) == "<user>A"


def test_a_system_message_that_is_only_shown_before_a_user() -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}{% if loop.last and m.role == 'user' and "
        "messages[0].role == 'system' %}{{ messages[0].content }};{% endif %}<{{ m.role }}>{{ m.content }}"
        "{% endfor %}"
    )
    head = [Message("system", "S"), Message("user", "A")]
    assert not renderer(source).rules(tools=False).head_always
    assert renderer(source).render(head) == "S;<user>A"
    longer = renderer(source).render([*head, Message("assistant", "B")])
    assert longer == "<user><system>\nS\n</system>\nA<assistant>B"


def test_all_of_it_in_one_prompt() -> None:
    """A template as Mistral's: text beside calls dropped, turns that alternate, short ids."""
    source = (
        "{% set ns = namespace(user=true) %}{% for m in messages %}"
        "{% if not m.tool_calls and m.role != 'tool' %}"
        "{% if (m.role == 'user') != ns.user %}{{ raise_exception('alternate') }}{% endif %}"
        "{% set ns.user = not ns.user %}{% endif %}"
        "{% if m.tool_calls %}[CALLS]{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        "{{ raise_exception('nine') }}{% endif %}{{ c.function | tojson }}{% endfor %}"
        "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
        "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    call = ToolCall(FunctionCall("f", '{"x": 1}'), "call_0123456789")
    messages = [
        Message("developer", "D"),
        Message("user", "A"),
        Message("user", "B"),
        Message("assistant", "C", tool_calls=[call]),
        Message("tool", "E", tool_call_id=call.id),
        Message("assistant", "F"),
    ]
    prompt = renderer(source).render(messages, tools=[Tool(function=Function(name="f"))])
    assert prompt == (
        "[INST]<system>\nD\n</system>\nA\nB[/INST]"
        ' C[CALLS]{"name": "f", "arguments": {"x": 1}}[RESULT]E[/RESULT] F</s>'
    )
