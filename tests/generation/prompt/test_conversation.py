from __future__ import annotations

import msgspec
import pytest

from penstock.generation.prompt.conversation import conversation, has_text_arguments, shorten_call_ids
from penstock.generation.request.schemas import FunctionCall, Message, ToolCall
from tests.generation.planning import error_of


def messages(*given: dict[str, object]) -> list[Message]:
    return msgspec.convert(list(given), list[Message])


def test_parts_become_one_text() -> None:
    content = [{"type": "text", "text": "a"}, "b"]
    assert conversation(messages({"role": "user", "content": content}), parts=False) == [
        {"role": "user", "content": "a\nb"}
    ]


def test_text_becomes_parts_where_the_template_wants_them() -> None:
    assert conversation(messages({"role": "user", "content": "a"}, {"role": "user"}), parts=True) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": []},
    ]


def test_content_may_be_absent() -> None:
    assert conversation(messages({"role": "user"}), parts=False) == [{"role": "user", "content": ""}]


def test_tool_calls_get_their_arguments_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    bare = {"function": {"name": "g", "arguments": ""}}
    (plain,) = conversation(messages({"role": "assistant", "tool_calls": [call, bare]}), parts=False)
    assert plain["tool_calls"] == [
        {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"x": [1]}}},
        {"type": "function", "function": {"name": "g", "arguments": {}}},
    ]


def test_the_other_fields_are_kept() -> None:
    given = {"role": "tool", "content": "5", "name": "f", "tool_call_id": "c1", "reasoning": "hm"}
    assert conversation(messages(given), parts=False) == [given | {"reasoning_content": "hm"}]


@pytest.mark.parametrize("arguments", ['{"city": "Be', "{'city': 'Bern'}", "[1]", "5", "null", "[" * 5000])
def test_arguments_that_are_no_object_stay_the_text_that_the_model_wrote(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    history = messages({"role": "assistant", "tool_calls": [call]})
    (plain,) = conversation(history, parts=False)
    assert plain["tool_calls"][0]["function"]["arguments"] == arguments
    assert has_text_arguments([plain])
    (wrapped,) = conversation(history, parts=False, wrap_arguments=True)
    assert wrapped["tool_calls"][0]["function"]["arguments"] == {"arguments": arguments}
    assert not has_text_arguments([wrapped])


def test_parts_that_are_not_text_are_refused_by_name() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "hologram"}]
    error = error_of(lambda: conversation(messages({"role": "user", "content": content}), parts=False))
    assert error.param == "messages[0].content[1]"
    assert "'hologram'" in error.message


@pytest.mark.parametrize(
    ("field", "value"), [("function_call", {"name": "f", "arguments": "{}"}), ("audio", {"id": "a"})]
)
def test_older_and_other_answers_are_refused_by_name(field: str, value: dict[str, str]) -> None:
    error = error_of(lambda: conversation(messages({"role": "assistant", field: value}), parts=False))
    assert (error.status, error.param) == (400, f"messages[0].{field}")


def test_a_refusal_is_the_text_of_a_message_without_content() -> None:
    given = {"role": "assistant", "content": None, "refusal": "No.", "audio": None, "function_call": None}
    assert conversation(messages(given), parts=False) == [{"role": "assistant", "content": "No."}]


def test_parts_that_are_a_refusal_are_text() -> None:
    given = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert conversation(messages(given), parts=False) == [{"role": "assistant", "content": "No."}]


@pytest.mark.parametrize("kind", ["text", "refusal"])
def test_a_part_needs_the_field_of_its_type(kind: str) -> None:
    given = {"role": "assistant", "content": [{"type": kind}]}
    error = error_of(lambda: conversation(messages(given), parts=True))
    assert error.param == "messages[0].content[0]"
    assert f"needs the field '{kind}'" in error.message


def test_ids_of_calls_are_shortened_alike() -> None:
    call = ToolCall(FunctionCall("f", {}), "call_1234567890")
    messages = [Message("assistant", tool_calls=[call]), Message("tool", "x", tool_call_id=call.id)]
    plain = conversation(messages, parts=False)
    assert shorten_call_ids(plain)
    [id] = [call["id"] for call in plain[0]["tool_calls"]]
    assert id == plain[1]["tool_call_id"]
    assert len(id) == 9
    assert id.isalnum()
    assert not shorten_call_ids(plain)
