"""Plans of requests: defaults, what is taken over, what is refused."""

from __future__ import annotations

import json
import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.serve import ServeConfig
from penstock.dialects.chat.request_schema import ChatCompletionRequest
from penstock.dialects.completions.request_schema import CompletionRequest
from penstock.dispatch.adapter_registry import AdapterRegistry
from penstock.generation.dialect import RequestInfo
from penstock.generation.input_processor import InputProcessor
from penstock.generation.model_info import ModelInfo, SamplingDefaults
from penstock.generation.parsers.message import MessageParser
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.replies.stream_interval import StreamInterval
from penstock.wire.messages import Adapter, SamplingParams
from tests.generation.planning import (
    Planners,
    body,
    chat_body,
    error_of,
    error_or_none,
    planners,
    tiny_input_processor,
    tiny_tokenizer,
)

PLANNER = planners()


def test_defaults_of_a_completion() -> None:
    plan = PLANNER.completion(body())
    assert (plan.model, plan.prompts) == ("tiny-llama", ("def main():\n",))
    assert (plan.add_special_tokens, plan.n, plan.stream, plan.max_tokens) == (True, 1, False, 16)
    sampling = plan.sampling(5)
    assert sampling == SamplingParams(max_tokens=16, seed=sampling.seed)


def test_defaults_of_a_chat() -> None:
    plan = PLANNER.chat(chat_body())
    assert (plan.add_special_tokens, plan.role, plan.max_tokens) == (
        False,
        "assistant",
        None,
    )
    assert plan.prompts == ["<s><|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"]
    assert plan.sampling(48).max_tokens == 2000


def test_everything_a_completion_can_ask_for() -> None:
    plan = PLANNER.completion(
        body(
            model="tiny-llama",
            prompt=[[5, 6], [7]],
            max_tokens=9,
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            seed=7,
            n=2,
            echo=True,
            stop=["x", "y", "x"],
            stop_token_ids=[3],
            include_stop_str_in_output=True,
            ignore_eos=True,
            min_tokens=2,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.2,
            logit_bias={"5": 200, "6": -0.5},
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
            skip_special_tokens=False,
            add_special_tokens=False,
            return_token_ids=True,
            stream_interval=4,
            priority=-3,
            request_id="mine",
            cache_salt="salt",
            allowed_token_ids=[5, 6],
            bad_words=["main"],
            user="u",
        )
    )
    assert plan.prompts == [np.array(ids, "<i4").tobytes() for ids in ([5, 6], [7])]
    assert (plan.n, plan.stream, plan.include_usage, plan.continuous_usage, plan.echo) == (
        2,
        True,
        True,
        True,
        True,
    )
    assert (plan.stop, plan.include_stop_str) == (("x", "y"), True)
    assert (plan.skip_special_tokens, plan.add_special_tokens, plan.return_token_ids) == (False, False, True)
    assert (plan.interval, plan.priority, plan.request_id, plan.cache_salt) == (
        StreamInterval(4),
        -3,
        "mine",
        "salt",
    )
    main = tuple(tiny_tokenizer().encode("main", False))
    assert plan.sampling(2) == SamplingParams(
        max_tokens=9,
        seed=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(3,),
        logit_bias={5: 100.0, 6: -0.5},
        allowed_token_ids=(5, 6),
        bad_words=(main, tuple(tiny_tokenizer().encode(" main", False))),
        seeded=True,
    )


def test_null_means_absent() -> None:
    fields = {name: None for name in CompletionRequest.__struct_fields__ if name != "prompt"}
    plan, plain = PLANNER.completion(body(**fields)), PLANNER.completion(body())
    assert plan.sampling(1, 1).seed != plain.sampling(1, 1).seed
    plan.base = plain.base
    assert plan == plain
    fields = {name: None for name in ChatCompletionRequest.__struct_fields__ if name != "messages"}
    assert PLANNER.chat(chat_body(**fields)).prompts == PLANNER.chat(chat_body()).prompts


# -- sampling of choices


def test_choices_have_seeds_in_a_row() -> None:
    plan = PLANNER.completion(body(seed=(1 << 63) - 1, n=2))
    assert [plan.sampling(5, index).seed for index in range(2)] == [(1 << 63) - 1, 0]


def test_seeds_are_drawn_where_none_is_given() -> None:
    drawn = {
        PLANNER.completion(body(**fields)).sampling(1).seed
        for fields in ({}, {}, {"seed": -1}, {"seed": None})
    }
    assert len(drawn) == 4


