"""Logprobs of prompts and outputs in the shapes of the two APIs; which choices are the best."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.chat.reply import ChatReply
from penstock.dialects.completions.reply import CompletionReply
from penstock.generation.replies.logprobs import (
    MIN_LOGPROB,
    PIECE_CANDIDATES,
    LogprobCollector,
    PromptLogprobFormatter,
    TokenLogprobs,
    TokenNames,
)
from penstock.generation.replies.stream_interval import EVERY_TOKEN
from penstock.generation.request.validation import MAX_LOGPROB_BYTES, wide_prompt_logprob_bytes
from penstock.streaming.engine_faults import InvalidOutputError
from penstock.streaming.token_table import TokenTable
from penstock.wire.logprobs import ENTRY_CANDIDATES, Logprobs, PromptLogprobs
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
        {str(MAIN): {"logprob": MIN_LOGPROB, "rank": 8, "decoded_token": " main"}},
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
        "token_logprobs": [None, -2.0, MIN_LOGPROB, -0.5],
        "tokens": ["<s>", "def", " main", "():"],
        "top_logprobs": [
            None,
            {"def": -2.0, "():": -1.0},
            {" main": MIN_LOGPROB},
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


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_token_with_many_candidates(chat: bool, rows: int) -> None:
    """They come in several entries, and are formatted in pieces of a thousand."""
    width = 3000
    ids = np.stack([np.roll(np.arange(100, 100 + width, dtype=np.int32), -row) for row in range(rows)])
    values = -np.sort(np.random.default_rng(1).random((rows, width), np.float32), axis=1)
    entries = Logprobs(np.arange(rows, dtype=np.int32), ids, values, np.ones(rows, np.int32)).split()
    assert entries.ids.shape[1] == ENTRY_CANDIDATES
    assert len(entries.token) == rows * -(-width // ENTRY_CANDIDATES)
    collector = LogprobCollector(NAMES, alternatives=width - 1)
    collector.add(ids[:, 0].tolist(), entries)
    taken = collector.take()
    assert taken is not None
    kind = ChatReply if chat else CompletionReply
    pieces = list(kind("id", "m", "assistant").logprobs(taken))
    assert max(map(len, pieces)) < 200 * PIECE_CANDIDATES
    shown = json.loads(b"".join(pieces))
    texts = [[json.loads(NAMES[token].quoted) for token in row.tolist()] for row in ids]
    if not chat:
        assert shown["tokens"] == [row[0] for row in texts]
        assert shown["token_logprobs"] == pytest.approx(values[:, 0].tolist())
        assert [set(top) for top in shown["top_logprobs"]] == [set(row) for row in texts]
        return
    for entry, row, own in zip(shown["content"], texts, values, strict=True):
        assert (entry["token"], entry["logprob"]) == (row[0], pytest.approx(float(own[0])))
        assert [each["token"] for each in entry["top_logprobs"]] == row[1:]


def test_a_token_with_more_candidates_than_were_asked_for_is_noticed() -> None:
    collector = LogprobCollector(NAMES, alternatives=1)
    twice = Logprobs(
        np.zeros(2, np.int32), np.ones((2, 2), np.int32), np.zeros((2, 2), np.float32), np.ones(2)
    )
    with pytest.raises(InvalidOutputError):
        collector.add([5], twice)
    wide = LogprobCollector(NAMES, alternatives=ENTRY_CANDIDATES)
    ids = np.ones((2, ENTRY_CANDIDATES), np.int32)
    with pytest.raises(InvalidOutputError):
        wide.add([5], Logprobs(np.zeros(2, np.int32), ids, ids.astype(np.float32), np.ones(2, np.int32)))


@pytest.mark.parametrize(
    ("most", "fields", "logprobs"),
    [
        (-1, {"logprobs": -1, "max_tokens": 4}, 16384),
        (-1, {"logprobs": 20_000}, None),
        (1 << 20, {"logprobs": -1, "max_tokens": 4}, 16384),
        (500, {"logprobs": 500}, 500),
        (500, {"logprobs": 501}, None),
        (500, {"logprobs": -1}, None),
    ],
)
def test_max_logprobs_up_to_the_vocabulary(most: int, fields: dict[str, Any], logprobs: int | None) -> None:
    planner = planners(ServeConfig(max_logprobs=most))
    chat = {"logprobs": True, "top_logprobs": fields["logprobs"], "max_tokens": fields.get("max_tokens", 16)}
    requests = ((planner.completion, body(**fields)), (planner.chat, chat_body(**chat)))
    for plan, request in requests:
        if logprobs is None:
            assert "greater than max allowed" in error_of(plan, request).message
            continue
        made = plan(request)
        assert (made.logprobs, made.sampling(5).logprobs, made.interval) == (logprobs, logprobs, EVERY_TOKEN)
        assert made.logprob_bytes == 8 * (1 + logprobs) * fields.get("max_tokens", 16)


def test_memory_of_many_logprobs_is_bounded() -> None:
    planner = planners(ServeConfig(max_logprobs=-1))
    for fields in ({"max_tokens": 2048}, {"max_tokens": 64, "n": 64, "temperature": 1.0}):
        error = error_of(planner.completion, body(logprobs=-1, **fields))
        assert (error.status, error.param) == (400, "logprobs")
        assert "at most 16777216 are allowed" in error.message
    assert planner.completion(body(logprobs=-1, max_tokens=1000)).logprob_bytes < MAX_LOGPROB_BYTES
    assert planner.completion(body(logprobs=20, max_tokens=2000, n=1000, temperature=1.0)).logprob_bytes == 0
    assert planner.completion(body(prompt_logprobs=-1)).prompt_logprobs == 16384
    assert wide_prompt_logprob_bytes(16384, 1000) == 8 * 16385 * 1000
    assert wide_prompt_logprob_bytes(20, 1 << 30) == 0
    error = error_of(wide_prompt_logprob_bytes, 16384, 1024)
    assert (error.status, error.param) == (400, "prompt_logprobs")


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
