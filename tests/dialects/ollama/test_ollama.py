"""Plans and replies of Ollama's API, without an engine and without a connection."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.ollama.dialect import OllamaChat, OllamaDialect, OllamaGenerate
from penstock.dialects.ollama.models import OllamaModels
from penstock.generation.dialect import AskedModels
from penstock.generation.plan import RequestPlan
from penstock.http.errors import ApiError
from penstock.streaming.stream import StreamError
from penstock.wire.frames import FinishReason
from tests.dialects.messages.serving import processor, tables, tokens_of
from tests.generation.replying import PROMPT, Desk, in_loop

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'


@cache
def chat() -> OllamaChat:
    return OllamaChat(ServeConfig(), processor())


@cache
def generate() -> OllamaGenerate:
    return OllamaGenerate(ServeConfig(), processor())


def plan(api: OllamaDialect, **fields: Any) -> RequestPlan:
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if api is chat() else {"prompt": "Hi"}
    return api.plan(json.dumps(asked | fields).encode())


def refusal(api: OllamaDialect, **fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        plan(api, **fields)
    assert caught.value.status == 400
    [(name, message)] = json.loads(api.error_body(caught.value, "r")).items()
    assert name == "error"
    return str(message)


def lines(
    api: OllamaDialect, plan: RequestPlan, parts: list[str], finish: FinishReason = FinishReason.GRAMMAR
) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []

    def run() -> None:
        desk = Desk(tables())
        _, sink = desk.streamed(plan, format=api.reply_format(plan, "r"))
        desk.deliver(desk.rows(0, [tokens_of(part) for part in parts], finish))
        assert sink.ended == "finish"
        read.extend(map(json.loads, sink.data.decode().splitlines()))

    in_loop(run)
    return read


def whole(api: OllamaDialect, plan: RequestPlan, text: str) -> dict[str, Any]:
    bodies: list[dict[str, Any]] = []

    def run() -> None:
        desk = Desk(tables())
        reply = desk.collected(plan, format=api.reply_format(plan, "r"))
        desk.deliver(desk.rows(0, [tokens_of(text)], FinishReason.LENGTH))
        reply.format.keep(reply)
        bodies.append(json.loads(b"".join(reply.format.whole(reply))))

    in_loop(run)
    return bodies[0]


def test_a_message_is_streamed_in_lines() -> None:
    made = plan(chat(), model="m:latest")
    assert made.stream
    first, *others, last = lines(chat(), made, ["def main", "(): ", "pass"])
    assert first.keys() == {"model", "created_at", "message", "done"}
    assert (first["model"], first["message"]["role"], first["done"]) == ("m:latest", "assistant", False)
    assert "".join(each["message"]["content"] for each in (first, *others)) == "def main(): pass"
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert last["eval_count"] == len(tokens_of("def main(): pass"))
    assert last["total_duration"] >= last["prompt_eval_duration"] > 0
    assert last["load_duration"] == 0
    assert last["prompt_eval_count"] == PROMPT.length


def test_calls_come_whole_and_reasoning_apart() -> None:
    made = plan(chat(), tools=[TOOL], think=True)
    text = f"<think>Well.</think>I ask. {CALL % 'Oslo'}\n{CALL % 'Rome'}"
    read = lines(chat(), made, [text[at : at + 7] for at in range(0, len(text), 7)])
    assert "".join(each["message"].get("thinking", "") for each in read) == "Well."
    assert "".join(each["message"]["content"] for each in read).strip() == "I ask."
    calls = [call["function"] for each in read for call in each["message"].get("tool_calls", ())]
    assert calls == [
        {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}},
        {"index": 1, "name": "weather", "arguments": {"city": "Rome"}},
    ]
    assert read[-1]["done_reason"] == "stop"
    message = whole(chat(), plan(chat(), tools=[TOOL], stream=False), text)["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [
        {"city": "Oslo"},
        {"city": "Rome"},
    ]
    assert message["thinking"] == "Well."
    hidden = whole(chat(), plan(chat(), think=False, stream=False), "<think>Well.</think>Hi")
    assert hidden["message"] == {"role": "assistant", "content": "Hi"}


def test_a_prompts_reply_has_a_response() -> None:
    body = whole(generate(), plan(generate(), stream=False), "pass")
    assert (body["response"], body["done"], body["done_reason"]) == ("pass", True, "length")
    read = lines(generate(), plan(generate()), ["a", "b"])
    assert "".join(each["response"] for each in read) == "ab"


def test_a_failure_is_a_line() -> None:
    def run() -> None:
        desk, made = Desk(tables()), plan(chat())
        _, sink = desk.streamed(made, format=chat().reply_format(made, "r"))
        desk.deliver(desk.rows(0, [tokens_of("def")]))
        desk.streams.fail(0, 0, StreamError(503, "engine_died", "The engine is gone."))
        assert json.loads(sink.data.splitlines()[-1]) == {"error": "The engine is gone."}

    in_loop(run)


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"keep_alive": 0}])
@pytest.mark.parametrize("api", [chat, generate])
def test_without_a_prompt_nothing_is_generated(api: Any, fields: dict[str, Any]) -> None:
    answer = plan(api(), messages=[], prompt="", **fields).answer
    assert answer is not None
    body = json.loads(answer)
    assert (body["model"], body["done"]) == ("m", True)
    assert body["done_reason"] == ("unload" if "keep_alive" in fields else "load")
    with pytest.raises(ApiError, match="does not exist"):
        plan(api(), messages=[], prompt="", model="other")


def test_options_are_sampling_parameters() -> None:
    options = {
        "num_predict": 9,
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["a", "b", "c", "d", "e"],
        "repeat_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_ctx": 1 << 20,
        "mirostat": 0,
        "typical_p": 1.0,
    }
    made = plan(chat(), options=options, keep_alive="5m")
    base = made.base
    assert (base.max_tokens, base.temperature, base.top_k, base.seed) == (9, 0.5, 40, 3)
    assert (base.top_p, base.min_p, base.repetition_penalty) == (0.9, 0.1, 1.1)
    assert (base.presence_penalty, base.frequency_penalty, len(made.stop)) == (0.5, 0.25, 5)
    for most in (-1, -2, 0, None):
        assert plan(chat(), options={"num_predict": most}).max_tokens is None
    assert plan(chat(), options={"num_predict": 1 << 30}).sampling(3).max_tokens == 2045


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"top_p": 7}}, "options.top_p must be in"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty must be"),
        ({"options": {"stop": [""]}}, "options.stop cannot contain"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p is not supported"),
        ({"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ({"think": "hard"}, "think must be one of"),
        ({"format": "xml"}, "format must be json or a JSON schema"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role must be"),
    ],
)
def test_errors_name_fields_as_ollama_does(fields: dict[str, Any], named: str) -> None:
    assert named in refusal(chat(), **fields)


@pytest.mark.parametrize(
    "fields", [{"suffix": "b"}, {"template": "{{ .Prompt }}"}, {"context": [1]}, {"raw": True, "system": "s"}]
)
def test_what_a_prompt_cannot_have_is_refused(fields: dict[str, Any]) -> None:
    assert next(reversed(fields)) in refusal(generate(), **fields)
    assert not plan(generate(), suffix="", template="", context=[]).warning


def test_prompts_go_through_the_template_unless_raw() -> None:
    [text] = plan(generate(), system="Be kind.").prompts
    assert (
        text
        == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    raw = plan(generate(), raw=True, logprobs=True, top_logprobs=1)
    assert (raw.prompts, raw.add_special_tokens, raw.logprobs) == (["Hi"], True, 1)
    assert "<think>\n\n</think>" in str(plan(chat(), think=False).prompts[0])
    assert "<think>" not in str(plan(chat(), think="low").prompts[0])


def test_a_schema_is_enforced_as_far_as_it_can_be() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "$dynamicRef": "#x"}}}
    for format in ("json", schema):
        assert plan(chat(), format=format).constraint is not None
    assert plan(chat(), format="").constraint is None


def test_a_conversation_with_results_and_images() -> None:
    messages = [
        {"role": "user", "content": "Where?", "images": ["aGFsbG8="]},
        {
            "role": "assistant",
            "thinking": "Hm.",
            "tool_calls": [
                {"function": {"name": "weather", "arguments": {"city": "Oslo"}}},
                {"function": {"name": "clock", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_name": "clock", "content": "noon"},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
        {"role": "assistant", "content": "It is"},
    ]
    made = plan(chat(), messages=messages, tools=[TOOL])
    [text] = made.prompts
    assert isinstance(text, str)
    assert "cannot see it" in text
    assert "<think>Hm.</think>" in text
    assert text.index("noon") < text.index("rain")
    assert text.endswith("It is")  # which the output continues
    assert made.warning is not None
    assert made.warning.startswith("messages: the model reads text only")


def test_models_are_described() -> None:
    cards = {"m": {"id": "m", "created": 1000, "max_model_len": 2048}}

    def card(name: str) -> dict[str, Any]:
        return cards[name]

    def reply(path: str, **body: Any) -> Any:
        route = OllamaModels(path, processor())
        return json.loads(route.reply(AskedModels(cards, card, json.dumps(body).encode())))

    [tag] = reply("/api/tags")["models"]
    assert (tag["name"], tag["model"], tag["modified_at"]) == ("m", "m", "1970-01-01T00:16:40.000000Z")
    assert reply("/api/ps")["models"][0]["context_length"] == 2048
    assert reply("/api/version")["version"].count(".") == 2
    shown = reply("/api/show", name="m:latest")
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == 2048
    for body in ({}, {"model": 5}):
        with pytest.raises(ApiError, match="model"):
            reply("/api/show", **body)
