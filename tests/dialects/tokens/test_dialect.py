"""Plans of ``/inference/v1/generate``."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.tokens.dialect import TokensInOut
from penstock.generation.dialect import RequestInfo
from penstock.generation.model_info import SamplingDefaults
from tests.generation.planning import error_of, tiny_input_processor

DIALECT = TokensInOut(ServeConfig(), tiny_input_processor())


def tokens_body(sampling: dict[str, Any] | None = None, **fields: Any) -> bytes:
    return json.dumps({"token_ids": [1, 2, 3], "sampling_params": sampling or {}} | fields).encode()


def test_ids_are_the_prompt_and_the_context_limits_the_output() -> None:
    plan = DIALECT.plan(tokens_body())
    assert plan.prompts == [np.array([1, 2, 3], "<i4").tobytes()]
    assert (plan.max_tokens, plan.sampling(3).max_tokens) == (None, 2045)
    assert (plan.stream, plan.return_token_ids, plan.logprobs) == (False, False, -1)


def test_long_prompts_are_read_as_columns() -> None:
    ids = list(range(2000))
    plan = DIALECT.plan(tokens_body(token_ids=ids))
    assert plan.prompts == [np.array(ids, "<i4").tobytes()]


def test_what_is_absent_is_vllms_default_not_the_models() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    dialect = TokensInOut(ServeConfig(), tiny_input_processor(defaults=defaults))
    base = dialect.plan(tokens_body()).base
    assert (base.temperature, base.top_p, base.top_k, base.min_p, base.repetition_penalty) == (1, 1, 0, 0, 1)
    assert dialect.plan(tokens_body({"temperature": None, "top_k": 5})).base.top_k == 5


def test_sampling_parameters_are_taken_over() -> None:
    sampling = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["a", "b", "c", "d", "e"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "logprobs": 2,
        "logit_bias": {"5": 1},
        "output_kind": 2,
        "skip_clone": False,
        "detokenize": True,
    }
    plan = DIALECT.plan(tokens_body(sampling, stream=True, priority=4, cache_salt="x", model="tiny-llama"))
    base = plan.base
    assert (base.temperature, base.top_p, base.top_k, base.min_p, base.seed) == (0.5, 0.9, 7, 0.1, 3)
    assert (base.max_tokens, base.min_tokens, base.stop_token_ids, base.logprobs) == (9, 2, (4,), 2)
    assert (base.ignore_eos, base.logit_bias, plan.stop) == (True, {5: 1}, ("a", "b", "c", "d", "e"))
    assert (plan.n, plan.stream, plan.priority, plan.cache_salt, plan.logprobs) == (2, True, 4, "x", 2)


def test_experts_are_asked_for() -> None:
    assert DIALECT.plan(tokens_body(return_routed_experts=True)).base.routed_experts
    assert not DIALECT.plan(tokens_body()).base.routed_experts


def test_max_tokens_beyond_the_context_is_no_error() -> None:
    assert DIALECT.plan(tokens_body({"max_tokens": 1 << 20})).sampling(3).max_tokens == 2045


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [16384]}, "token_ids"),
        ({"token_ids": [-1]}, "body.token_ids.0"),
        ({"token_ids": [[1, 2]]}, "body.token_ids.0"),
        ({"token_ids": [list(range(2000))]}, "body.token_ids.0"),
        ({"token_ids": "abc"}, "body.token_ids"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        (
            {"sampling_params": {"structured_outputs": {"json": "x"}}},
            "sampling_params.structured_outputs.json",
        ),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "sampling_params.extra_args"),
        ({"sampling_params": {"logprob_token_ids": [16384]}}, "sampling_params.logprob_token_ids"),
        ({"sampling_params": {"logprob_token_ids": [1] * 1025}}, "sampling_params.logprob_token_ids"),
        ({"sampling_params": {"stop": "a", "detokenize": False}}, "sampling_params.detokenize"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "sampling_params.prompt_logprobs"),
        ({"return_routed_experts": True, "stream": True}, "return_routed_experts"),
        ({"features": {"mm_hashes": {}, "mm_placeholders": {}}}, "features"),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts"),
        ({"ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ({"output_mode": "images"}, "output_mode"),
        ({"output_mode": "text", "sampling_params": {"detokenize": False}}, "sampling_params.detokenize"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = error_of(DIALECT.plan, tokens_body(**fields))
    assert error.param == param
    assert error.message


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("max_new_tokens", 16, "max_tokens"),
        ("max_completion_tokens", 16, "max_tokens"),
        ("min_new_tokens", 1, "min_tokens"),
        ("sampling_seed", 1, "seed"),
        ("no_stop_trim", True, "include_stop_str_in_output"),
        ("regex", "a", 'structured_outputs: {"regex": …}'),
        ("guided_json", {}, 'structured_outputs: {"json": …}'),
    ],
)
def test_names_of_other_apis_are_refused_with_the_own_one(field: str, value: Any, name: str) -> None:
    error = error_of(DIALECT.plan, tokens_body({field: value}))
    assert (error.status, error.param) == (400, f"sampling_params.{field}")
    assert error.message == f"{field} is not supported by this server: write {name}."
    assert DIALECT.plan(tokens_body({field: None})).max_tokens is None


def test_listed_logprobs_take_the_place_of_the_likeliest() -> None:
    plan = DIALECT.plan(tokens_body({"logprob_token_ids": [7, 5]}))
    assert (plan.logprobs, plan.base.logprobs, plan.base.logprob_token_ids) == (2, 2, (7, 5))
    assert DIALECT.plan(tokens_body({"logprob_token_ids": [7, 5], "logprobs": 2})).logprobs == 2
    error = error_of(DIALECT.plan, tokens_body({"logprob_token_ids": [7, 5], "logprobs": 1}))
    assert error.param == "sampling_params.logprobs"


def test_a_constraint_waits_for_the_end_of_reasoning() -> None:
    outputs = {"structured_outputs": {"regex": "[0-9]+"}}
    plan = DIALECT.plan(tokens_body(outputs))
    assert plan.constraint is not None
    assert plan.constraint.field == "sampling_params.structured_outputs.regex"
    assert plan.format is None
    ended = DIALECT.plan(tokens_body(outputs, reasoning_ended=True))
    assert ended.constraint is not None
    assert ended.constraint.reasoning == ""


def test_ids_of_replies_are_the_requests() -> None:
    plan = DIALECT.plan(tokens_body(request_id="mine"))
    assert DIALECT.reply_format(plan, "made").id == "generate-tokens-mine"
    plan = DIALECT.plan(tokens_body(request_id="mine"), RequestInfo("headers"))
    assert DIALECT.reply_format(plan, "made").id == "generate-tokens-headers"
    assert DIALECT.reply_format(DIALECT.plan(tokens_body()), "made").id == "generate-tokens-made"
