"""How turns are arranged for templates of several kinds."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.renderer import ConversationRenderer
from penstock.generation.prompt.template_rules import CALLS, PLACES, TemplateRules
from penstock.generation.prompt.turns import arranged
from penstock.generation.request.schemas import FunctionCall, Message, Part, ToolCall
from tests.generation.planning import error_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Takes any role anywhere, as Qwen's and Llama's do."""
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As later ones of Qwen's."""
ALTERNATE = (
    "{% set ns = namespace(user=true) %}{% set head = messages[0].role == 'system' %}"
    "{% if head %}[SYS]{{ messages[0].content }}[/SYS]{% endif %}"
    "{% for m in messages[1 if head else 0:] %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% set ns.user = not ns.user %}{% endif %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.role == 'assistant' %}{{ m.content }}{% for c in m.tool_calls or [] %}[CALL]{% endfor %}</s>"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
"""As Mistral's."""
HOISTING = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Puts all system text at the start, as DeepSeek's."""
TEMPLATES = {"chatml": CHATML, "first only": FIRST_ONLY, "alternate": ALTERNATE, "hoisting": HOISTING}
STABLE = {"chatml": {"user", "assistant"}, "first only": set(), "alternate": set(), "hoisting": set()}
"""After which turns each has a place for system text."""


def renderer(kind: str) -> ConversationRenderer:
    return ConversationRenderer(ChatTemplate({"default": TEMPLATES[kind]}, {}))


def rendered(kind: str, messages: list[Message], **options: Any) -> str:
    return renderer(kind).render(messages, stable=True, **options)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_where_a_template_has_a_place_for_system_text(kind: str) -> None:
    rules = renderer(kind).rules(tools=False)
    assert {before for role, before in rules.stable} - {"tool"} == STABLE[kind]
    assert rules.may_follow("user", "user") == (kind != "alternate")


def test_a_template_that_refuses_answered_conversations_has_rules() -> None:
    refuses = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('Nothing to answer') }}{% endif %}"
    template = ChatTemplate({"default": refuses + CHATML}, {})
    assert ("system", "user") in ConversationRenderer(template).rules(tools=False).stable


def turns(count: int) -> list[Message]:
    """A session as agents have it: every turn appends system text, and some call tools."""
    messages = [Message("system", "You are an agent."), Message("developer", "Be brief.")]
    for number in range(count):
        messages.append(Message("user", f"Question {number}"))
        messages.append(Message("system", f"It is {number} o'clock."))
        if number % 2:
            call = ToolCall(FunctionCall("f", {}), "123456789")
            messages.append(Message("assistant", "", tool_calls=[call]))
            messages.append(Message("tool", f"Result {number}", tool_call_id="123456789"))
            messages.append(Message("system", f"{number} files changed."))
        messages.append(Message("assistant", f"Answer {number}"))
    return messages


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_turn_begins_with_the_one_before(kind: str) -> None:
    messages = turns(5)
    last = ""
    for end in range(1, len(messages)):
        if messages[end].role == "assistant":  # a request ends before each
            prompt = rendered(kind, messages[:end], add_generation_prompt=False)
            assert prompt.startswith(last.removesuffix("[/INST]").removesuffix("[/RESULT]"))
            last = prompt
    whole = rendered(kind, messages)
    places = [whole.index(f"It is {number} o'clock.") for number in range(5)]
    questions = [whole.index(f"Question {number}") for number in range(5)]
    assert sorted([*places, *questions]) == [
        place for both in zip(questions, places, strict=True) for place in both
    ]
    assert whole.index("You are an agent.\nBe brief.") < questions[0]


NO_PLACES = TemplateRules(refused=PLACES - frozenset({("system", "start")}))
"""Of a template that takes system text at the start alone, and whose turns alternate."""


