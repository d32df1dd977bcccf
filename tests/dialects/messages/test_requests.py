"""Bodies of messages become conversations, tools and sampling fields."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.messages.dialect import Messages, MessagesTokenCounter
from penstock.dialects.messages.thinking import carrying_signature
from penstock.http.errors import ApiError
from tests.dialects.messages.serving import WEATHER, counted, plan, processor, prompt

USER = {"role": "user", "content": "Hi"}


def error(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        plan(**fields)
    return caught.value


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


# -- messages


def test_a_conversation_with_a_tool() -> None:
    messages = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "of another vendor"},
                {"type": "redacted_thinking", "data": "xyz"},
                text("I look."),
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}},
            ],
        },
        user(
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("sunny"), text("warm")]},
            text("So?", cache_control={"type": "ephemeral"}),
        ),
    ]
    assert prompt(messages=messages, system="Be kind.", thinking={"type": "adaptive"}) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think>Hm.</think>I look."
        '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsunny\nwarm<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_tool_that_failed_says_so() -> None:
    def shown(content: Any) -> str:
        block = {"type": "tool_result", "tool_use_id": "1", "content": content, "is_error": True}
        return prompt(messages=[USER, user(block)]).partition("tool\n")[2].partition("<|im_end|>")[0]

    assert shown("no such file") == "Error: no such file"
    assert shown("Error: no such file") == "Error: no such file"
    assert shown([text("<tool_use_error>no</tool_use_error>")]) == "<tool_use_error>no</tool_use_error>"


def test_omitted_thinking_comes_back_from_its_signature() -> None:
    block = {"type": "thinking", "thinking": "", "signature": carrying_signature("Hm.")}
    messages = [USER, {"role": "assistant", "content": [block, text("Yes.")]}, USER]
    assert "<think>Hm.</think>Yes." in prompt(messages=messages)
    block["signature"] += "ä"  # no error, whatever it is
    assert "<think>" not in prompt(messages=messages, thinking={"type": "adaptive"})


def test_documents_and_search_results_become_text() -> None:
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "Once"},
        "title": "T",
    }
    result = {"type": "search_result", "source": "http://x", "title": "R", "content": [text("Found")]}
    shown = prompt(messages=[user(document, result)])
    assert '<document title="T">\nOnce\n</document>' in shown
    assert '<search_result title="R">\nSource: http://x\nFound\n</search_result>' in shown


def test_a_reference_names_its_tool() -> None:
    block = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    assert "<|im_start|>tool\nTool: weather<|im_end|>" in prompt(messages=[user(result)], tools=[WEATHER])
    del block["tool_name"]
    assert "messages[0].content[0].content[0].tool_name is missing" in error(messages=[user(result)]).message


def test_a_prefilled_answer_is_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "The best answer is ("}]
    assert prompt(messages=messages).endswith("<|im_start|>assistant\nThe best answer is (")


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"type": "container_upload", "file_id": "x"}, "messages[0].content[0]: blocks of"),
        ({"type": "document", "source": {"type": "tape"}}, "messages[0].content[0].source"),
        ({"type": "text"}, "messages[0].content[0].text is missing"),
        ({"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}}, "'server_tool_use'"),
    ],
)
def test_blocks_that_are_no_text_are_refused_by_name(block: dict[str, Any], named: str) -> None:
    assert named in error(messages=[user(block)]).message


@pytest.mark.parametrize("part", [{"type": "text", "text": 1}, {"type": "text"}, {"type": "audio"}])
def test_search_results_and_documents_have_texts(part: dict[str, Any]) -> None:
    result = {"type": "search_result", "source": "s", "title": "t", "content": [part]}
    document = {"type": "document", "source": {"type": "content", "content": [part]}}
    place = "messages[0].content[0]"
    assert error(messages=[user(result)]).message.startswith(f"{place}.content[0]")
    assert error(messages=[user(document)]).message.startswith(f"{place}.source.content[0]")
    inner = {"type": "tool_result", "tool_use_id": "1", "content": [result]}
    assert error(messages=[user(inner)]).message.startswith(f"{place}.content[0].content[0]")


def test_what_a_body_needs() -> None:
    assert "messages must have at least one message" in error(messages=[]).message
    assert "messages[0].role must be user" in error(messages=[{"role": "tool", "content": "x"}]).message
    with pytest.raises(ApiError, match="the required field 'max_tokens' is missing"):
        Messages(ServeConfig(), processor()).plan(json.dumps({"messages": [USER]}).encode())


# -- the head of the prompt


def test_the_billing_header_of_claude_code_is_dropped() -> None:
    system = [text("x-anthropic-billing-header: cc_version=1;"), text("A"), text("B")]
    assert prompt(system=system).startswith("<|im_start|>system\nA\nB<|im_end|>")


def test_system_messages_in_the_conversation_stay_where_they_are() -> None:
    messages = [USER, {"role": "system", "content": "Tools: none."}]
    assert prompt(messages=messages, system="A") == (
        "<|im_start|>system\nA<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>system\nTools: none.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_system_blocks_after_the_last_cache_mark_are_at_the_end() -> None:
    system = [text("A", cache_control={"type": "ephemeral"}), text("It is noon.")]
    assert prompt(system=system).startswith(
        "<|im_start|>system\nA<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>system\nIt is noon.<|im_end|>\n"
    )
    unmarked = [text("A"), text("It is noon.")]
    assert prompt(system=unmarked).startswith("<|im_start|>system\nA\nIt is noon.<|im_end|>\n")


# -- tools


def test_a_template_that_wants_short_ids_gets_them() -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
        "{{ c.id }}{% endfor %}{{ m.tool_call_id }}{{ m.content }}{% endfor %}"
    )
    call = {"type": "tool_use", "id": "toolu_123", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_123", "content": "R"}
    messages = [USER, {"role": "assistant", "content": [call]}, user(result)]
    shown = prompt(Messages(ServeConfig(), processor(template)), messages=messages)
    assert shown == f"Hi{shown[2:11]}{shown[2:11]}R"


def test_tools_are_functions() -> None:
    shown = prompt(tools=[WEATHER, {"type": "bash_20250124", "name": "bash"}])
    assert '"name": "weather"' in shown
    assert '"name": "bash"' in shown
    assert '"command"' in shown


@pytest.mark.parametrize(
    ("choice", "constrained"),
    [("auto", False), ("any", True), ("tool", True), ("none", False)],
)
def test_tool_choice(choice: str, constrained: bool) -> None:
    given = {"type": choice} | ({"name": "weather"} if choice == "tool" else {})
    planned = plan(tools=[WEATHER], tool_choice=given)
    assert (planned.constraint is not None) == constrained


def test_a_schema_at_fault_has_the_name_of_its_field() -> None:
    planned = plan(tools=[WEATHER], tool_choice={"type": "any"})
    assert planned.constraint is not None
    fault = planned.constraint.fault("no", planned.constraint.parts[0].path)
    assert fault.param == "tools[0].input_schema"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name is missing"),
        ({"tools": [WEATHER], "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name is missing"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "some"}}, "output_config.effort"),
        ({"stop_sequences": [""]}, "stop_sequences cannot contain an empty string"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"container": "c"}, "container is not supported"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], named: str) -> None:
    assert named in error(**fields).message


# -- the rest


def test_thinking_tells_the_template() -> None:
    silent = "<think>\n\n</think>\n\n"
    assert prompt().endswith(silent)
    assert prompt(thinking={"type": "disabled"}).endswith(silent)
    for kind in ("enabled", "adaptive", "between_tools"):
        assert not prompt(thinking={"type": kind}).endswith(silent)
    assert not prompt(chat_template_kwargs={"enable_thinking": True}).endswith(silent)


def test_sampling_fields() -> None:
    planned = plan(temperature=0.5, top_p=0.9, top_k=7, seed=3, max_tokens=10, metadata={"user_id": "u"})
    base = planned.base
    assert (base.temperature, base.top_p, base.top_k, base.seed, base.max_tokens) == (0.5, 0.9, 7, 3, 10)
    assert planned.session == "u"
    assert plan(max_tokens=64_000).base.max_tokens == 2048


def test_a_small_kv_cache_shortens_the_output_instead_of_refusing_it() -> None:
    """Requests must have max_tokens, and clients always send the same."""
    small = processor()
    small.limit_total(100)
    planned = plan(Messages(ServeConfig(), small), max_tokens=1000)
    assert planned.sampling(40).max_tokens == 61
    with pytest.raises(ApiError, match="maximum context length is 101 tokens"):
        planned.sampling(102)


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_json_schema(field: str) -> None:
    format = {"type": "json_schema", "schema": {"type": "object", "properties": {}}}
    planned = plan(**{field: {"format": format} if field == "output_config" else format})
    assert planned.constraint is not None
    assert planned.constraint.field.startswith(field)


def test_what_clients_send_beside_is_tolerated() -> None:
    plan(
        system=[text("A", cache_control={"type": "ephemeral", "ttl": "1h"})],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        service_tier="auto",
        a_new_field={"x": 1},
    )
    strict = Messages(ServeConfig(), processor(strict_requests=True))
    plan(strict, context_management={}, cache_control={"type": "ephemeral"}, metadata={"user_id": "u"})
    with pytest.raises(ApiError, match="Unknown field 'a_new_field'"):
        plan(strict, a_new_field=1)


def test_tokens_are_counted_of_the_same_prompt() -> None:
    fields: dict[str, Any] = {"messages": [USER], "system": "A", "tools": [WEATHER]}
    assert counted(MessagesTokenCounter(processor()), **fields) == prompt(**fields)


def test_aliases_of_models() -> None:
    messages = Messages(ServeConfig(), processor(model_alias=["claude-*=m", "fable=m"]))
    for name in ("m", "fable", "claude-opus-4-8"):
        assert plan(messages, model=name).model == "m"
    with pytest.raises(ApiError, match="`gpt` does not exist"):
        plan(messages, model="gpt")


@pytest.mark.parametrize(
    ("edits", "named"),
    [
        ([], None),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], None),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "all"}}], None),
        ([{"type": "clear_thinking_20251015"}], "clear_thinking_20251015"),
        (
            [{"type": "clear_thinking_20251015"}, {"type": "clear_tool_uses_20250919", "keep": {"value": 3}}],
            "clear_thinking_20251015, clear_tool_uses_20250919",
        ),
    ],
)
def test_edits_that_are_not_made_are_named(edits: list[dict[str, Any]], named: str | None) -> None:
    warning = plan(messages=[USER], context_management={"edits": edits}).warning
    told = f"context_management: the conversation is taken as it is, without {named}"
    assert warning == (None if named is None else told)


@pytest.mark.parametrize("wrong", ["auto", {"edits": "all"}, {"edits": ["all"]}])
def test_edits_that_are_no_edits(wrong: Any) -> None:
    assert error(messages=[USER], context_management=wrong).param == "context_management"
