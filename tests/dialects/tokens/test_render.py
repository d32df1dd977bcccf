"""The render routes: a rendered request has the plan of the request that it was made from."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.completions.dialect import Completions
from penstock.dialects.tokens.dialect import TokensInOut
from penstock.dialects.tokens.render import Render
from penstock.generation.model_info import SamplingDefaults
from penstock.generation.replies.reply import Prompt
from tests.generation.planning import body, chat_body, error_of, tiny_input_processor, tiny_tokenizer
from tests.generation.replying import Desk, tables_of

CONFIG = ServeConfig()
DEFAULTS = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
PROCESSOR = tiny_input_processor(defaults=DEFAULTS)
CHAT, COMPLETIONS = ChatCompletions(CONFIG, PROCESSOR), Completions(CONFIG, PROCESSOR)
GENERATE = TokensInOut(CONFIG, PROCESSOR)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def rendered(render: Render, made: bytes) -> Any:
    plan = render.plan(made)
    texts = [each if isinstance(each, str) else None for each in plan.prompts]
    prompts = [
        Prompt(*tiny_tokenizer().encode_bytes(text, plan.add_special_tokens)) for text in texts if text
    ]
    context = Desk(tables_of(tiny_tokenizer().raw)).context
    return json.loads(b"".join(render.rendered(plan, prompts, "r", context)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 7, "seed": 5, "temperature": 0.3, "top_k": 0, "n": 2, "stop": ["a"]},
        {"max_tokens": 7, "seed": 5, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [5]},
        {"seed": 5, "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5},
        {"seed": 5, "logit_bias": {"5": 7}, "allowed_token_ids": [5, 6, 7], "bad_words": ["word"]},
        {"seed": 5, "logprob_token_ids": [4, 3], "prompt_logprobs": 2, "logprobs": 1},
        {"seed": 5, "stream": True, "stream_options": {"include_usage": True}, "priority": 3},
        {"seed": 5, "structured_outputs": {"regex": "[0-9]+"}, "cache_salt": "x"},
        {"seed": 5, "response_format": {"type": "json_object"}},
    ],
)
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_the_rendered_request_has_the_same_plan(api: str, fields: dict[str, Any]) -> None:
    chat = api == "chat"
    dialect: ChatCompletions | Completions = CHAT if chat else COMPLETIONS
    if chat and "logprobs" in fields:
        fields = fields | {"logprobs": True}
    made = chat_body(**fields) if chat else body(**fields)
    plan = dialect.plan(made)
    request = rendered(Render(dialect), made)
    if not chat:
        [request] = request
    assert request["request_id"].startswith("chatcmpl-" if chat else "cmpl-")
    again = GENERATE.plan(json.dumps(request).encode())
    sampling, same = plan.sampling(len(request["token_ids"])), again.sampling(len(request["token_ids"]))
    if "seed" not in fields:
        same = msgspec.structs.replace(same, seed=sampling.seed)
    assert msgspec.structs.replace(same, grammar=None) == msgspec.structs.replace(sampling, grammar=None)
    assert (again.constraint is None) == (plan.constraint is None)
    for name in ("n", "stream", "stop", "include_stop_str", "logprobs", "prompt_logprobs", "priority"):
        assert getattr(again, name) == getattr(plan, name), name
    assert (again.cache_salt, again.include_usage) == (plan.cache_salt, plan.include_usage)


def test_a_chat_has_what_its_output_is_parsed_with() -> None:
    request = rendered(Render(CHAT), chat_body(tools=[TOOL], tool_choice="required"))
    assert request["parse_context"]["tools"][0]["function"]["name"] == "f"
    assert (request["parse_context"]["tool_choice"], request["reasoning_ended"]) == ("required", True)
    schema = request["sampling_params"]["structured_outputs"]["json"]
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert "x-guidance" not in schema
    assert GENERATE.plan(json.dumps(request).encode()).constraint is not None


def test_several_prompts_are_several_requests() -> None:
    first, second = rendered(Render(COMPLETIONS), body(prompt=["one", "two"], request_id="mine"))
    assert (first["request_id"], second["request_id"]) == ("cmpl-mine-0", "cmpl-mine-1")
    assert first["token_ids"] == tiny_tokenizer().encode("one", True)


@pytest.mark.parametrize("field", ["best_of", "echo", "return_token_offsets"])
def test_what_has_no_counterpart_is_refused_by_name(field: str) -> None:
    value = 2 if field == "best_of" else True
    assert error_of(Render(COMPLETIONS).plan, body(**{field: value})).param == field
