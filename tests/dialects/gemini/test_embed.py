"""Vectors by Gemini's API, without an engine and without a connection."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.dialects.gemini.embed import GeminiEmbed, GeminiEmbedTexts
from penstock.generation.dialect import RequestInfo
from penstock.generation.pooling.dialect import PoolingDialect
from penstock.generation.pooling.plan import PoolingPlan
from penstock.http.errors import ApiError
from tests.generation.pooling.planning import TEXT_ALONE, VECTORS, json_of, pooled_of, pooling_processor

PROMPTS = {
    "query": "task: search result | query: ",
    "document": "title: none | text: ",
    "STS": "task: sentence similarity | query: ",
}
MODEL = pooling_processor(VECTORS, prompts=PROMPTS)
ONE, SEVERAL = GeminiEmbed(MODEL), GeminiEmbedTexts(MODEL)


def text(*parts: str, **fields: Any) -> dict[str, Any]:
    return {"content": {"parts": [{"text": part} for part in parts]}, **fields}


def planned(dialect: PoolingDialect, fields: dict[str, Any], model: str = "tiny-llama") -> PoolingPlan:
    path = f"/v1beta/models/{model}:embedContent"
    return dialect.plan(json.dumps(fields).encode(), RequestInfo(path=path))


def test_one_text() -> None:
    plan = planned(ONE, text("a", "b", output_dimensionality=2, model="models/x"))
    assert (list(plan.inputs), plan.dimensions, plan.truncate) == (["ab"], 2, 2048)
    assert json_of(ONE.reply(plan, pooled_of([[0.5, -1]]), "r")) == {"embedding": {"values": [0.5, -1]}}
    assert planned(ONE, text("a", autoTruncate=False)).truncate is None


def test_several_texts() -> None:
    plan = planned(SEVERAL, {"requests": [text("a"), text("b", taskType="RETRIEVAL_QUERY")]})
    assert list(plan.inputs) == ["a", "task: search result | query: b"]
    made = json_of(SEVERAL.reply(plan, pooled_of([[0.5, -1], [2, 3]]), "r"))
    assert made == {"embeddings": [{"values": [0.5, -1]}, {"values": [2, 3]}]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"task_type": "RETRIEVAL_DOCUMENT"}, "title: none | text: a"),
        ({"taskType": "RETRIEVAL_DOCUMENT", "title": "T"}, "title: T | text: a"),
        ({"taskType": "SEMANTIC_SIMILARITY"}, "task: sentence similarity | query: a"),
        ({"taskType": "CLUSTERING"}, "a"),
        ({"taskType": "TASK_TYPE_UNSPECIFIED", "title": "T"}, "T\na"),
    ],
)
def test_types_of_tasks_are_prompts_of_the_model(fields: dict[str, str], expected: str) -> None:
    assert list(planned(ONE, text("a", **fields)).inputs) == [expected]


@pytest.mark.parametrize(
    ("dialect", "fields", "param", "told"),
    [
        (ONE, text(), "content", "content must have parts with text"),
        (ONE, {"content": {"parts": [{"inlineData": {}}]}}, "content", "and no others"),
        (ONE, text("a", outputDimensionality=5), "outputDimensionality", "is 5, must be 1 to 4"),
        (ONE, text("a", taskType="X"), "taskType", "must be one of RETRIEVAL_QUERY"),
        (SEVERAL, {"requests": []}, "requests", "at least one"),
        (
            SEVERAL,
            {"requests": [text("a"), text("b", outputDimensionality=2)]},
            "requests[1].outputDimensionality",
            "must be that of the first",
        ),
    ],
)
def test_refusals(dialect: PoolingDialect, fields: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(ApiError) as caught:
        planned(dialect, fields)
    assert caught.value.param == param
    error = json.loads(dialect.error_body(caught.value, "r"))["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert told in error["message"]


def test_models() -> None:
    with pytest.raises(ApiError, match="does not exist"):
        planned(ONE, text("a"), model="other")
    with pytest.raises(ApiError, match="is one for generate"):
        planned(GeminiEmbed(pooling_processor(TEXT_ALONE)), text("a"))
