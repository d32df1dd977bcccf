"""Plans of SGLang's ``/generate``."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.sglang.dialect import SglangGenerate
from penstock.generation.model_info import SamplingDefaults
from tests.generation.planning import error_of, tiny_input_processor

DIALECT = SglangGenerate(ServeConfig(), tiny_input_processor())


def sglang_body(sampling: Any = None, **fields: Any) -> bytes:
    prompt = {} if "text" in fields or "input_ids" in fields else {"input_ids": [1, 2, 3]}
    return json.dumps(prompt | {"sampling_params": sampling or {}} | fields).encode()


def test_defaults_are_sglangs() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    dialect = SglangGenerate(ServeConfig(), tiny_input_processor(defaults=defaults))
    plan = dialect.plan(sglang_body())
    base = plan.base
    assert (base.temperature, base.top_p, base.top_k, base.min_p, base.repetition_penalty) == (1, 1, 0, 0, 1)
    assert (plan.max_tokens, plan.logprobs, plan.prompt_logprobs) == (128, -1, -1)
    assert plan.prompts == [np.array([1, 2, 3], "<i4").tobytes()]
    assert dialect.plan(sglang_body({"max_new_tokens": None})).sampling(3).max_tokens == 2045
    assert dialect.plan(sglang_body({"max_new_tokens": 0})).max_tokens == 0


def test_sampling_parameters_have_sglangs_names() -> None:
    sampling = {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 1 << 30,
        "min_p": 0.1,
        "sampling_seed": 3,
        "n": 2,
        "stop": ["a"],
        "stop_token_ids": [4],
        "no_stop_trim": True,
        "ignore_eos": True,
        "logit_bias": {"5": 1},
        "skip_special_tokens": False,
        "regex": "[0-9]+",
    }
    plan = DIALECT.plan(sglang_body(sampling, priority=4, cache_salt="a", extra_key="b", session_id="s"))
    base = plan.base
    assert (base.max_tokens, base.min_tokens, base.temperature, base.top_p, base.top_k) == (9, 2, 0.5, 0.9, 0)
    assert (base.min_p, base.seed, base.stop_token_ids, base.ignore_eos) == (0.1, 3, (4,), True)
    assert (plan.n, plan.stop, plan.include_stop_str, plan.skip_special_tokens) == (2, ("a",), True, False)
    assert (plan.priority, plan.cache_salt, plan.session) == (-4, "a\nb", "s")
    assert plan.constraint is not None
    assert plan.constraint.field == "sampling_params.regex"


def test_prompts_are_texts_or_ids_one_or_several() -> None:
    for fields, prompts, listed in (
        ({"text": "a"}, ("a",), False),
        ({"text": ["a"]}, ("a",), True),
        ({"input_ids": [1, 2]}, ([1, 2],), False),
        ({"input_ids": [[1, 2]]}, ([1, 2],), True),
        ({"input_ids": [[1], [2, 3]]}, ([1], [2, 3]), True),
        ({"input_ids": [*range(2000)]}, ([*range(2000)],), False),
        ({"input_ids": [[*range(2000)]]}, ([*range(2000)],), True),
    ):
        plan = DIALECT.plan(sglang_body(**fields))
        made = [
            each if isinstance(each, str) else np.frombuffer(each, "<i4").tolist() for each in plan.prompts
        ]
        assert (made, plan.dialect_fields.listed) == (list(prompts), listed)


def test_logprobs_are_of_the_output_and_of_the_prompt_from_a_place() -> None:
    plan = DIALECT.plan(sglang_body(return_logprob=True))
    assert (plan.logprobs, plan.prompt_logprobs) == (0, -1)
    plan = DIALECT.plan(sglang_body(return_logprob=True, top_logprobs_num=3, logprob_start_len=1))
    assert (plan.logprobs, plan.prompt_logprobs, plan.base.prompt_logprobs) == (3, 3, 3)
    plan = DIALECT.plan(sglang_body(return_logprob=[True], token_ids_logprob=[[7, 5]]))
    assert (plan.logprobs, plan.base.logprob_token_ids) == (2, (7, 5))
    assert DIALECT.plan(sglang_body(top_logprobs_num=3, token_ids_logprob=[7])).logprobs == -1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": None, "input_ids": None}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "body.input_ids.0"),
        ({"input_ids": [16384]}, "input_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"min_new_tokens": 200}}, "sampling_params.min_new_tokens"),
        ({"sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"sampling_params": {"beam_width": 2}}, "sampling_params.beam_width"),
        ({"sampling_params": {"json_schema": "x"}}, "sampling_params.json_schema"),
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, None),
        ({"sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params"),
        ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": 0, "stream": True}, "logprob_start_len"),
        ({"return_logprob": True, "token_ids_logprob": [16384]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [1, [2]]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [1], "top_logprobs_num": 1}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [1], "logprob_start_len": 0}, "token_ids_logprob"),
        ({"image_data": "x"}, "image_data"),
        ({"session_params": {"id": "x"}}, "session_params"),
        ({"routed_dp_rank": 0}, "routed_dp_rank"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"lora_path": "none"}, "lora_path"),
        ({"rid": ["a", "b"]}, "rid"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"sampling_params": {"json_schema": "{}", "regex": "a"}}, "json_schema and regex"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "rid"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    error = error_of(DIALECT.plan, sglang_body(**fields))
    assert param is None or error.param == param
    assert error.message


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"sampling_params": []}, "sampling_params", "sampling_params is a list of 0 values, not of one"),
        ({"sampling_params": [{}, {}]}, "sampling_params", "a list of 2 values, not of one, or no list, for"),
        ({"rid": ["a", "b"]}, "rid", "rid is a list of 2 values, not of one, or no list, for one prompt."),
        ({"text": ["a", "b"], "lora_path": ["m"]}, "lora_path", "not of one for each of 2 prompts."),
        ({"input_ids": [[1]] * 5000}, "input_ids", "input_ids: 5000 prompts with n=1 are 5000 outputs"),
        ({"text": ["a"] * 3000, "sampling_params": {"n": 2}}, "text", "text: 3000 prompts with n=2 are 6000"),
        (
            {"sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens",
            "max_new_tokens must be at least 0, or null, got -1.",
        ),
        (
            {"sampling_params": {"min_new_tokens": 200}},
            "sampling_params.min_new_tokens",
            "min_new_tokens must be less than or equal to max_new_tokens=128, got 200.",
        ),
        (
            {"sampling_params": {"max_tokens": 16}},
            "sampling_params.max_tokens",
            "max_tokens is not supported by this server: write max_new_tokens.",
        ),
        ({"sampling_params": {"seed": 1}}, "sampling_params.seed", ": write sampling_seed."),
        ({"sampling_params": {"structured_outputs": {}}}, None, ": write json_schema, regex or ebnf."),
        ({"max_new_tokens": 16}, "max_new_tokens", ": write sampling_params.max_new_tokens."),
    ],
)
def test_errors_have_this_apis_names(fields: dict[str, Any], param: str | None, message: str) -> None:
    error = error_of(DIALECT.plan, sglang_body(**fields))
    assert param is None or error.param == param
    assert message in error.message


def test_events_that_repeat_everything_are_bounded() -> None:
    dialect = SglangGenerate(ServeConfig(max_stream_backlog=1 << 16), tiny_input_processor())
    assert dialect.plan(sglang_body({"max_new_tokens": 1000}, stream=True)).stream
    assert error_of(dialect.plan, sglang_body({"max_new_tokens": 1025}, stream=True)).param == "stream"
    scored = sglang_body({"max_new_tokens": 1000}, stream=True, return_logprob=True)
    assert error_of(dialect.plan, scored).param == "stream"
    incremental = {"stream": True, "incremental_streaming_output": True, "return_logprob": True}
    assert dialect.plan(sglang_body({"max_new_tokens": 2000}, **incremental)).stream