def test_text_without_a_turn_of_its_own_is_marked() -> None:
    messages = [
        Message("user", "A"),
        Message("system", "S"),
        Message("assistant", "B"),
        Message("system", "T"),
        Message("user", "C"),
        Message("assistant", tool_calls=[ToolCall(FunctionCall("f", {}), "1")]),
        Message("tool", "D", tool_call_id="1"),
        Message("user", "E"),
    ]
    assert shown(arranged(messages, NO_PLACES)) == [
        ("user", "A\n<system>\nS\n</system>"),
        ("assistant", "B"),
        ("user", "<system>\nT\n</system>\nC"),
        ("assistant", None),
        ("tool", "D\nE"),
    ]
    assert messages[0].content == "A"


def shown(messages: Any) -> list[tuple[str, object]]:
    return [(message.role, message.content) for message in messages]


def test_messages_that_a_template_takes_are_not_touched() -> None:
    messages = turns(3)
    assert arranged(messages[2:], TemplateRules()) is not messages
    plain = [Message("system", "S"), Message("user", "A"), Message("assistant", "B"), Message("user", "C")]
    assert arranged(plain, TemplateRules()) is plain


def test_a_developers_message_is_a_system_message_where_the_role_is_unknown() -> None:
    messages = [Message("developer", "D"), Message("user", "A")]
    assert shown(arranged(messages, NO_PLACES)) == [("system", "D"), ("user", "A")]
    assert shown(arranged(messages, TemplateRules())) == [("developer", "D"), ("user", "A")]


def test_a_template_without_system_messages_gets_their_text_from_the_user() -> None:
    rules = TemplateRules(refused=PLACES)
    messages = [Message("system", "S"), Message("developer", "D"), Message("user", "A")]
    assert shown(arranged(messages, rules)) == [
        ("user", "<system>\nS\n</system>\n<system>\nD\n</system>\nA"),
    ]
    assert shown(arranged(messages[:1], rules)) == [("user", "<system>\nS\n</system>")]


def test_system_text_between_a_users_messages_that_must_be_one() -> None:
    rules = TemplateRules(refused=PLACES - frozenset({("system", "start"), ("system", "user")}))
    messages = [Message("user", "A"), Message("system", "S"), Message("user", "B")]
    assert shown(arranged(messages, rules)) == [("user", "A\n<system>\nS\n</system>\nB")]
    assert shown(arranged(messages[:2], rules)) == [("user", "A"), ("system", "S")]


def test_a_greeting_follows_an_empty_message_where_turns_alternate() -> None:
    messages = [Message("system", "S"), Message("assistant", "Hello"), Message("user", "A")]
    assert shown(arranged(messages, NO_PLACES)) == [
        ("system", "S"),
        ("user", ""),
        ("assistant", "Hello"),
        ("user", "A"),
    ]
    assert arranged(messages, TemplateRules()) is messages


def test_a_head_that_is_only_shown_before_a_user() -> None:
    rules = TemplateRules(head_always=False)
    messages = [Message("system", "S"), Message("user", "A"), Message("assistant", "B")]
    assert shown(arranged(messages[:2], rules)) == [("system", "S"), ("user", "A")]
    assert shown(arranged(messages, rules))[0] == ("user", "<system>\nS\n</system>\nA")
    assert shown(arranged(messages[:2], rules, stable=True))[0] == ("user", "<system>\nS\n</system>\nA")


CALLED = [
    Message("user", "A"),
    Message(
        "assistant",
        "B",
        tool_calls=[ToolCall(FunctionCall("f", '{"x": 1}'), "1"), ToolCall(FunctionCall("g", {}), "2")],
        reasoning="R",
    ),
    Message("tool", "G", tool_call_id="2"),
    Message("tool", "F", tool_call_id="1"),
]


def test_calls_and_results_that_a_template_does_not_know_are_text() -> None:
    asked, called, results = arranged(CALLED, TemplateRules(calls=False, results=False, refused=PLACES))
    assert asked.content == "A"
    assert called.content == 'B\n[{"name": "f", "parameters": {"x": 1}}, {"name": "g", "parameters": {}}]'
    assert (called.tool_calls, called.reasoning) == (None, "R")
    assert results.content == (
        '<tool_response name="g">\nG\n</tool_response>\n<tool_response name="f">\nF\n</tool_response>'
    )


