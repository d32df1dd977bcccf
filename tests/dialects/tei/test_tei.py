"""Plans and replies of TEI's routes, without an engine and without a connection."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from penstock.dialects.tei.dialect import TeiEmbed, TeiEmbedAll, TeiEmbedSparse, TeiPredict, TeiSimilarity
from penstock.generation.pooling.dialect import PoolingDialect
from penstock.http.errors import ApiError
from penstock.wire.pooling import PoolingTask
from tests.generation.pooling.planning import (
    CLASSIFIER,
    CLASSIFY,
    CROSS_ENCODER,
    EMBED,
    json_of,
    plan_of,
    pooled_of,
    pooling_processor,
)

VECTORS = pooling_processor(prompts={"query": "Q: "})
EMBED_ROUTE, ALL, SIMILARITY = TeiEmbed(VECTORS), TeiEmbedAll(VECTORS), TeiSimilarity(VECTORS)
PREDICT = TeiPredict(pooling_processor(CLASSIFIER, labels=("bad", 'so "so"', "good")))
VALUES = np.arange(8, dtype=np.float32).reshape(2, 4) / 10


def test_vectors_are_a_bare_list() -> None:
    plan = plan_of(EMBED_ROUTE, inputs=["a", "b"])
    assert (plan.task, list(plan.inputs), plan.field) == (EMBED, ["a", "b"], "inputs")
    assert (plan.normalize, plan.truncate, plan.truncate_left, plan.dimensions) == (True, 2048, False, 0)
    body = json_of(EMBED_ROUTE.reply(plan, pooled_of(VALUES), "abc"))
    assert (np.array(body, np.float32) == VALUES).all()
    assert (
        len(json_of(EMBED_ROUTE.reply(plan_of(EMBED_ROUTE, inputs="a"), pooled_of(VALUES[:1]), "abc"))) == 1
    )


def test_options_of_vectors() -> None:
    plan = plan_of(
        EMBED_ROUTE,
        inputs=[[1, 2], [3]],
        normalize=False,
        truncate=False,
        truncation_direction="Left",
        prompt_name="query",
        dimensions=2,
        priority=3,
    )
    assert list(plan.inputs) == [np.array(ids, "<i4").tobytes() for ids in ([1, 2], [3])]
    assert (plan.normalize, plan.truncate, plan.truncate_left) == (False, None, True)
    assert (plan.prompt, plan.dimensions, plan.priority) == ("Q: ", 2, 3)


def test_vectors_of_tokens() -> None:
    plan = plan_of(ALL, inputs=["a", "b"])
    assert plan.task == PoolingTask.TOKEN_EMBED
    body = json_of(ALL.reply(plan, pooled_of(np.ones((5, 4)), [2, 3], per_token=True), "abc"))
    assert [len(each) for each in body] == [2, 3]
    assert body[0][0] == [1.0] * 4


@pytest.mark.parametrize(
    ("inputs", "planned"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b"], [("a", "b")]),
        ([["a"], ["b"]], ["a", "b"]),
        ([["a", "b"], ["c", "d"]], [("a", "b"), ("c", "d")]),
    ],
)
def test_inputs_that_are_labelled(inputs: Any, planned: list[Any]) -> None:
    plan = plan_of(PREDICT, inputs=inputs)
    assert (plan.task, list(plan.inputs), plan.activate) == (CLASSIFY, planned, True)
    values = np.tile(np.float32([0.25, 0.5, 0.25]), (len(planned), 1))
    labels = [
        {"score": 0.5, "label": 'so "so"'},
        {"score": 0.25, "label": "bad"},
        {"score": 0.25, "label": "good"},
    ]
    body = json_of(PREDICT.reply(plan, pooled_of(values), "abc"))
    single = isinstance(inputs, str) or isinstance(inputs[0], str)
    assert body == (labels if single else [labels] * len(planned))


def test_raw_scores() -> None:
    assert not plan_of(PREDICT, inputs="a", raw_scores=True).activate


def test_similarity() -> None:
    inputs = {"source_sentence": "a", "sentences": ["b", "c"]}
    plan = plan_of(SIMILARITY, inputs=inputs, parameters={"prompt_name": "query", "truncate": False})
    assert (plan.before, plan.field) == (("inputs.source_sentence", 1), "inputs.sentences")
    assert (plan.inputs, plan.normalize) == (["a", "b", "c"], True)
    assert (plan.prompt, plan.truncate) == ("Q: ", None)
    values = [[1, 0, 0, 0], [0.6, 0.8, 0, 0], [0, 1, 0, 0]]
    assert json_of(SIMILARITY.reply(plan, pooled_of(values), "abc")) == [0.6, 0.0]


@pytest.mark.parametrize(
    ("dialect", "fields", "field"),
    [
        (EMBED_ROUTE, {}, "inputs"),
        (EMBED_ROUTE, {"inputs": []}, "inputs"),
        (EMBED_ROUTE, {"inputs": ["a", [1]]}, "body.inputs.0"),
        (EMBED_ROUTE, {"inputs": "a", "truncation_direction": "up"}, "truncation_direction"),
        (EMBED_ROUTE, {"inputs": "a", "dimensions": 5}, "dimensions"),
        (EMBED_ROUTE, {"inputs": "a", "prompt_name": "none"}, "prompt_name"),
        (EMBED_ROUTE, {"inputs": "a", "padding": "max_length"}, "padding"),
        (TeiEmbedSparse(VECTORS), {"inputs": "a"}, "/embed_sparse"),
        (PREDICT, {"inputs": []}, "inputs"),
        (PREDICT, {"inputs": ["a", "b", "c"]}, "inputs"),
        (PREDICT, {"inputs": ["a", ["b"]]}, "inputs"),
        (PREDICT, {"inputs": [["a"], "b"]}, "inputs[1]"),
        (PREDICT, {"inputs": [["a"], []]}, "inputs[1]"),
        (PREDICT, {"inputs": [["a"], ["b", "c"]]}, "inputs"),
        (SIMILARITY, {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences"),
    ],
)
def test_what_is_refused(dialect: PoolingDialect, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as caught:
        plan_of(dialect, **fields)
    assert (caught.value.status, caught.value.param) == (400, field)


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        (TeiEmbed(pooling_processor(CROSS_ENCODER)), {"inputs": "a"}),
        (TeiPredict(VECTORS), {"inputs": "a"}),
    ],
)
def test_models_of_another_task(dialect: PoolingDialect, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        plan_of(dialect, **fields)
    assert caught.value.code == "task_not_supported"


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "Validation"), (429, "Overloaded"), (503, "Unhealthy"), (500, "Backend")]
)
def test_errors_have_teis_shape(status: int, kind: str) -> None:
    body = json.loads(EMBED_ROUTE.error_body(ApiError(status, "No."), "abc"))
    assert body == {"error": "No.", "error_type": kind}
