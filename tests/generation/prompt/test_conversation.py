from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET

from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.conversation import conversation, plain_tools, put_before_calls
from penstock.generation.prompt.renderer import ConversationRenderer
from penstock.generation.prompt.template_rules import (
    CALLS,
    THINKING_PART,
    BeforeCalls,
    CallIds,
    TemplateRules,
)
from penstock.generation.request.schemas import Function, FunctionCall, Message, Part, Tool, ToolCall
from tests.generation.planning import error_of

TEXT = TemplateRules()
PARTS = TemplateRules(as_text=frozenset(), as_parts=frozenset({"user", "assistant", CALLS, "tool"}))


def messages(*given: dict[str, object]) -> list[Message]:
    return msgspec.convert(list(given), list[Message])


def test_parts_become_one_text() -> None:
    content = [{"type": "text", "text": "a"}, "b"]
    assert conversation(messages({"role": "user", "content": content}), TEXT) == [
        {"role": "user", "content": "a\nb"}
    ]


def test_text_becomes_parts_where_the_template_wants_them() -> None:
    assert conversation(messages({"role": "user", "content": "a"}, {"role": "user"}), PARTS) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": [{"type": "text", "text": ""}]},
    ]


def test_content_stays_as_it_is_where_the_template_takes_both() -> None:
    both = TemplateRules(as_text=frozenset({"user"}), as_parts=frozenset({"user"}))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [{"role": "user", "content": "a"}, {"role": "user", "content": parts}]
    assert conversation(messages(*given), both) == given


def test_parts_become_one_where_the_template_reads_the_first() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    first = TemplateRules(as_text=frozenset(), as_part=frozenset({"user"}))
    assert conversation(messages({"role": "user", "content": content}), first) == [
        {"role": "user", "content": [{"type": "text", "text": "a\nb"}]}
    ]


def test_content_may_be_absent() -> None:
    assert conversation(messages({"role": "user"}), TEXT) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize("given", [{"content": None}, {"content": ""}, {}])
@pytest.mark.parametrize("absent", [None, UNSET, "", []])
def test_content_beside_calls_is_absent_as_the_template_takes_it(
    given: dict[str, object], absent: object
) -> None:
    call = {"function": {"name": "f"}}
    [plain] = conversation(
        messages({"role": "assistant", "tool_calls": [call], **given}), TemplateRules(absent=(absent,))
    )
    assert plain.get("content", UNSET) == absent


def test_tool_calls_get_their_arguments_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    bare = {"function": {"name": "g", "arguments": ""}}
    (plain,) = conversation(messages({"role": "assistant", "tool_calls": [call, bare]}), TEXT)
    assert plain["tool_calls"] == [
        {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"x": [1]}}},
        {"type": "function", "function": {"name": "g", "arguments": {}}},
    ]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ('{"x":1}', '{"x":1}'),
        ({"x": "é"}, '{"x": "é"}'),
        ("", "{}"),
        (None, "{}"),
        ('{"x": ', '{"x": '),
    ],
)
def test_arguments_are_text_where_the_template_joins_it(given: object, text: str) -> None:
    call = {"function": {"name": "f", "arguments": given}}
    rules = TemplateRules(object_arguments=False)
    [plain] = conversation(messages({"role": "assistant", "tool_calls": [call]}), rules)
    assert plain["tool_calls"][0]["function"]["arguments"] == text


def test_the_other_fields_are_kept() -> None:
    result = {"role": "tool", "content": "5", "name": "f", "tool_call_id": "c1"}
    answer = {"role": "assistant", "content": "5", "name": "x", "reasoning": "hm"}
    assert conversation(messages(result, answer), TEXT) == [result, answer | {"reasoning_content": "hm"}]


