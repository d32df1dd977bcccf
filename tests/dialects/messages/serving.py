"""Plans and replies of messages, without an engine and without a connection."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from penstock.config.serve import ServeConfig
from penstock.dialects.messages.dialect import Messages, MessagesTokenCounter
from penstock.generation.dialect import NO_INFO
from penstock.generation.input_processor import InputProcessor
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.replies.reply import TextTables
from penstock.wire.frames import FinishReason
from tests.generation.planning import tiny_input_processor, tiny_tokenizer
from tests.generation.replying import Desk, MemorySink, in_loop, tables_of

TEMPLATE = """\
{%- if tools %}<|im_start|>system
Write calls between <tool_call> and </tool_call>.{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning %}<think>{{ message.reasoning }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- if not (loop.last and continue_final_message) %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""
WEATHER = {
    "name": "weather",
    "description": "Weather of a place.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def processor(template: str = TEMPLATE, **options: Any) -> InputProcessor:
    return tiny_input_processor(ServeConfig(**options), ChatTemplate({"default": template}, {}), names=("m",))


def make_dialect(**options: Any) -> Messages:
    return Messages(ServeConfig(**options), processor(**options))


@cache
def dialect() -> Messages:
    return make_dialect()


@cache
def tables() -> TextTables:
    return tables_of(tiny_tokenizer().raw)


def plan(api: Messages | None = None, /, **fields: Any) -> RequestPlan:
    """Of a body with one question, unless ``fields`` say otherwise."""
    given = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1000, **fields}
    return (api or dialect()).plan(json.dumps(given).encode())


def prompt(api: Messages | None = None, /, **fields: Any) -> str:
    [text] = plan(api, **fields).prompts
    assert isinstance(text, str)
    return text


def counted(counter: MessagesTokenCounter, **fields: Any) -> str:
    return counter.prompt(json.dumps(fields).encode(), NO_INFO, None).prompt


def tokens_of(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, False)


def streamed(
    plan: RequestPlan, parts: Sequence[Sequence[int]], finish: FinishReason = FinishReason.EOS
) -> list[dict[str, Any]]:
    """The events of a reply whose tokens come in ``parts``, one row each."""
    events: list[dict[str, Any]] = []

    def run() -> None:
        desk = Desk(tables())
        _, sink = desk.streamed(plan, format=dialect().reply_format(plan, "r"))
        desk.deliver(desk.rows(0, parts, finish))
        assert sink.ended == "finish"
        events.extend(read_events(sink))

    in_loop(run)
    return events


def read_events(sink: MemorySink) -> list[dict[str, Any]]:
    """The events of a stream, whose names are checked against their data."""
    events = []
    for block in sink.lines():
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def collected(
    plan: RequestPlan, tokens: Sequence[int], finish: FinishReason = FinishReason.EOS
) -> dict[str, Any]:
    """The whole reply."""
    bodies: list[dict[str, Any]] = []

    def run() -> None:
        desk = Desk(tables())
        reply = desk.collected(plan, format=dialect().reply_format(plan, "r"))
        desk.deliver(desk.rows(0, [tokens], finish))
        bodies.append(json.loads(b"".join(reply.format.whole(reply))))

    in_loop(run)
    return bodies[0]


def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of the events. Asserts their order."""
    first, *rest = events
    assert first["type"] == "message_start"
    message: dict[str, Any] = first["message"]
    assert message["stop_reason"] is None
    texts: list[str] = []
    is_open = False
    for event in rest:
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open = True
            texts.clear()
        elif kind == "content_block_delta":
            assert is_open
            assert event["index"] == len(message["content"]) - 1
            _apply(message["content"][-1], event["delta"], texts)
        elif kind == "content_block_stop":
            assert is_open
            is_open = False
            if message["content"][-1]["type"] == "tool_use" and texts:
                message["content"][-1]["input"] = json.loads("".join(texts))
        elif kind == "message_delta":
            assert not is_open
            message |= event["delta"]
            message["usage"] |= event["usage"]
    assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]
    return message


_DELTAS = {
    "text": ("text_delta",),
    "thinking": ("thinking_delta", "signature_delta"),
    "tool_use": ("input_json_delta",),
}


def _apply(block: dict[str, Any], delta: dict[str, Any], texts: list[str]) -> None:
    kind = delta["type"]
    assert kind in _DELTAS[block["type"]]
    if kind == "input_json_delta":
        texts.append(delta["partial_json"])
        return
    field = kind.removesuffix("_delta")
    assert delta[field], "a delta without text"
    block[field] += delta[field]