def test_calls_that_a_template_takes_one_by_one() -> None:
    _, first, result, second, other = arranged(CALLED, TemplateRules(parallel=False))
    for message, name in ((first, "f"), (second, "g")):
        assert [call.function.name for call in message.tool_calls or () if call.function] == [name]
    assert (first.content, first.reasoning) == ("B", "R")
    assert (second.content, second.reasoning) == (None, None)
    assert (result.content, other.content) == ("F", "G")


def test_text_beside_calls_that_a_template_drops_is_a_message_before() -> None:
    rules = TemplateRules(beside=False)
    messages = arranged(CALLED, rules)
    assert shown(messages)[:3] == [("user", "A"), ("assistant", "B"), ("assistant", None)]
    assert messages[2].reasoning == "R"


def test_errors_name_the_place_in_the_request() -> None:
    bad = Message("user", [Part(type="image_url")])
    error = error_of(lambda: arranged([Message("developer", "D"), Message("system", "S"), bad], NO_PLACES))
    assert error.param == "messages[2].content[0]"


SHOWN_CALLS = (
    "{% for c in m.tool_calls or [] %}[CALL]{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}"
)
BEHIND_CALLS = (
    "{% set ns = namespace(calls=false) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '[RESULT]' + m.content if ns.calls else '' }}"
    "{% elif m.role in ['system', 'developer'] %}{{ '' if ns.calls else '[SYS]' + m.content }}"
    "{% else %}{{ '[' + m.role + ']' + (m.content or '') }}{% endif %}"
    + SHOWN_CALLS
    + "{% set ns.calls = m.role == 'tool' and ns.calls or m.tool_calls is defined %}{% endfor %}"
)
"""Shows results directly behind calls alone, as Gemma 4's, and no system text there, as Qwen3's."""
NO_UNANSWERED = (
    "{% for m in messages %}"
    "{% if m.role in ['user', 'assistant'] and loop.index0 and messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content or '' }}" + SHOWN_CALLS + "{% endfor %}"
)
"""Refuses what is no result after a call, as Mistral's."""


def calling(*ids: str) -> Message:
    return Message("assistant", tool_calls=[ToolCall(FunctionCall("f", {"x": id}), id) for id in ids])


def prompt_of(template: str, *messages: Message) -> str:
    return ConversationRenderer(ChatTemplate({"default": template}, {})).render(
        [Message("user", "Q"), *messages]
    )


R1, R2 = Message("tool", "R1", tool_call_id="c1"), Message("tool", "R2", tool_call_id="c2")


@pytest.mark.parametrize("between", ["user", "assistant", "system", "developer"])
def test_results_go_up_to_their_calls_where_they_are_shown_there_alone(between: str) -> None:
    text = Message(between, "T")
    one = prompt_of(BEHIND_CALLS, calling("c1"), text, R1)
    assert one.startswith('[user]Q[assistant][CALL]f{"x": "c1"}[RESULT]R1')
    assert one.replace("[RESULT]", "").count("T") == 1
    two = prompt_of(BEHIND_CALLS, calling("c1", "c2"), R1, text, R2)
    assert "[RESULT]R1[RESULT]R2" in two


def test_results_stay_where_they_are_shown() -> None:
    messages = [Message("user", "Q"), calling("c1"), Message("user", "T"), R1]
    assert arranged(messages, TemplateRules()) is messages


def test_results_without_a_call_are_text_where_they_are_not_shown() -> None:
    assert prompt_of(BEHIND_CALLS, R1) == "[user]Q[user]<tool_response>\nR1\n</tool_response>"
    later = prompt_of(BEHIND_CALLS, calling("c1"), R1, Message("user", "T"), R2)
    assert later.endswith("[RESULT]R1[user]T[user]<tool_response>\nR2\n</tool_response>")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_text_after_an_unanswered_call(role: str) -> None:
    prompt = prompt_of(BEHIND_CALLS, calling("c1"), Message(role, "S"), Message("user", "T"))
    assert prompt.endswith("[user]<system>\nS\n</system>[user]T")