@pytest.mark.parametrize("arguments", ['{"city": "Be', "{'city': 'Bern'}", "[1]", "5", "null", "[" * 5000])
def test_arguments_that_are_no_object_stay_the_text_that_the_model_wrote(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    history = messages({"role": "assistant", "tool_calls": [call]})
    (plain,) = conversation(history, TEXT)
    assert plain["tool_calls"][0]["function"]["arguments"] == arguments
    (wrapped,) = conversation(history, TemplateRules(text_arguments=False))
    assert wrapped["tool_calls"][0]["function"]["arguments"] == {"arguments": arguments}


def test_parts_that_are_not_text_are_refused_by_name() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "hologram"}]
    error = error_of(lambda: conversation(messages({"role": "user", "content": content}), TEXT))
    assert error.param == "messages[0].content[1]"
    assert "'hologram'" in error.message


@pytest.mark.parametrize(
    ("field", "value"), [("function_call", {"name": "f", "arguments": "{}"}), ("audio", {"id": "a"})]
)
def test_older_and_other_answers_are_refused_by_name(field: str, value: dict[str, str]) -> None:
    error = error_of(lambda: conversation(messages({"role": "assistant", field: value}), TEXT))
    assert (error.status, error.param) == (400, f"messages[0].{field}")


def test_a_refusal_is_the_text_of_a_message_without_content() -> None:
    given = {"role": "assistant", "content": None, "refusal": "No.", "audio": None, "function_call": None}
    assert conversation(messages(given), TEXT) == [{"role": "assistant", "content": "No."}]


def test_parts_that_are_a_refusal_are_text() -> None:
    given = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert conversation(messages(given), TEXT) == [{"role": "assistant", "content": "No."}]


@pytest.mark.parametrize("kind", ["text", "refusal"])
def test_a_part_needs_the_field_of_its_type(kind: str) -> None:
    given = {"role": "assistant", "content": [{"type": kind}]}
    error = error_of(lambda: conversation(messages(given), PARTS))
    assert error.param == "messages[0].content[0]"
    assert f"needs the field '{kind}'" in error.message


def test_ids_of_calls_are_shortened_alike() -> None:
    call = ToolCall(FunctionCall("f", {}), "call_1234567890")
    messages = [Message("assistant", tool_calls=[call]), Message("tool", "x", tool_call_id=call.id)]
    plain = conversation(messages, TemplateRules(ids=CallIds.SHORT))
    [id] = [call["id"] for call in plain[0]["tool_calls"]]
    assert id == plain[1]["tool_call_id"]
    assert len(id) == 9
    assert id.isalnum()
    short = [Message("tool", "x", tool_call_id="a23456789")]
    assert conversation(short, TemplateRules(ids=CallIds.SHORT))[0]["tool_call_id"] == "a23456789"


def test_ids_have_the_names_of_functions_where_nothing_else_shows_them() -> None:
    ids = ("call_x", "functions.f:1", "functions_f_2", None)
    calls = [ToolCall(FunctionCall("f", {}), id) for id in ids]
    messages = [
        Message("assistant", tool_calls=calls[:2]),
        Message("tool", "x", tool_call_id="functions.f:1"),
        Message("tool", "x", tool_call_id="call_x"),
        Message("assistant", tool_calls=calls[2:]),
        Message("tool", "x", tool_call_id="functions_f_2"),
        Message("tool", "x", tool_call_id="other"),
    ]
    plain = conversation(messages, TemplateRules(ids=CallIds.NAMED))
    assert [call["id"] for each in plain for call in each.get("tool_calls", ())] == [
        f"functions.f:{number}" for number in range(4)
    ]
    assert [each["tool_call_id"] for each in plain if each["role"] == "tool"] == [
        "functions.f:1",
        "functions.f:0",
        "functions.f:2",
        "other",
    ]


def test_a_result_has_the_name_of_its_function() -> None:
    call = ToolCall(FunctionCall("f", {}), "1")
    messages = [Message("assistant", tool_calls=[call]), Message("tool", "x", tool_call_id="1")]
    assert conversation(messages, TEXT)[1]["name"] == "f"


THOUGHTS: list[dict[str, object]] = [
    {"reasoning_content": "hm", "content": "a"},
    {"reasoning": "hm", "content": "a"},
    {"thinking": "hm", "content": "a"},
    {"thought": "hm", "content": "a"},
    {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]},
    {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "a"]},
    {"content": [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "a"}]},
]


