"""Logprobs of prompts and outputs in the shapes of the two APIs; which choices are the best."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.dialects.completions.reply import CompletionReply
from penstock.generation.logprobs import (
    LEAST_LOGPROB,
    LogprobCollector,
    PromptLogprobFormatter,
    TokenLogprobs,
    TokenNames,
)
from penstock.streaming.token_table import TokenTable
from penstock.wire.logprobs import Logprobs, PromptLogprobs
from tests.generation.planning import body, chat_body, error_of, planners, tiny_tokenizer

PLANNER = planners()
TABLE = TokenTable.from_tokenizer(tiny_tokenizer().raw, skip_special_tokens=False)
NAMES = TokenNames(TABLE)
DEF, MAIN, BET = (tiny_tokenizer().encode(text, False)[0] for text in ("def", " main", "():"))
PROMPT = [0, DEF, MAIN]


def entries(place: list[int], ids: list[list[int]], values: list[list[float]]) -> PromptLogprobs:
    count = len(place)
    return PromptLogprobs(
        np.zeros(count, np.int32),
        np.array(place, np.int32),
        np.array(ids, np.int32),
        np.array(values, np.float32),
        np.arange(7, 7 + count, dtype=np.int32),
    )


def scores(alternatives: int = 1) -> PromptLogprobFormatter:
    made = PromptLogprobFormatter(NAMES, PROMPT, alternatives)
    made.add(entries([1], [[DEF, BET]], [[-2.0, -1.0]]))
    made.add(entries([1, 2], [[DEF, BET], [MAIN, MAIN]], [[-2.0, -1.0], [-np.inf, -np.inf]]))  # 1 comes again
    return made


def test_a_prompt_as_vllm_reports_it() -> None:
    assert json.loads(b"".join(scores().field())) == [
        None,
        {
            str(DEF): {"logprob": -2.0, "rank": 7, "decoded_token": "def"},
            str(BET): {"logprob": -1.0, "rank": 1, "decoded_token": "():"},
        },
        {str(MAIN): {"logprob": LEAST_LOGPROB, "rank": 8, "decoded_token": " main"}},
    ]
    assert b"".join(PromptLogprobFormatter(NAMES, [DEF], 3).field()) == b"[null]"


def test_entries_that_were_lost_are_noticed() -> None:
    made = PromptLogprobFormatter(NAMES, PROMPT, 0)
    with pytest.raises(ValueError, match="from 2, but those from 1"):
        made.add(entries([2], [[MAIN]], [[-1.0]]))


def test_an_echoed_prompt_comes_before_the_output_once() -> None:
    collector = LogprobCollector(NAMES, scores(), alternatives=1)
    output = Logprobs(
        np.array([0], np.int32),
        np.array([[BET, DEF]], np.int32),
        np.array([[-0.5, -0.25]], np.float32),
        np.ones(1, np.int32),
    )
    collector.add([BET], output)
    reply = CompletionReply("id", "m", "assistant")

    def read(taken: TokenLogprobs | None) -> Any:
        return None if taken is None else json.loads(b"".join(reply.logprobs(taken)))

    assert read(collector.take()) == {
        "text_offset": [0, 3, 6, 11],
        "token_logprobs": [None, -2.0, LEAST_LOGPROB, -0.5],
        "tokens": ["<s>", "def", " main", "():"],
        "top_logprobs": [
            None,
            {"def": -2.0, "():": -1.0},
            {" main": LEAST_LOGPROB},
            {"():": -0.5, "def": -0.25},
        ],
    }
    collector.add([BET], output)
    assert read(collector.take())["text_offset"] == [14]
    assert read(collector.take()) is None


def test_echo_asks_for_the_prompts_logprobs_as_well() -> None:
    plan = PLANNER.completion(body(echo=True, logprobs=2))
    assert (plan.prompt_logprobs, plan.sampling(5).prompt_logprobs) == (2, 2)
    assert PLANNER.completion(body(echo=True, logprobs=1, prompt_logprobs=3)).sampling(5).prompt_logprobs == 3
    assert PLANNER.completion(body(logprobs=2)).sampling(5).prompt_logprobs == -1
    assert PLANNER.completion(body(echo=True)).sampling(5).prompt_logprobs == -1


def test_one_choice_scores_the_prompt_for_all_unless_they_are_streamed() -> None:
    fields = {"prompt_logprobs": 0, "n": 3, "temperature": 1.0}
    plan = PLANNER.chat(chat_body(**fields))
    assert [plan.sampling(5, index).prompt_logprobs for index in range(3)] == [0, -1, -1]
    streamed = PLANNER.completion(body(echo=True, logprobs=0, n=2, temperature=1.0, stream=True))
    assert [streamed.sampling(5, index).prompt_logprobs for index in range(2)] == [0, 0]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_logprobs": -2}, "must be a positive value or -1"),
        ({"prompt_logprobs": 21}, "greater than max allowed: 20"),
        ({"prompt_logprobs": -1}, "the whole vocabulary"),
        ({"prompt_logprobs": 0, "stream": True}, "not available when `stream=True`"),
    ],
)
def test_prompt_logprobs_out_of_range(fields: dict[str, Any], reason: str) -> None:
    for error in (error_of(PLANNER.completion, body(**fields)), error_of(PLANNER.chat, chat_body(**fields))):
        assert (error.status, error.param) == (400, "prompt_logprobs")
        assert reason in error.message


def test_the_best_of_several_need_their_logprobs() -> None:
    plan = PLANNER.completion(body(best_of=5, n=2, temperature=1.0))
    assert (plan.n, plan.kept, plan.logprobs) == (5, 2, -1)
    assert {plan.sampling(5, index).logprobs for index in range(5)} == {0}
    assert PLANNER.completion(body(best_of=5, logprobs=3)).sampling(5).logprobs == 3


@pytest.mark.parametrize("fields", [{"best_of": 4, "temperature": 0}, {"best_of": 2, "n": 2}, {"best_of": 1}])
def test_choices_that_would_be_the_same_or_all_sent_are_made_once(fields: dict[str, Any]) -> None:
    plan = PLANNER.completion(body(**fields))
    assert (plan.n, plan.kept) == (fields.get("n", 1), None)
    assert plan.sampling(5).logprobs == -1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"best_of": 2, "n": 3}, "at least n=3"),
        ({"best_of": 0}, "at least n=1"),
        ({"best_of": 1025}, "at most 1024"),
        ({"best_of": 2, "stream": True}, "must equal n"),
    ],
)
def test_best_of_out_of_range(fields: dict[str, Any], reason: str) -> None:
    error = error_of(PLANNER.completion, body(temperature=1.0, **fields))
    assert (error.status, error.param) == (400, "best_of")
    assert reason in error.message
