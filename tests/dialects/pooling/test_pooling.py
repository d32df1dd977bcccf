"""Plans and replies of vLLM's /pooling, /classify and /score, without an engine and without a connection."""

from __future__ import annotations

import base64
import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from penstock.dialects.pooling.dialect import Classify, Pooling, Score
from penstock.generation.dialect import RequestInfo
from penstock.generation.pooling.dialect import PoolingBody, PoolingDialect
from penstock.generation.pooling.vector_text import OCTETS
from penstock.http.errors import ApiError
from penstock.wire.pooling import PoolingTask
from tests.generation.pooling.planning import (
    CLASSIFIER,
    CROSS_ENCODER,
    EMBED,
    TEXT_ALONE,
    json_of,
    plan_of,
    pooled_of,
    pooling_processor,
)

LABELS = ("good", "bad", 'it is "so"')


@cache
def pooling() -> Pooling:
    return Pooling(pooling_processor())


@cache
def classify() -> Classify:
    return Classify(pooling_processor(CLASSIFIER, labels=LABELS))


@cache
def score() -> Score:
    return Score(pooling_processor(CROSS_ENCODER))


def refusal(dialect: PoolingDialect, **fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        plan_of(dialect, **fields)
    assert caught.value.status == 400
    return caught.value


def whole(body: PoolingBody) -> bytes:
    return b"".join(body.pieces)


def replied(dialect: PoolingDialect, values: Any, **fields: object) -> dict[str, Any]:
    made: dict[str, Any] = json_of(dialect.reply(plan_of(dialect, **fields), pooled_of(values), "r"))
    assert made.pop("created") > 1_700_000_000
    assert (made["object"], made["model"]) == ("list", "tiny-llama")
    count = 3 * len(values)
    assert made["usage"] == {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
    return made


def test_the_task_is_the_models_first_one_or_that_of_the_request() -> None:
    assert plan_of(pooling(), input="a").task is EMBED
    assert plan_of(pooling(), input="a", task="token_embed").task is PoolingTask.TOKEN_EMBED
    classifier = Pooling(pooling_processor(CLASSIFIER))
    assert plan_of(classifier, input="a").task is PoolingTask.CLASSIFY
    plan = plan_of(classifier, input="a", task="token_classify", use_activation=False)
    assert (plan.task, plan.activate) == (PoolingTask.TOKEN_CLASSIFY, False)


def test_a_vector_per_token() -> None:
    plan = plan_of(pooling(), input=["a", "b"], task="token_embed")
    pooled = pooled_of([[1, 2], [3, 4], [5, 6]], lengths=[2, 1], per_token=True)
    made = json_of(pooling().reply(plan, pooled, "r"))
    assert made["id"] == "pooling-r"
    assert made["data"] == [
        {"index": 0, "object": "pooling", "data": [[1, 2], [3, 4]]},
        {"index": 1, "object": "pooling", "data": [[5, 6]]},
    ]


def test_base64_in_half_precision_and_in_the_other_order() -> None:
    asked = {"input": "a", "encoding_format": "base64"}
    half = replied(pooling(), [[0.5, -1.0]], embed_dtype="float16", **asked)["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(half), "<f2").tolist() == [0.5, -1.0]
    big = replied(pooling(), [[0.5, -1.0]], endianness="big", **asked)["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(big), ">f4").tolist() == [0.5, -1.0]


def test_the_bytes_themselves() -> None:
    pooled = pooled_of([[0.5, -1.0], [2, 3]])
    expected = pooled.values.tobytes()
    bare = pooling().reply(plan_of(pooling(), input="a", encoding_format="bytes_only"), pooled, "r")
    assert (bare.kind, bare.size, bare.headers, whole(bare)) == (OCTETS, 16, (), expected)
    listed = pooling().reply(plan_of(pooling(), input="a", encoding_format="bytes"), pooled, "r")
    assert [name for name, _ in listed.headers] == [b"metadata"]
    assert json.loads(listed.headers[0][1])["id"] == "pooling-r"
    accept = RequestInfo(accept=[(b"accept", OCTETS)])
    asked = pooling().reply(pooling().plan(b'{"input":"a"}', accept), pooled, "r")
    assert (asked.kind, whole(asked)) == (OCTETS, expected)


def test_bytes_without_places_are_refused_before_they_are_computed() -> None:
    asked = {"input": ["a"] * 65, "task": "token_embed", "encoding_format": "bytes_only"}
    error = refusal(pooling(), **asked)
    assert (error.status, error.param) == (400, "accept")
    assert "at most 64 inputs, not 65: ask for application/vnd.safetensors" in error.message
    plan_of(pooling(), **asked | {"input": ["a"] * 64})
    plan_of(pooling(), **asked | {"task": "embed"})


def test_a_file_of_tensors() -> None:
    accept = RequestInfo(accept=[(b"accept", b"application/vnd.safetensors")])
    made = pooling().reply(pooling().plan(b'{"input":"a"}', accept), pooled_of([[0.5, -1.0]]), "r")
    assert made.kind == b"application/vnd.safetensors"
    assert whole(made).endswith(np.array([0.5, -1.0], "<f4").tobytes())


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"task": "plugin"}, "task", "must be one of embed, token_embed, classify, token_classify"),
        ({"task": "classify"}, "model", "needs a model for classify; 'tiny-llama' is one for embed"),
        ({"data": {"x": 1}}, "data", "there are no plugins"),
        ({"embed_dtype": "fp8_e4m3"}, "embed_dtype", "must be float32, float16, bfloat16"),
        ({"endianness": "middle"}, "endianness", "must be native, little, big"),
    ],
)
def test_what_pooling_refuses(fields: dict[str, object], param: str, told: str) -> None:
    error = refusal(pooling(), input="a", **fields)
    assert error.param == param
    assert told in error.message


