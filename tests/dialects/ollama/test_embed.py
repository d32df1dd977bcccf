"""Vectors by Ollama's API, without an engine and without a connection."""

from __future__ import annotations

import json
from functools import cache

import pytest

from penstock.dialects.ollama.embed import OllamaEmbed, OllamaEmbeddings
from penstock.http.errors import ApiError
from tests.generation.pooling.planning import TEXT_ALONE, json_of, plan_of, pooled_of, pooling_processor


@cache
def embed() -> OllamaEmbed:
    return OllamaEmbed(pooling_processor())


@cache
def embeddings() -> OllamaEmbeddings:
    return OllamaEmbeddings(pooling_processor())


def test_long_texts_are_cut_unless_the_request_says_otherwise() -> None:
    plan = plan_of(embed(), model="tiny-llama:latest", input=["a", "b"], dimensions=2, keep_alive="5m")
    assert (list(plan.inputs), plan.truncate, plan.dimensions) == (["a", "b"], 2048, 2)
    assert plan_of(embed(), input="a", truncate=False).truncate is None


def test_vectors() -> None:
    plan = plan_of(embed(), model="tiny-llama:latest", input=["a", "b"], options={"num_ctx": 5})
    made = json_of(embed().reply(plan, pooled_of([[0.5, -1], [2, 3]]), "r"))
    assert made.pop("total_duration") > 0
    assert made == {
        "model": "tiny-llama:latest",
        "embeddings": [[0.5, -1], [2, 3]],
        "load_duration": 0,
        "prompt_eval_count": 6,
    }


def test_the_older_route() -> None:
    plan = plan_of(embeddings(), prompt="a")
    assert (list(plan.inputs), plan.field) == (["a"], "prompt")
    assert json_of(embeddings().reply(plan, pooled_of([[0.5, -1]]), "r")) == {"embedding": [0.5, -1]}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "input must be provided"),
        ({"input": "a", "dimensions": 9}, "`dimensions` is 9, must be 1 to 4"),
    ],
)
def test_refusals(fields: dict[str, object], told: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan_of(embed(), **fields)
    [(name, message)] = json.loads(embed().error_body(caught.value, "r")).items()
    assert (name, caught.value.status) == ("error", 400)
    assert told in message


def test_a_model_of_text_says_so() -> None:
    with pytest.raises(ApiError, match="is one for generate"):
        plan_of(OllamaEmbed(pooling_processor(TEXT_ALONE)), input="a")
