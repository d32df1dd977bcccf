"""Plans and replies of /v1/embeddings, without an engine and without a connection."""

from __future__ import annotations

import base64
import json
from functools import cache

import numpy as np
import pytest

from penstock.dialects.embeddings.dialect import Embeddings
from penstock.generation.dialect import RequestInfo
from penstock.generation.pooling.plan import PoolingPlan
from penstock.generation.pooling.request_fields import MAX_INPUTS
from penstock.http.errors import ApiError
from tests.generation.pooling.planning import (
    EMBED,
    TEXT_ALONE,
    json_of,
    plan_of,
    pooled_of,
    pooling_processor,
)


@cache
def embeddings() -> Embeddings:
    return Embeddings(pooling_processor())


def planned(**fields: object) -> PoolingPlan:
    return plan_of(embeddings(), **fields)


def refusal(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        planned(**fields)
    assert caught.value.status == 400
    return caught.value


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def test_the_four_forms_of_inputs() -> None:
    assert list(planned(input="a text").inputs) == ["a text"]
    assert list(planned(input="").inputs) == [""]
    assert list(planned(input=["a", ""]).inputs) == ["a", ""]
    assert list(planned(input=[1, 2, 3]).inputs) == [ids(1, 2, 3)]
    assert list(planned(input=[[1, 2], [3]]).inputs) == [ids(1, 2), ids(3)]


def test_many_ids_never_become_objects() -> None:
    rows = [list(range(100 * row, 100 * row + 100)) for row in range(50)]
    assert list(planned(input=rows).inputs) == [ids(*row) for row in rows]


def test_defaults() -> None:
    plan = planned(input="a")
    assert (plan.api, plan.model, plan.task, plan.field) == ("embeddings", "tiny-llama", EMBED, "input")
    assert (plan.truncate, plan.dimensions, plan.normalize, plan.add_special_tokens) == (None, 0, True, True)


def test_everything_that_can_be_asked_for() -> None:
    plan = planned(
        input="a",
        model="tiny-llama",
        dimensions=2,
        truncate_prompt_tokens=-1,
        truncation_side="left",
        use_activation=False,
        add_special_tokens=False,
        priority=-3,
        request_id="r1",
        user="u",
        encoding_format="base64",
    )
    assert (plan.dimensions, plan.truncate, plan.truncate_left) == (2, 2048, True)
    assert (plan.normalize, plan.add_special_tokens) == (False, False)
    assert (plan.priority, plan.request_id) == (-3, "r1")
    assert not planned(input="a", normalize=False).normalize


def test_the_header_names_the_request() -> None:
    body = json.dumps({"input": "a", "request_id": "body"}).encode()
    assert embeddings().plan(body, RequestInfo("header")).request_id == "header"


def test_a_conversation_is_rendered() -> None:
    hello = {"role": "user", "content": "Hello"}
    plan = planned(messages=[hello])
    assert list(plan.inputs) == ["<s><|im_start|>user\nHello<|im_end|>\n"]
    assert (plan.add_special_tokens, plan.field) == (False, "messages")
    opened = planned(messages=[hello], add_generation_prompt=True)
    assert list(opened.inputs) == ["<s><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"]
    assert len(planned(messages=[[hello], [hello, hello]]).inputs) == 2


def test_prompts_of_the_model() -> None:
    api = Embeddings(
        pooling_processor(prompts={"query": "query: ", "passage": "passage: "}, default_prompt="passage")
    )
    hello = [{"role": "user", "content": "Hello"}]
    assert plan_of(api, input="a", prompt_name="query").prompt == "query: "
    assert plan_of(api, input="a").prompt == "passage: "
    assert plan_of(api, messages=hello).prompt == ""
    assert plan_of(api, messages=hello, prompt_name="query").prompt == "query: "


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({}, "input", "input must be provided"),
        ({"input": []}, "input", "at least one"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", f"input has {MAX_INPUTS + 1} inputs, at most"),
        ({"input": ["a", [1]]}, "body.input.0", "not a mix"),
        ({"input": [[1], []]}, "input", "input[1] is an empty list"),
        ({"input": [16384]}, "input", "16384 is out of vocabulary"),
        ({"input": "a", "messages": []}, "messages", "Only one of input and messages"),
        ({"messages": []}, "messages", "empty conversation"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "must be text, got a part of type image_url",
        ),
        ({"input": "a", "dimensions": 5}, "dimensions", "`dimensions` is 5, must be 1 to 4"),
        ({"input": "a", "dimensions": 0}, "dimensions", "must be 1 to 4"),
        (
            {"input": "a", "encoding_format": "int8"},
            "encoding_format",
            "must be float, base64, bytes, bytes_only",
        ),
        ({"input": "a", "truncate_prompt_tokens": 2049}, "truncate_prompt_tokens", "[1, 2048], got 2049"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1 or in"),
        ({"input": "a", "truncation_side": "up"}, "truncation_side", "must be left or right"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", "the model has: none"),
        ({"input": "a", "padding": "max_length"}, "padding", "do_not_pad"),
        ({"input": "a", "chat_template": "x"}, "chat_template", "--chat-template"),
    ],
)
def test_refusals_name_field_and_what_is_allowed(fields: dict[str, object], param: str, told: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert told in error.message


def test_a_model_that_is_not_served() -> None:
    with pytest.raises(ApiError, match="does not exist") as caught:
        planned(input="a", model="other")
    assert (caught.value.status, caught.value.param) == (404, "model")


def test_a_model_of_text_says_so() -> None:
    with pytest.raises(ApiError, match="needs a model for embed; 'tiny-llama' is one for generate") as caught:
        plan_of(Embeddings(pooling_processor(TEXT_ALONE)), input="a")
    assert (caught.value.status, caught.value.code) == (400, "task_not_supported")


def test_numbers() -> None:
    pooled = pooled_of([[0.5, -1.0], [0.1, 3e-9]], lengths=[2, 5])
    reply = json_of(embeddings().reply(planned(input=["a", "b"]), pooled, "r"))
    assert reply.pop("created") > 1_700_000_000
    assert reply == {
        "id": "embd-r",
        "object": "list",
        "model": "tiny-llama",
        "data": [
            {"index": 0, "object": "embedding", "embedding": [0.5, -1.0]},
            {"index": 1, "object": "embedding", "embedding": pytest.approx([0.1, 3e-9])},
        ],
        "usage": {"prompt_tokens": 7, "total_tokens": 7, "completion_tokens": 0},
    }


def test_base64() -> None:
    plan = planned(input="a", encoding_format="base64", request_id="own")
    reply = json_of(embeddings().reply(plan, pooled_of([[0.5, -1.0]]), "r"))
    assert reply["id"] == "embd-own"
    assert np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), "<f4").tolist() == [0.5, -1.0]
