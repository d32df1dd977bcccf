"""Thousands of successive messages are joined in one go: a body of some megabytes must not cost minutes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from penstock.dialects.responses.items import Conversation
from penstock.dialects.responses.request_schema import InputItem
from penstock.generation.prompt.template_rules import PLACES, TemplateRules
from penstock.generation.prompt.turns import arranged
from penstock.generation.request.schemas import Message
from penstock.generation.request.unsupported_content import UnsupportedContent

TEXT = "x" * 2000
RULES = TemplateRules(refused=PLACES - frozenset({("system", "start")}))


def join_users(count: int) -> str:
    [message] = arranged([Message("user", TEXT)] * count, RULES)
    assert isinstance(message.content, str)
    return message.content


def join_systems(count: int) -> str:
    [message] = arranged([Message("system", TEXT)] * count, RULES)
    assert isinstance(message.content, str)
    return message.content


def join_answers(count: int) -> str:
    conversation = Conversation(UnsupportedContent())
    item = InputItem(type="message", role="assistant", content=TEXT)
    conversation.add([item] * count, "input")
    [message] = conversation.messages
    assert isinstance(message.content, str)
    return message.content


@pytest.mark.parametrize("join", [join_users, join_systems, join_answers])
def test_the_time_grows_with_the_length_alone(join: Callable[[int], str]) -> None:
    """Eight times the messages; joined one by one they would take 64 times as long."""

    def cpu_s(count: int) -> float:
        began = time.process_time()
        assert len(join(count)) == count * (len(TEXT) + 1) - 1
        return time.process_time() - began

    short = min(cpu_s(1000) for _ in range(3))
    assert min(cpu_s(8000) for _ in range(3)) < 30 * short


def test_an_assistants_turn_goes_on_where_items_are_added_in_parts() -> None:
    conversation = Conversation(UnsupportedContent())
    answer = InputItem(type="message", role="assistant", content="A1")
    conversation.add(
        [answer, InputItem(type="function_call", name="f", arguments="{}", call_id="c")], "input"
    )
    assert [message.content for message in conversation.messages] == ["A1"]
    conversation.add([InputItem(type="message", role="assistant", content="A2")], "input")
    [message] = conversation.messages
    assert message.content == "A1\nA2"
    assert message.tool_calls is not None
    assert [call.id for call in message.tool_calls] == ["c"]