@pytest.mark.parametrize("given", THOUGHTS)
def test_reasoning_gets_the_name_that_the_template_reads(given: dict[str, object]) -> None:
    [plain] = conversation(messages({"role": "assistant", **given}), TemplateRules(reasoning=("thinking",)))
    assert plain == {"role": "assistant", "content": "a", "thinking": "hm"}
    rules = TemplateRules(reasoning=(THINKING_PART,))
    [plain] = conversation(messages({"role": "assistant", **given}), rules)
    parts = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]
    assert plain == {"role": "assistant", "content": parts}


def test_text_that_a_template_drops_is_put_before_the_calls() -> None:
    rules = TemplateRules(beside=False, before_calls=BeforeCalls(" ", "[CALLS]"))
    call = ToolCall(FunctionCall("f", {}), "1")
    texts: list[str] = []
    plain = conversation(
        [Message("assistant", "A", tool_calls=[call]), Message("assistant", "B", tool_calls=[call])],
        rules,
        texts,
    )
    names = [message["tool_calls"][0]["function"]["name"] for message in plain]
    prompt = "".join(f"[CALLS]{name}" for name in names)
    assert put_before_calls(prompt, texts, rules) == " A[CALLS]f B[CALLS]f"
    assert put_before_calls(f"[OTHER]{names[0]}", texts, rules) == "[OTHER]f"


def test_a_function_gets_the_fields_that_a_template_needs() -> None:
    tools = [Tool(function=Function(name="f")), Tool(function=Function(name="g", description="D"))]
    assert "description" not in plain_tools(tools, TEXT)[0]["function"]
    plain = plain_tools(tools, TemplateRules(function_fields=("description", "parameters")))
    assert [each["function"]["description"] for each in plain] == ["", "D"]
    assert plain[0]["function"]["parameters"] == {"type": "object", "properties": {}}


CUTTING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
"""Takes what is before a mark of the assistant's text for reasoning, as Qwen3's."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Write </think> there", "Write < /think> there"),
        ("<think>r</think>A", "A"),
        ("<think>r</think></think>A", "< /think>A"),
        ("<think>alone", "<think>alone"),
        ("A <think> B", "A < think> B"),
        ("</think>A", "< /think>A"),
        ("[/THINK]A", "[/THINK]A"),
    ],
)
def test_text_at_whose_marks_a_template_cuts_it_is_kept(text: str, shown: str) -> None:
    renderer = ConversationRenderer(ChatTemplate({"default": CUTTING}, {}))
    assert renderer.rules(tools=False).cut_at == (("<think>", "</think>"),)
    for content in (text, [Part(type="text", text=text)]):
        said = [Message("user", "Q"), Message("assistant", content), Message("user", text)]
        assert renderer.render(said) == f"<user>Q<assistant>{shown}<user>{text}"


def test_text_to_be_continued_keeps_what_is_before_a_mark() -> None:
    renderer = ConversationRenderer(ChatTemplate({"default": CUTTING}, {}))
    for text, end in (
        ("B </think> A", "B < /think> A"),
        ("<think>r", "<think>r"),
        ("<think>r</think>A", ">A"),
    ):
        said = [Message("user", "Q"), Message("assistant", text)]
        prompt = renderer.render(said, add_generation_prompt=False, continue_final_message=True)
        assert prompt.endswith(end)


def test_text_beside_reasoning_keeps_its_marks_where_no_template_cuts_it() -> None:
    shown = CUTTING.replace("'</think>' in", "not m.reasoning and '</think>' in").replace(
        "{% if", "{{ m.reasoning }}{% if", 1
    )
    said = [Message("user", "Q"), Message("assistant", "A </think> B", reasoning="R")]
    prompts = [
        ConversationRenderer(ChatTemplate({"default": each}, {})).render(said) for each in (shown, CUTTING)
    ]
    assert prompts == ["<user>Q<assistant>RA </think> B", "<user>Q<assistant>A < /think> B"]