def test_negative_seeds_are_repeatable() -> None:
    assert PLANNER.completion(body(seed=-5)).sampling(1).seed == (1 << 63) - 5


def test_a_chat_without_max_tokens_is_held_to_what_the_smallest_kv_cache_holds() -> None:
    processor = tiny_input_processor()
    planner = Planners(ServeConfig(), processor)
    for tokens in (0, 100_000, 512, 1024):
        processor.limit_total(tokens)
    assert planner.chat(chat_body()).sampling(48).max_tokens == 513 - 48
    assert planner.chat(chat_body(max_tokens=2000)).sampling(48).max_tokens == 2000, "the engine refuses it"
    assert error_of(planner.chat(chat_body()).sampling, 513).param == "input_tokens"
    kept = planner.chat(chat_body(truncate_prompt_tokens=-1))
    assert kept.sampling(len(kept.truncate(bytes(4 * 2000))) // 4).max_tokens == 1


def test_max_tokens_is_held_to_what_the_context_leaves() -> None:
    plan = PLANNER.completion(body(max_tokens=100))
    assert [plan.sampling(length).max_tokens for length in (1, 1948, 1949, 2047)] == [100, 100, 99, 1]
    assert error_of(plan.sampling, 2049).param == "input_tokens"


@pytest.mark.parametrize("max_tokens", [1, None])
def test_a_prompt_that_fills_the_context_leaves_no_room(max_tokens: int | None) -> None:
    error = error_of(PLANNER.completion(body(max_tokens=max_tokens)).sampling, 2048)
    assert error.param == "input_tokens"
    assert (
        "contains 2048 input tokens, which leaves no room for an output token: it may have 2047"
        in error.message
    )


def test_min_tokens_must_fit_what_the_context_leaves() -> None:
    plan = PLANNER.completion(body(max_tokens=100, min_tokens=50))
    assert plan.sampling(1998).max_tokens == 50
    assert (
        error_of(plan.sampling, 1999).message
        == "min_tokens must be less than or equal to max_tokens=49, got 50."
    )


def test_a_prompt_without_tokens_is_refused() -> None:
    assert error_of(PLANNER.completion(body()).sampling, 0).param == "prompt"


def test_echo_without_output() -> None:
    plan = PLANNER.completion(body(max_tokens=0, echo=True))
    assert (plan.max_tokens, plan.sampling(5).max_tokens) == (0, 1)
    assert error_of(PLANNER.completion, body(max_tokens=0)).param == "max_tokens"


def test_a_model_may_be_an_adapter() -> None:
    tuned = planners(adapters=(Adapter("tuned", "/tuned", digest="d"),))
    plan = tuned.chat(chat_body(model="tuned"))
    assert (plan.model, plan.adapter) == ("tuned", ("tuned", "d"))
    for fields in ({}, {"model": "tiny-llama"}):
        plan = tuned.completion(body(**fields))
        assert (plan.model, plan.adapter) == ("tiny-llama", None)
    assert "tiny-llama, tuned." in error_of(tuned.completion, body(model="other")).message


def test_params_of_a_connector_are_for_engines_that_have_one() -> None:
    params = {"do_remote_decode": True}
    moving = planners(transfers_kv=True)
    assert (
        moving.completion(body(kv_transfer_params=params)).kv_transfer_params == b'{"do_remote_decode":true}'
    )
    assert moving.chat(chat_body(kv_transfer_params={})).kv_transfer_params is None
    assert error_of(PLANNER.completion, body(kv_transfer_params=params)).param == "kv_transfer_params"


def test_defaults_of_the_model_apply() -> None:
    defaults = SamplingDefaults(
        temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1, max_new_tokens=64
    )
    with_defaults = planners(defaults=defaults)
    sampling = with_defaults.chat(chat_body(seed=1)).sampling(10)
    assert sampling == SamplingParams(64, 1, 0.6, 0.9, 20, 0.1, 1.1, seeded=True)
    assert with_defaults.completion(body(max_tokens=100, presence_penalty=1)).sampling(1).max_tokens == 64
    mine = with_defaults.chat(
        chat_body(temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1, seed=1)
    )
    assert mine.sampling(10) == SamplingParams(64, 1, seeded=True)


@pytest.mark.parametrize(("given", "used"), [(0, 0.0), (1e-6, 0.0), (0.001, 0.01), (0.02, 0.02), (5, 5.0)])
def test_small_temperatures_are_greedy_or_held(given: float, used: float) -> None:
    assert PLANNER.completion(body(temperature=given)).sampling(1).temperature == used


@pytest.mark.parametrize(("given", "used"), [(-1, 0), (0, 0), (7, 7), (16384, 0), (1 << 40, 0)])
def test_top_k_of_all_is_zero(given: int, used: int) -> None:
    assert PLANNER.completion(body(top_k=given)).sampling(1).top_k == used


# -- refusals


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": "nan"}, "temperature", "must be a finite number, got nan"),
        ({"temperature": "inf"}, "temperature", "must be a finite number, got inf"),
        ({"top_p": "nan"}, "top_p", "in (0, 1]"),
        ({"top_k": -2}, "top_k", "got -2"),
        ({"min_p": 1.5}, "min_p", "in [0, 1]"),
        ({"n": 0}, "n", "at least 1, got 0"),
        ({"n": 100_000}, "n", "at most 1024"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens must be greater than or equal to 0"),
        ({"n": 2, "temperature": 0}, "n", "greedy sampling"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "less than or equal to max_tokens=8, got 9"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "frequency_penalty must be in [-2, 2], got -2.5."),
        ({"repetition_penalty": "inf"}, "repetition_penalty", "repetition_penalty"),
        ({"stop": ""}, "stop", "empty string"),
        ({"stop": ["a", ""]}, "stop", "empty string"),
        (
            {"stop_token_ids": [16384]},
            "stop_token_ids",
            "16384, which is not in [0, 16383]: the vocabulary has 16384",
        ),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "-1, which is not in"),
        ({"logit_bias": {"16384": 1}}, "logit_bias", "16384"),
        ({"logit_bias": {"1": "nan"}}, "logit_bias", "nan"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids", "99999"),
        ({"bad_words": ["x"] * 1025}, "bad_words", "has 1025 texts, at most 1024"),
        ({"bad_words": [""]}, "bad_words", "empty string"),
        ({"bad_words": ["a b c d e f g h " * 5000]}, "bad_words", "has 80000 characters, at most 16384"),
        (
            {"allowed_token_ids": [1], "min_tokens": 1},
            "allowed_token_ids and min_tokens",
            "allowed_token_ids and min_tokens contradict each other",
        ),
        (
            {"allowed_token_ids": [1, 7, 8], "min_tokens": 1, "stop_token_ids": [8, 7, 9]},
            "allowed_token_ids and min_tokens and stop_token_ids",
            "no token at the start",
        ),
        (
            {"min_tokens": 1, "stop_token_ids": list(range(16384))},
            "min_tokens and stop_token_ids",
            "no token at the start",
        ),
        ({"logprobs": 21}, "logprobs", "greater than max allowed: 20"),
        ({"logprobs": -1}, "logprobs", "whole vocabulary"),
        ({"prompt": [[1], []]}, "prompt", "prompt[1] is an empty list"),
        ({"prompt": []}, "prompt", "at least one prompt"),
        ({"prompt": [[1], [16384]]}, "prompt", "Token id 16384 is out of vocabulary"),
        ({"prompt": ["a", [1]]}, "body.prompt.0", "not a mix"),
        ({"prompt": ""}, "prompt", "must be provided and non-empty"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or in [1, 2048], got 0"),
        ({"truncate_prompt_tokens": 2049}, "truncate_prompt_tokens", "got 2049"),
        ({"truncation_side": "top"}, "truncation_side", "left or right, got 'top'"),
        ({"stream_interval": 0}, "body.stream_interval", ">= 1"),
        ({"stream_interval_ms": 0}, "body.stream_interval_ms", ">= 1"),
        ({"stream_interval_ms": 60_001}, "body.stream_interval_ms", "<= 60000"),
        ({"stream_interval_ms": 5, "stream_interval": 2}, "stream_interval_ms", "not by both"),
        ({"cache_salt": ""}, "body.cache_salt", "length >= 1"),
    ],
)
def test_values_that_are_not_allowed(fields: dict[str, Any], param: str, message: str) -> None:
    error = error_of(PLANNER.completion, body(**fields))
    assert (error.status, error.param) == (400, param)
    assert message in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 25}, "top_logprobs"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, "messages[0].content[0]"),
    ],
)
def test_chat_values_that_are_not_allowed(fields: dict[str, Any], param: str) -> None:
    error = error_of(PLANNER.chat, chat_body(**fields))
    assert (error.status, error.param) == (400, param)


