"""System text in the middle of a conversation, with templates of several kinds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from penstock.generation.input_processor import _rendered_turns
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.conversation import conversation
from penstock.generation.prompt.system_turns import TurnRules, place_system_turns, turn_rules
from penstock.generation.request.schemas import FunctionCall, Message, ToolCall

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
RULES = {
    "chatml": TurnRules(True, True),
    "first only": TurnRules(False, True),
    "alternate": TurnRules(False, False),
    "hoisting": TurnRules(False, True),
}


def template(kind: str) -> ChatTemplate:
    return ChatTemplate({"default": TEMPLATES[kind]}, {})


def rules_of(kind: str) -> TurnRules:
    return turn_rules(partial(_rendered_turns, template(kind), tools=False))


def rendered(kind: str, messages: list[Message], **options: Any) -> str:
    placed = place_system_turns(messages, rules_of(kind))
    return template(kind).render(conversation(placed, parts=False), **options)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_rules_of_a_template(kind: str) -> None:
    assert rules_of(kind) == RULES[kind]


def test_a_template_that_refuses_answered_conversations_has_rules() -> None:
    refuses = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('Nothing to answer') }}{% endif %}"
    template = ChatTemplate({"default": refuses + CHATML}, {})
    assert turn_rules(partial(_rendered_turns, template, tools=False)) == TurnRules(False, True)


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


def test_text_without_a_turn_of_its_own_is_marked() -> None:
    rules = TurnRules(system_anywhere=False, user_after_tool=False)
    messages = [
        Message("user", "A"),
        Message("system", "S"),
        Message("assistant", "B"),
        Message("system", "T"),
        Message("user", "C"),
        Message("tool", "D", tool_call_id="1"),
        Message("user", "E"),
    ]
    placed = place_system_turns(messages, rules)
    assert [(message.role, message.content) for message in placed] == [
        ("user", "A\n<system>\nS\n</system>"),
        ("assistant", "B"),
        ("user", "<system>\nT\n</system>\nC"),
        ("tool", "D\nE"),
    ]
    assert messages[0].content == "A"