def test_unanswered_calls_get_a_result_where_nothing_else_may_follow_them() -> None:
    for role in ("user", "assistant"):
        prompt = prompt_of(NO_UNANSWERED, calling("c1", "c2"), Message(role, "T"))
        assert prompt.endswith(f"[tool](no result)[tool](no result)[{role}]T")
    assert prompt_of(NO_UNANSWERED, calling("c1"), Message("user", "T"), R1).endswith("[tool]R1[user]T")


def test_what_a_strange_id_answers_is_text_where_results_need_their_call() -> None:
    assert prompt_of(BEHIND_CALLS, calling("c1"), R2).endswith("[user]<tool_response>\nR2\n</tool_response>")
    named = Message("tool", "R2", tool_call_id="c2", name="f")
    assert prompt_of(BEHIND_CALLS, calling("c1"), named).endswith("[RESULT]R2")


def test_users_of_different_names_become_one_turn_where_turns_alternate() -> None:
    messages = [Message("user", text, name=name) for text, name in (("A", "ann"), ("B", "bob"), ("C", None))]
    (joined,) = arranged(messages, NO_PLACES)
    assert (joined.content, joined.name) == ("ann: A\nbob: B\nC", None)
    (same,) = arranged([messages[0], messages[0]], NO_PLACES)
    assert (same.content, same.name) == ("A\nA", "ann")


@pytest.mark.parametrize("content", [None, "", []])
def test_empty_answers_are_left_out_where_they_are_refused(content: Any) -> None:
    refuse = "{% if m.role == 'assistant' and not m.content %}{{ raise_exception('empty') }}{% endif %}"
    template = "{% for m in messages %}" + refuse + "[{{ m.role }}]{{ m.content }}{% endfor %}"
    empty = Message("assistant", content)
    assert prompt_of(template, empty, Message("user", "T")) == "[user]Q[user]T"
    assert "[assistant]" in prompt_of(template.replace(refuse, ""), empty, Message("user", "T"))


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("stable", [True, False])
def test_system_text_alone_is_the_users_where_the_template_puts_it_there(role: str, stable: bool) -> None:
    folding = (
        "{% set head = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role == 'user' %}[user]{{ head if loop.first else '' }}{{ m.content }}"
        "{% endfor %}"
    )
    found = ConversationRenderer(ChatTemplate({"default": folding}, {}))
    assert found.render([Message(role, "S")], stable=stable) == "[user]<system>\nS\n</system>"
    assert found.render([Message("system", "S"), Message("user", "T")], stable=stable) == "[user]ST"


def test_an_answer_after_system_text_within_a_conversation_follows_no_empty_turn() -> None:
    rules = TemplateRules(refused=frozenset({("assistant", "system"), ("user", "user")}))
    messages = [Message("user", "A"), Message("system", "S"), Message("assistant", "B")]
    assert shown(arranged(messages, rules)) == [("user", "A"), ("system", "S"), ("assistant", "B")]


def test_results_go_up_where_an_answer_could_not_follow_them() -> None:
    said = [calling("c1"), Message("assistant", "T"), R1, Message("assistant", "A")]
    uncalled = ALTERNATE.replace("[CALL]", "[CALL]{{ c.function.name }}{{ c.function.arguments | tojson }}")
    assert prompt_of(uncalled, *said).endswith("</s>[RESULT]R1[/RESULT]T\nA</s>")


def test_an_answer_before_calls_is_text_beside_them_where_they_may_not_follow_it() -> None:
    rules = TemplateRules(refused=frozenset({(CALLS, "assistant")}))
    _, called = arranged([Message("user", "Q"), Message("assistant", "T"), calling("c1")], rules)
    assert (called.content, bool(called.tool_calls)) == ("T", True)


def test_system_text_between_answers_is_the_users_where_turns_alternate() -> None:
    rules = TemplateRules(refused=frozenset({("assistant", "assistant"), ("assistant", "system")}))
    messages = [
        Message("user", "Q"),
        *(Message(role, role[0]) for role in ("assistant", "system", "assistant")),
    ]
    assert shown(arranged(messages, rules))[1:] == [
        ("assistant", "a"),
        ("user", "<system>\ns\n</system>"),
        ("assistant", "a"),
    ]