def test_max_logprobs_is_the_servers() -> None:
    few = planners(ServeConfig(max_logprobs=2))
    assert few.completion(body(logprobs=2)).logprobs == 2
    assert "max allowed: 2" in error_of(few.completion, body(logprobs=3)).message


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, -1),
        ({"logprobs": False}, -1),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_logprobs_of_chats(fields: dict[str, Any], logprobs: int) -> None:
    plan = PLANNER.chat(chat_body(**fields))
    assert (plan.logprobs, plan.sampling(1).logprobs) == (logprobs, logprobs)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "|"),
        ({"reasoning_effort": "low"}, "low|True"),
        ({"reasoning_effort": "none"}, "none|False"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "high|False"),
    ],
)
def test_templates_that_only_know_whether_to_think(fields: dict[str, Any], text: str) -> None:
    template = ChatTemplate({"default": "{{ reasoning_effort }}|{{ enable_thinking }}"}, {})
    assert planners(template=template).chat(chat_body(**fields)).prompts == [text]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "calm|True"),
        ({"chat_template_kwargs": {"mood": "gay"}}, "gay|True"),
        ({"chat_template_kwargs": {}}, "calm|True"),
        ({"reasoning_effort": "none"}, "calm|False"),
        ({"chat_template_kwargs": {"enable_thinking": None}}, "calm|None"),
    ],
)
def test_the_servers_variables_are_for_requests_that_do_not_set_them(
    fields: dict[str, Any], text: str
) -> None:
    template = ChatTemplate({"default": "{{ mood }}|{{ enable_thinking }}"}, {})
    config = ServeConfig(default_chat_template_kwargs='{"mood": "calm", "enable_thinking": true}')
    assert planners(config, template=template).chat(chat_body(**fields)).prompts == [text]


