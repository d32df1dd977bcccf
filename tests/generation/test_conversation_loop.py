"""The loop of a conversation: what a model writes in its own format comes back in the next prompt.

A model spells calls in its format, for a template that does not know calls; the reply has them, the client
sends them back with results, and the template renders the history: three turns in every format and every API.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.messages.dialect import Messages
from penstock.dialects.responses.dialect import Responses
from penstock.generation.parsers.formats import TOOL_FORMATS
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.rendered_reply import ReplyRenderer
from penstock.generation.replies.reply import TextTables
from penstock.wire.frames import FinishReason
from tests.generation.planning import tiny_input_processor, tiny_tokenizer
from tests.generation.replying import Desk, tables_of

Arguments = dict[str, Any]
Calls = list[tuple[str, Arguments]]
WRITE = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line": {"type": "integer"},
        "tags": {"type": "array"},
        "deep": {"type": "object"},
    },
}
SCHEMAS: dict[str, Any] = {"write": WRITE, "now": {"type": "object", "properties": {}}}
TURNS: tuple[Calls, ...] = (
    [("write", {"path": 'a "quoted" ü.py', "line": 12, "tags": ["x", "}", {"n": None}]}), ("now", {})],
    [("write", {"path": "two\nlines \\ of 😀 <b>&</b> it's", "deep": {"k": [True, {"n": 1.5}], "l": {}}})],
    [("now", {}), ("write", {"path": "{[(", "line": -3})],
)


TEMPLATE = ChatTemplate(
    {
        "default": "{%- for message in messages %}<|{{ message.role }}|>"
        "{% if message.role == 'assistant' %}{% if message.reasoning_content %}"
        "<think>{{ message.reasoning_content }}</think>{% endif %}{% endif %}"
        "{{ message.content or '' }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    },
    {},
)
"""Of a model whose template does not know calls."""


HARMONY = ChatTemplate(
    {
        "default": "{%- for message in messages %}{% if message.role == 'assistant' %}"
        "{% if message.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>"
        "{{ message.reasoning_content }}<|end|>{% endif %}"
        "{% if message.content %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>"
        "{% endif %}{% for c in message.tool_calls or [] %}"
        "<|start|>assistant to=functions.{{ c.function.name }}"
        "<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
        "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    },
    {},
)
OTHER = {"minimax_m3", "functionary_v32", "glm4"}
"""Formats that are not spelled without a template: their own tests have outputs of their models."""
BARE = {name for name, section in TOOL_FORMATS.items() if not section.opens}
"""Formats in which a call begins the output."""
FORMATS = [*(name for name in TOOL_FORMATS if name not in OTHER), "openai"]


@cache
def tables() -> TextTables:
    return tables_of(tiny_tokenizer().raw)


class Loop:
    """A server with a model of one format, and a client of one API."""

    def __init__(self, format: str, api: str) -> None:
        config = ServeConfig(
            tool_call_parser=format, reasoning_parser="openai_gptoss" if format == "openai" else "think"
        )
        template = HARMONY if format == "openai" else TEMPLATE
        self.processor = tiny_input_processor(config, template, names=("m",), max_model_len=100_000)
        self.renderer = ReplyRenderer(template, self.processor.output_format)
        self.dialect: Any = {"chat": ChatCompletions, "responses": Responses, "messages": Messages}[api](
            config, self.processor
        )
        self.history: list[Any] = [{"role": "user", "content": "q-begin"}]
        self.api = api

    def body(self) -> bytes:
        tools: list[dict[str, Any]] = [{"name": name, "parameters": each} for name, each in SCHEMAS.items()]
        fields: dict[str, Any] = {"messages": self.history}
        match self.api:
            case "chat":
                fields["tools"] = [{"type": "function", "function": tool} for tool in tools]
            case "responses":
                shown = [{"type": "function", **tool} for tool in tools]
                fields = {"input": self.history, "tools": shown, "store": False}
            case _:
                fields["tools"] = [{"name": t["name"], "input_schema": t["parameters"]} for t in tools]
                fields |= {"max_tokens": 5000, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        return json.dumps(fields).encode()

    def turn(self, text: str, reasoning: str, calls: Calls) -> tuple[str, dict[str, Any]]:
        """The model replies. Returns its output, and the reply."""
        output = self.renderer.outputs(text, reasoning, calls)[0]
        plan = self.dialect.plan(self.body())

        async def run() -> Any:
            desk = Desk(tables())
            reply = desk.collected(plan, format=self.dialect.reply_format(plan, "r"))
            tokens = [*tiny_tokenizer().encode(output, False), 1]
            rows = [tokens[at : at + 64] for at in range(0, len(tokens), 64)]
            desk.deliver(desk.rows(0, rows, FinishReason.EOS))
            assert reply.done.result() is None
            reply.format.keep(reply)
            return json.loads(b"".join(reply.format.whole(reply)))

        return output, asyncio.run(run())

    def prompt(self) -> str:
        [prompt] = self.dialect.plan(self.body()).prompts
        assert isinstance(prompt, str)
        return prompt

    def calls_of(self, reply: dict[str, Any]) -> Calls:
        return READ[self.api](reply)

    def send_back(self, reply: dict[str, Any], results: list[str]) -> None:
        ANSWER[self.api](self.history, reply, results)


def chat_calls(reply: dict[str, Any]) -> Calls:
    calls = reply["choices"][0]["message"].get("tool_calls") or ()
    return [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls]


def chat_answer(history: list[Any], reply: dict[str, Any], results: list[str]) -> None:
    message = reply["choices"][0]["message"]
    history.append(message)
    for call, result in zip(message["tool_calls"], results, strict=True):
        history.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def response_calls(reply: dict[str, Any]) -> Calls:
    items = [item for item in reply["output"] if item["type"] == "function_call"]
    return [(item["name"], json.loads(item["arguments"])) for item in items]


def response_answer(history: list[Any], reply: dict[str, Any], results: list[str]) -> None:
    history += reply["output"]
    calls = [item for item in reply["output"] if item["type"] == "function_call"]
    for call, result in zip(calls, results, strict=True):
        history.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})


def message_calls(reply: dict[str, Any]) -> Calls:
    return [(block["name"], block["input"]) for block in reply["content"] if block["type"] == "tool_use"]


def message_answer(history: list[Any], reply: dict[str, Any], results: list[str]) -> None:
    history.append({"role": "assistant", "content": reply["content"]})
    used = [block for block in reply["content"] if block["type"] == "tool_use"]
    given = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": result}
        for block, result in zip(used, results, strict=True)
    ]
    history.append({"role": "user", "content": given})


READ: dict[str, Callable[[dict[str, Any]], Calls]] = {
    "chat": chat_calls,
    "responses": response_calls,
    "messages": message_calls,
}
ANSWER: dict[str, Callable[[list[Any], dict[str, Any], list[str]], None]] = {
    "chat": chat_answer,
    "responses": response_answer,
    "messages": message_answer,
}


def without_numbers(text: str) -> str:
    """Without those of calls, which count over the conversation."""
    return re.sub(r'(functions\.\w+:|"tool_call_id": ")\d+', r"\1", text)


@pytest.mark.parametrize("api", READ)
@pytest.mark.parametrize("format", FORMATS)
def test_what_a_model_has_written_is_in_its_next_prompt(format: str, api: str) -> None:
    loop = Loop(format, api)
    written: list[str] = ["q-begin"]
    for number, calls in enumerate(TURNS):
        text = "" if format in BARE or format == "openai" else f"said-{number}"
        thought = f"thought-{number}"
        output, reply = loop.turn(text, thought, calls)
        assert loop.calls_of(reply) == calls, output
        results = [f"result-{number}-{place}" for place in range(len(calls))]
        loop.send_back(reply, results)
        prompt = loop.prompt()
        start = output.index(text) if text else output.index(thought) + len(thought)
        spelled = output[start:].removeprefix("</think>")
        assert all(name in spelled for name, _ in calls)
        written += [thought, spelled, *results]
        for part in written:
            assert without_numbers(part).strip() in without_numbers(prompt), (part, prompt)
