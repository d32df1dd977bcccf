"""The derender routes: what the API itself would have replied with these tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.completions.dialect import Completions
from penstock.dialects.tokens.derender import Derender, DerenderChat, DerenderCompletions
from penstock.dialects.tokens.dialect import TokensInOut
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.wire.frames import FinishReason
from tests.dialects.tokens.test_dialect import tokens_body
from tests.generation.planning import body, chat_body, error_of, tiny_input_processor, tiny_tokenizer
from tests.generation.replying import Desk, in_loop, tables_of

CONFIG = ServeConfig()
TEMPLATE = ChatTemplate(
    {"default": "{% for m in messages %}{{ m.content }}{% endfor %}<tool_call></think>"}, {}
)
PROCESSOR = tiny_input_processor(template=TEMPLATE)
CHAT, COMPLETIONS = ChatCompletions(CONFIG, PROCESSOR), Completions(CONFIG, PROCESSOR)
OF_CHAT, OF_COMPLETIONS = DerenderChat(CHAT, PROCESSOR), DerenderCompletions(COMPLETIONS, PROCESSOR)
GENERATE = TokensInOut(CONFIG, PROCESSOR)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<think>Let me see.</think>Wait.<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
EOS = 1
BAD_USAGE = {"choices": [{"index": 0, "token_ids": [5, 6]}], "usage": {"prompt_tokens": -5}}


def tokens_of(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, False)


def replied(
    dialect: ChatCompletions | Completions | TokensInOut,
    made: bytes,
    tokens: list[int],
    finish: FinishReason,
    *,
    logprobs: bool = False,
) -> dict[str, Any]:
    """What the API replies if an engine generates these tokens."""
    desk = Desk(tables_of(tiny_tokenizer().raw))
    plan = dialect.plan(made)
    reply = desk.collected(plan, format=dialect.reply_format(plan, "r"))
    desk.deliver(desk.rows(0, [tokens], finish, logprobs=logprobs))
    made_body: dict[str, Any] = json.loads(b"".join(reply.format.whole(reply)))
    return made_body


def derendered(derender: Derender[Any], **fields: Any) -> dict[str, Any]:
    desk = Desk(tables_of(tiny_tokenizer().raw))
    plan = derender.plan(json.dumps(fields).encode())
    made: dict[str, Any] = json.loads(b"".join(derender.rendered(plan, [], "r", desk.context)))
    return made


def without_ids(reply: dict[str, Any]) -> dict[str, Any]:
    """``reply`` without what differs from one to the next."""
    for choice in reply["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            assert call.pop("id")
    return {name: value for name, value in reply.items() if name not in ("id", "created")}


@pytest.mark.parametrize(
    ("text", "end", "finish", "fields"),
    [
        ("Hello, world. ééé", [EOS], FinishReason.EOS, {}),
        ("Hello, world.", [9], FinishReason.STOP_TOKEN, {"stop_token_ids": [9]}),
        ("Hello, world.", [], FinishReason.LENGTH, {"return_token_ids": True}),
        ("Hello, world. More", [], FinishReason.NONE, {"stop": "world"}),
        ("Hello, world. More", [], FinishReason.NONE, {"stop": "world", "include_stop_str_in_output": True}),
        (CALL, [EOS], FinishReason.EOS, {"tools": [TOOL]}),
        (CALL, [EOS], FinishReason.EOS, {"tools": [TOOL], "include_reasoning": False}),
        (CALL[:-30], [], FinishReason.LENGTH, {"tools": [TOOL]}),
        ("<think>Hm", [], FinishReason.LENGTH, {}),
        ("Hello", [EOS], FinishReason.EOS, {"logprobs": True, "top_logprobs": 1}),
    ],
)
def test_a_chat_is_what_it_would_have_been(
    text: str, end: list[int], finish: FinishReason, fields: dict[str, Any]
) -> None:
    def run() -> None:
        tokens = [*tokens_of(text), *end]
        scored = "logprobs" in fields
        made = chat_body(**fields)
        known = replied(CHAT, made, tokens, finish, logprobs=scored)
        sampling = {
            name: value for name, value in fields.items() if name.startswith(("stop", "include_stop"))
        }
        sampling |= {"logprobs": 1} if scored else {}
        generated = replied(GENERATE, tokens_body(sampling), tokens, finish, logprobs=scored)
        reply = derendered(
            OF_CHAT, generate_response=generated, chat_request=json.loads(made), prompt_token_ids=[1, 2]
        )
        assert reply["id"] == generated["request_id"]
        assert without_ids(reply) == without_ids(known)

    in_loop(run)


def test_completions_have_a_choice_for_each_prompt() -> None:
    def run() -> None:
        first, second = (
            replied(GENERATE, tokens_body(), tokens_of(text), FinishReason.LENGTH)
            for text in ("one two", "three")
        )
        reply = derendered(
            OF_COMPLETIONS,
            generate_responses=[first, second],
            completion_request=json.loads(body(prompt=["a", "b"])),
            prompt_tokens=[3, 4],
        )
        assert [choice["text"] for choice in reply["choices"]] == ["one two", "three"]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1]
        assert reply["usage"]["prompt_tokens"] == 7

    in_loop(run)


def test_long_outputs_are_made_in_steps() -> None:
    def run() -> None:
        tokens = (tokens_of("word ééé ") * 200)[:2000]
        desk = Desk(tables_of(tiny_tokenizer().raw))
        generated = {"choices": [{"index": 0, "token_ids": tokens, "finish_reason": "length"}]}
        fields = {"generate_response": generated, "chat_request": json.loads(chat_body())}
        plan = OF_CHAT.plan(json.dumps(fields).encode())
        pieces = list(OF_CHAT.rendered(plan, [], "r", desk.context))
        assert pieces.count(b"") >= len(tokens) // 1024
        text = json.loads(b"".join(pieces))["choices"][0]["message"]["content"]
        assert text == tiny_tokenizer().decode(tokens)

    in_loop(run)


@pytest.mark.parametrize(
    ("choice", "fields", "param"),
    [
        ({"token_ids": None}, {}, "generate_response.choices[0].token_ids"),
        ({"token_ids": []}, {}, "generate_response.choices[0].token_ids"),
        ({"token_ids": [1] * 2049}, {}, "generate_response.choices[0].token_ids"),
        ({"token_ids": [16384]}, {}, "generate_response.choices[0].token_ids"),
        ({"finish_reason": "because"}, {}, "generate_response.choices[0].finish_reason"),
        ({"index": -1}, {}, "generate_response.choices[0].index"),
        ({"index": 1}, {}, "generate_response.choices[0].index"),
        ({}, {"generate_response": BAD_USAGE}, "body.generate_response.usage.prompt_tokens"),
        ({}, {"stream": True}, "stream"),
        ({}, {"chat_request": json.loads(chat_body(stream=True))}, "chat_request.stream"),
        ({}, {"model": "other"}, "model"),
        ({}, {"prompt_tokens": -1}, "prompt_tokens"),
        ({}, {"prompt_token_ids": [16384]}, "prompt_token_ids"),
        ({}, {"chat_request": None}, "body.chat_request"),
        ({}, {"chat_request": {"messages": [], "n": 0}}, "chat_request.messages"),
        ({}, {"chat_request": {"messages": [{"role": "user"}], "top_p": 7}}, "chat_request.top_p"),
    ],
)
def test_what_no_model_has_generated_is_refused(
    choice: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    generated = {"choices": [{"index": 0, "token_ids": [5, 6]} | choice]}
    made = {"generate_response": generated, "chat_request": json.loads(chat_body())} | fields
    assert error_of(OF_CHAT.plan, json.dumps(made).encode()).param == param


@pytest.mark.parametrize(("prompt", "count"), [("a", 2), ([5, 6], 2), (["a", "b"], 1)])
def test_there_is_one_reply_for_each_prompt(prompt: Any, count: int) -> None:
    generated = [{"choices": [{"index": 0, "token_ids": [5, 6]}]}] * count
    made = {"generate_responses": generated, "completion_request": json.loads(body(prompt=prompt))}
    error = error_of(OF_COMPLETIONS.plan, json.dumps(made).encode())
    assert (error.param, error.message) == (
        "generate_responses",
        f"generate_responses must have one reply per prompt, {3 - count}, got {count}.",
    )


def test_choices_are_in_order() -> None:
    choices = [{"index": 0, "token_ids": [5, 6]}] * 2
    made = {"generate_response": {"choices": choices}, "chat_request": json.loads(chat_body(n=2))}
    assert error_of(OF_CHAT.plan, json.dumps(made).encode()).param == "generate_response.choices[1].index"


def test_a_completion_that_would_be_streamed_is_refused() -> None:
    generated = {"choices": [{"index": 0, "token_ids": [5, 6]}]}
    made = {"generate_responses": [generated], "completion_request": json.loads(body(stream=True))}
    assert error_of(OF_COMPLETIONS.plan, json.dumps(made).encode()).param == "completion_request.stream"


def test_logprobs_that_are_asked_for_are_needed() -> None:
    generated = {"choices": [{"index": 0, "token_ids": [5, 6]}]}
    made = {"generate_response": generated, "chat_request": json.loads(chat_body(logprobs=True))}
    error = error_of(OF_CHAT.plan, json.dumps(made).encode())
    assert error.param == "generate_response.choices[0].logprobs"