def test_keys_that_are_no_token_ids_are_named() -> None:
    bias = {"bad1": 50, "1": 2, "bad2": 20}
    error = error_of(PLANNER.chat, chat_body(logit_bias=bias))
    assert error.message == "logit_bias: expected an integer as every key, got 'bad1', 'bad2'."
    many = error_of(PLANNER.chat, chat_body(logit_bias={f"b{number}": 1 for number in range(1000)}))
    assert many.message.endswith("'b4' and 995 more.")


def test_an_unknown_reasoning_effort_is_refused() -> None:
    error = error_of(PLANNER.chat, chat_body(reasoning_effort="hihg"))
    assert (error.status, error.param) == (400, "reasoning_effort")
    assert "minimal, low, medium" in error.message


def test_continuous_usage_needs_usage() -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    assert PLANNER.completion(body(stream=True, stream_options=options)).continuous_usage is False


def test_the_operator_can_send_usage_with_every_stream() -> None:
    forced = planners(ServeConfig(enable_force_include_usage=True))
    for options in (None, {"include_usage": False}, {"include_usage": True}):
        plan = forced.completion(body(stream=True, stream_options=options))
        assert plan.include_usage
        assert plan.continuous_usage  # as vLLM
    assert not forced.completion(body()).include_usage
    assert not PLANNER.completion(body(stream=True)).include_usage


def test_one_request_starts_no_more_streams_than_are_allowed() -> None:
    assert len(PLANNER.completion(body(prompt=["x"] * 2048, n=2, temperature=1)).prompts) == 2048
    error = error_of(PLANNER.completion, body(prompt=["x"] * 2049, n=2, temperature=1))
    assert (error.status, error.param) == (400, "prompt")
    assert "4098 outputs, at most 4096" in error.message
    assert error_of(PLANNER.completion, body(prompt=[[5]] * 5000)).param == "prompt"
    assert error_of(PLANNER.completion, body(prompt=["x"] * 5, best_of=1000)).param == "prompt"


def test_the_header_wins_over_the_bodys_request_id() -> None:
    assert PLANNER.completion(body(request_id="body"), RequestInfo("header")).request_id == "header"
    assert error_of(PLANNER.completion, body(), RequestInfo("x" * 257)).param == "X-Request-Id"


# -- truncation


def truncated(length: int, **fields: Any) -> list[int]:
    prompt = np.arange(length, dtype="<i4").tobytes()
    return np.frombuffer(PLANNER.completion(body(**fields)).truncate(prompt), "<i4").tolist()


def test_truncation_keeps_the_end_or_the_start() -> None:
    assert truncated(5) == [0, 1, 2, 3, 4]
    assert truncated(5, truncate_prompt_tokens=2) == [3, 4]
    assert truncated(5, truncate_prompt_tokens=2, truncation_side="right") == [0, 1]
    assert truncated(5, truncate_prompt_tokens=9) == [0, 1, 2, 3, 4]


