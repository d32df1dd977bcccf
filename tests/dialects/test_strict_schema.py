"""Replies and requests with --strict-schema: as OpenAI's schemas have them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.chat.reply import ChatReply
from penstock.dialects.completions.dialect import Completions
from penstock.dialects.completions.reply import CompletionReply
from penstock.dialects.openai_reply import OpenAIReply
from penstock.dialects.tokens.derender import DerenderChat
from penstock.dialects.tokens.dialect import TokensInOut
from penstock.dialects.tokens.render import Render
from penstock.http.errors import ApiError, encode_json
from penstock.wire.frames import FinishReason
from tests.dialects.messages import serving
from tests.dialects.responses.test_plans import make_dialect
from tests.generation.planning import body, chat_body, planners, tiny_input_processor, tiny_tokenizer
from tests.generation.replying import Desk, in_loop, tables_of

LENIENT, STRICT = planners(), planners(ServeConfig(strict_schema=True))
HAVE_NULLS = {"content", "refusal", "logprobs"}


def whole(kind: type[OpenAIReply], *, strict: bool) -> dict[str, Any]:
    bodies: list[dict[str, Any]] = []
    chat = kind is ChatReply
    fields = {"max_tokens": 9, "model": "tiny-llama"}
    plan = STRICT.chat(chat_body(**fields)) if chat else STRICT.completion(body(**fields))

    def run() -> None:
        desk = Desk(tables_of(tiny_tokenizer().raw))
        reply = desk.collected(plan, format=kind("r", "m", "assistant", strict=strict))
        desk.deliver(desk.rows(0, [tiny_tokenizer().encode("Hi", False)], FinishReason.EOS))
        bodies.append(json.loads(b"".join(reply.format.whole(reply))))

    in_loop(run)
    return bodies[0]


def nulls(value: Any, name: str = "") -> set[str]:
    if isinstance(value, dict):
        return {each for key, inner in value.items() for each in nulls(inner, key)}
    if isinstance(value, list):
        return {each for inner in value for each in nulls(inner, name)}
    return {name} if value is None else set()


@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
def test_nulls_are_left_out_where_no_schema_requires_them(kind: type[OpenAIReply]) -> None:
    lenient, strict = whole(kind, strict=False), whole(kind, strict=True)
    assert nulls(lenient) > HAVE_NULLS & nulls(lenient)
    assert nulls(strict) <= HAVE_NULLS
    [choice] = strict["choices"]
    assert choice["logprobs"] is None
    if kind is ChatReply:
        assert (choice["message"]["refusal"], choice["message"]["annotations"]) == (None, [])
    assert (
        strict["usage"].items()
        <= (lenient["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}).items()
    )


@pytest.mark.parametrize("api", ["completion", "chat", "responses", "messages"])
def test_a_request_names_its_model(api: str) -> None:
    config: Any = {"strict_schema": True}
    plan, fields = {
        "completion": (STRICT.completion, {"prompt": "a"}),
        "chat": (STRICT.chat, {"messages": [{"role": "user", "content": "a"}]}),
        "responses": (make_dialect(**config).plan, {"input": "a"}),
        "messages": (
            serving.make_dialect(**config).plan,
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        ),
    }[api]
    model = "tiny-llama" if api in ("completion", "chat") else "m"
    plan(json.dumps({"model": model, **fields}).encode())
    with pytest.raises(ApiError) as caught:
        plan(json.dumps(fields).encode())
    assert (caught.value.status, caught.value.param) == (400, "model")
    assert model in caught.value.message


def test_routes_of_no_schema_take_the_first_model() -> None:
    config = ServeConfig(strict_schema=True)
    processor = tiny_input_processor(config)
    chat, completions = ChatCompletions(config, processor), Completions(config, processor)
    generated: Any = {"choices": [{"index": 0, "token_ids": [5], "finish_reason": "stop"}]}
    asked: Any = {"messages": [{"role": "user", "content": "a"}]}
    TokensInOut(config, processor).plan(encode_json({"token_ids": [1], "sampling_params": {}}))
    Render(chat).plan(encode_json(asked))
    Render(completions).plan(encode_json({"prompt": "a"}))
    DerenderChat(chat, processor).plan(encode_json({"generate_response": generated, "chat_request": asked}))
    STRICT.tokenize(encode_json({"prompt": "a"}))
    STRICT.detokenize(encode_json({"tokens": [5]}))