def test_labels_have_no_dimensions() -> None:
    error = refusal(Pooling(pooling_processor(CLASSIFIER)), input="a", dimensions=2)
    assert "`dimensions` must be absent with classify" in error.message


def test_each_text_has_the_label_that_is_likeliest() -> None:
    made = replied(classify(), [[0.1, 0.7, 0.2], [0, 0, 1]], input=["a", "b"])
    assert made["id"] == "classify-r"
    assert made["data"] == [
        {"index": 0, "label": "bad", "probs": pytest.approx([0.1, 0.7, 0.2]), "num_classes": 3},
        {"index": 1, "label": 'it is "so"', "probs": [0, 0, 1], "num_classes": 3},
    ]


def test_labels_without_names() -> None:
    made = replied(Classify(pooling_processor(CLASSIFIER)), [[0.1, 0.2, 0.7]], input="a")
    assert made["data"][0]["label"] == "LABEL_2"


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")]
)
def test_scores_by_all_names(names: tuple[str, str]) -> None:
    asked: dict[str, Any] = dict(zip(names, ("q", ["a", "b"]), strict=True))
    assert list(plan_of(score(), **asked).inputs) == [("q", "a"), ("q", "b")]
    made = replied(score(), [[0.5], [-2]], **asked)
    assert made["id"] == "score-r"
    assert made["data"] == [
        {"index": 0, "object": "score", "score": 0.5},
        {"index": 1, "object": "score", "score": -2},
    ]


def test_what_scores_can_ask_for() -> None:
    plan = plan_of(
        score(), queries=["p", "q"], documents=["a", "b"], truncate_prompt_tokens=9, use_activation=False
    )
    assert list(plan.inputs) == [("p", "a"), ("q", "b")]
    assert (plan.truncate, plan.activate, plan.field) == (9, False, "documents")


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({}, "queries", "queries and documents, or queries and items, or"),
        ({"queries": "q"}, "queries", "it has queries."),
        ({"text_1": "q", "documents": "a"}, "documents", "it has documents, text_1."),
        ({"queries": "q", "documents": []}, "documents", "documents must have at least one text"),
        ({"text_1": ["p", "q"], "text_2": ["a"]}, "text_1", "there are 2 and 1"),
        ({"queries": "q", "documents": "a", "instruction": "x"}, "instruction", "write it into the queries"),
        ({"queries": "q", "documents": "a", "max_tokens_per_doc": 5}, "max_tokens_per_doc", "must be 0"),
    ],
)
def test_what_scores_refuse(fields: dict[str, object], param: str, told: str) -> None:
    error = refusal(score(), **fields)
    assert error.param == param
    assert told in error.message


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [(Pooling, {"input": "a"}), (Classify, {"input": "a"}), (Score, {"queries": "q", "documents": "a"})],
)
def test_a_model_of_text_says_so(dialect: type[Pooling], fields: dict[str, object]) -> None:
    error = refusal(dialect(pooling_processor(TEXT_ALONE)), **fields)
    assert error.code == "task_not_supported"
    assert "'tiny-llama' is one for generate" in error.message