def test_truncation_to_what_fits_leaves_room_for_max_tokens() -> None:
    assert len(truncated(3000, truncate_prompt_tokens=-1, max_tokens=48)) == 2000


# -- chats


def test_continuing_a_message_opens_no_turn() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    plan = PLANNER.chat(chat_body(messages=messages, continue_final_message=True, echo=True))
    assert plan.prompts == ["<s><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb"]
    assert (plan.role, plan.echo, plan.echo_text) == ("assistant", False, "b")


def test_echo_of_a_chat_needs_a_message_of_the_same_role() -> None:
    assert PLANNER.chat(chat_body(echo=True)).echo_text == ""


def test_the_template_gets_tools_documents_and_variables() -> None:
    source = "{{ tools | tojson }}{{ documents | tojson }}{{ mood }}{{ reasoning_effort }}"
    shows = planners(template=ChatTemplate({"default": source}, {}))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    plan = shows.chat(
        chat_body(
            tools=[tool],
            tool_choice="required",
            documents=[{"text": "d"}],
            chat_template_kwargs={"mood": "calm"},
            reasoning_effort="low",
        )
    )
    assert plan.prompts == [json.dumps([tool]) + '[{"text": "d"}]calmlow']


CALLS = (
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls %}CALL{% endfor %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("shows", "shown"),
    [
        ("{{ call.function.arguments }}", '{"city": "Be'),
        ("{{ call.function.arguments | tojson }}", '"{\\"city\\": \\"Be"'),
        (
            "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
            'arguments={"city": "Be',
        ),
        (
            "{% for k, v in call.function.arguments | items %}{{ k }}={{ v }}{% endfor %}",
            'arguments={"city": "Be',
        ),
    ],
)
def test_a_model_sees_the_arguments_that_it_broke_off(shows: str, shown: str) -> None:
    history = planners(template=ChatTemplate({"default": CALLS.replace("CALL", shows)}, {}))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Be'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert history.chat(chat_body(messages=messages)).prompts == [shown]


THINKS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
BARE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# <think></think> #}"
TEXT_AND_CALLS = (
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
)
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize(
    ("template", "last", "end", "inside"),
    [
        (THINKS, {"content": "It is"}, "<assistant>It is", False),
        (THINKS, {"content": None, "reasoning": "I am"}, "<assistant><think>I am", True),
        (THINKS, {"reasoning": "I am", "content": "It is"}, "<assistant><think>I am</think>It is", False),
        (THINKS, {"content": "<think>I am"}, "<assistant><think>I am", True),
        (THINKS, {"content": "<think>I am</think>It"}, "<assistant><think>I am</think>It", False),
        (BARE, {"content": "", "reasoning": "I am"}, "<assistant><think>\nI am", True),
        (BARE, {"content": [{"type": "text", "text": "<think>I"}]}, "<assistant><think>I", True),
    ],
)
def test_a_reply_is_continued_where_it_ended(
    template: str, last: dict[str, Any], end: str, inside: bool
) -> None:
    planner = planners(template=ChatTemplate({"default": template}, {}))
    # what users write opens nothing
    messages = [{"role": "user", "content": "<think>"}, {"role": "assistant", **last}]
    plan = planner.chat(chat_body(messages=messages, **CONTINUED))
    assert str(plan.prompts[0]).endswith(end)
    assert plan.format is not None
    delta = MessageParser(plan.format).push(" sure.</think>4", last=True)
    assert (delta.reasoning, delta.content) == ((" sure.", "4") if inside else ("", " sure.</think>4"))


def test_a_message_with_calls_is_not_continued() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "tool_calls": [call]}]
    error = error_of(PLANNER.chat, chat_body(messages=messages, **CONTINUED))
    assert (error.param, "tool_calls" in error.message) == ("continue_final_message", True)


def test_what_a_client_keeps_of_a_reply_is_taken_back() -> None:
    """As the openai package has it: with every field, most of them null."""
    reply = {
        "content": None, "refusal": None, "role": "assistant", "annotations": None, "audio": None,
        "function_call": None, "reasoning": "R", "index": 0,
        "tool_calls": [
            {"id": "c", "function": {"arguments": '{"x": 1}', "name": "f"}, "type": "function", "index": 0}
        ],
    }  # fmt: skip
    planner = planners(
        template=ChatTemplate({"default": THINKS.replace("{{ m.content }}", TEXT_AND_CALLS)}, {})
    )
    result = {"role": "tool", "tool_call_id": "c", "content": "5"}
    messages = [{"role": "user", "content": "Q"}, reply, result]
    prompt = planner.chat(chat_body(messages=messages)).prompts[0]
    assert prompt == '<user>Q<assistant><think>R</think>[f {"x": 1}]<tool>5<assistant>'


