"""Recorded requests to vLLM: what it accepts is planned, what it refuses is refused the same way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.http.errors import ApiError
from tests.generation.planning import chat_body, planners, tiny_tokenizer
from tests.golden_replies import Case, load_cases

CASES = [
    case
    for case in load_cases()
    if case["method"] == "POST"
    and case["request_headers"].get("Content-Type") == "application/json"
    and case["status"] != 405
]
PLANNER = planners()

SERVED_HERE = frozenset(("chat_tools_auto", "chat_tools_required"))
"""Cases that vLLM refused as it was started."""

CLEARER_PARAM = {
    "err_chat_top_logprobs_100": "top_logprobs",
    "err_messages_empty": "messages",
    "err_messages_no_role": "body.messages.0.role",
    "err_min_gt_max": "min_tokens",
    "err_n2_greedy": "n",
    "err_presence_5": "presence_penalty",
    "err_prompt_exact_len": "input_tokens",
    "err_prompt_empty_list": "prompt",
    "err_prompt_tok_oov": "prompt",
    "err_rep_0": "repetition_penalty",
    "err_stop_int": "body.stop",
}
"""Where vLLM's param is null or names a class of its own, or another field."""
CLEARER_MESSAGE = {
    "err_chat_top_logprobs_100": (
        "Requested sample logprobs of 100, which is greater than max allowed: 20 "
        "(parameter=top_logprobs, value=100)"
    ),
    "err_prompt_exact_len": (
        "This model's maximum context length is 2048 tokens. However, your prompt contains 2048 input "
        "tokens, which leaves no room for an output token: it may have 2047. Please reduce the length of the "
        "input prompt. (parameter=input_tokens, value=2048)"
    ),
    "err_prompt_null": "prompt must be provided and non-empty. (parameter=prompt)",
    "err_tool_choice_missing_fn": (
        "The tool specified in `tool_choice`, 'zz', does not match any of the specified `tools`: 'f'. "
        "(parameter=tool_choice)"
    ),
}
"""Where vLLM's message names a field that is not served, a value nobody sent, or not what is allowed."""
OPENAIS_CODE = dict.fromkeys(("err_bad_model_comp", "err_bad_model_stream"), "model_not_found")


def outcome(case: Case) -> int | ApiError:
    """Prompt tokens, all prompts together, or the error."""
    body = case["request_body"].encode()
    tokenizer = tiny_tokenizer()
    try:
        if case["path"] == "/tokenize":
            text = PLANNER.tokenize(body)
            return len(tokenizer.encode(text.text, text.add_special_tokens))
        if case["path"] == "/detokenize":
            return len(PLANNER.detokenize(body))
        plan = (PLANNER.chat if "chat" in case["path"] else PLANNER.completion)(body)
        lengths = [
            len(tokenizer.encode(prompt, plan.add_special_tokens))
            if isinstance(prompt, str)
            else len(prompt) // 4
            for prompt in plan.prompts
        ]
        for length in lengths:
            plan.sampling(length)
    except ApiError as error:
        return error
    return sum(lengths)


def named(accepted: bool) -> list[Any]:
    cases = [case for case in CASES if (case["status"] == 200 or case["name"] in SERVED_HERE) is accepted]
    return [pytest.param(case, id=case["name"]) for case in cases]


@pytest.mark.parametrize("case", named(accepted=True))
def test_accepted_requests(case: Case) -> None:
    tokens = outcome(case)
    assert not isinstance(tokens, ApiError), tokens.message
    if '"usage":{' in case["response_body"]:
        assert f'"usage":{{"prompt_tokens":{tokens},' in case["response_body"]


@pytest.mark.parametrize("case", named(accepted=False))
def test_refused_requests(case: Case) -> None:
    error, expected = outcome(case), json.loads(case["response_body"])["error"]
    assert isinstance(error, ApiError)
    assert (error.status, error.type) == (case["status"], expected["type"])
    assert error.param == CLEARER_PARAM.get(case["name"], expected["param"])
    assert error.code == OPENAIS_CODE.get(case["name"], expected["code"])
    if "validation error" not in expected["message"]:
        message = CLEARER_MESSAGE.get(case["name"], expected["message"])
        assert error.message == message


def test_tokens_of_a_rendered_conversation() -> None:
    case = next(case for case in CASES if case["name"] == "tokenize_chat")
    plan = PLANNER.tokenize(case["request_body"].encode())
    assert (
        tiny_tokenizer().encode(plan.text, plan.add_special_tokens)
        == json.loads(case["response_body"])["tokens"]
    )
    same = json.loads(case["request_body"])
    chat = PLANNER.chat(chat_body(messages=same["messages"]))
    assert chat.prompts == [plan.text]
    assert chat.add_special_tokens is False