def test_a_model_without_template_names_the_option() -> None:
    model_info = ModelInfo(names=("m",), max_model_len=8, vocab_size=8)
    bare = Planners(
        ServeConfig(), InputProcessor(ServeConfig(), model_info, tiny_tokenizer(), None, AdapterRegistry())
    )
    assert "--chat-template" in error_of(bare.chat, chat_body()).message


# -- other endpoints


def test_tokenize_takes_a_prompt_or_messages() -> None:
    plan = PLANNER.tokenize(b'{"prompt": "a", "return_token_strs": true}')
    assert (plan.text, plan.add_special_tokens, plan.return_token_strs) == ("a", True, True)
    assert PLANNER.tokenize(b'{"prompt": "", "add_special_tokens": false}').add_special_tokens is False
    plan = PLANNER.tokenize(chat_body(add_generation_prompt=False))
    assert (plan.text, plan.add_special_tokens) == ("<s><|im_start|>user\nSay hi<|im_end|>\n", False)


@pytest.mark.parametrize(
    "fields", [{}, {"prompt": "a", "messages": []}, {"prompt": "a", "chat_template": "x"}]
)
def test_tokenize_refuses(fields: dict[str, Any]) -> None:
    assert error_of(PLANNER.tokenize, json.dumps(fields).encode()).status == 400


def test_detokenize() -> None:
    assert PLANNER.detokenize(b'{"tokens": [1, 2]}') == [1, 2]
    assert PLANNER.detokenize(b'{"tokens": []}') == []
    assert (
        error_of(PLANNER.detokenize, b'{"tokens": [16384]}').message == "Token id 16384 is out of vocabulary"
    )
    assert error_of(PLANNER.detokenize, b'{"tokens": [-1]}').param == "body.tokens.0"
    assert error_of(PLANNER.detokenize, b'{"tokens": [1], "model": "x"}').status == 404


def test_unknown_fields_of_all_endpoints_are_counted_together() -> None:
    counting = planners()
    counting.completion(body(zz=1))
    counting.chat(chat_body(zz=1, yy=2))
    assert counting.unknown_fields() == {"zz": 2, "yy": 1}


# -- anything else

NAMES = sorted({*CompletionRequest.__struct_fields__, *ChatCompletionRequest.__struct_fields__, "zz"})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["3", "null", "nan", "none", "auto", "text", "left", "tiny-llama", "user", "assistant"])
)
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "name", "function", "arguments", "tool_calls", "5", "x"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"])},
        optional={"content": VALUES, "tool_calls": VALUES},
    ),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {}, optional={"prompt": VALUES | st.text(string.printable), "messages": MESSAGES}
).flatmap(
    lambda fixed: st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5).map(lambda more: more | fixed)
)


@given(BODIES | VALUES)
def test_any_json_gives_a_plan_or_an_api_error(given: Any) -> None:
    # Python's JSON has NaN and unpaired surrogates, as some clients' has.
    sent = json.dumps(given).encode()
    for plan_of in (PLANNER.completion, PLANNER.chat, PLANNER.tokenize, PLANNER.detokenize):
        error = error_or_none(lambda plan_of=plan_of: use(plan_of(sent)))
        assert error is None or (error.status in (400, 404) and error.body())


def use(plan: Any) -> None:
    """Everything a server does with a plan that can fail."""
    if hasattr(plan, "sampling"):
        for index in range(min(plan.n, 3)):
            sampling = plan.sampling(10, index)
            assert 0 < sampling.max_tokens <= 2038
            assert 0 <= sampling.seed < 1 << 63
        assert plan.prompts
        plan.truncate(bytes(40))


def test_an_adapter_that_is_unloaded_while_its_request_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name was checked before a thread took the body."""
    monkeypatch.setattr(InputProcessor, "check_model", lambda self, name: None)
    for adapters in ((), (Adapter("other", "/other", digest="e"),)):
        error = error_of(planners(adapters=adapters).chat, chat_body(model="sql"))
        assert (error.status, error.code) == (404, "model_not_found")
