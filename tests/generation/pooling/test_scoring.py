"""Scores of pairs: what is asked of the model, and what is made of its numbers."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.generation.pooling.request_fields import MAX_INPUTS
from penstock.generation.pooling.scoring import plan_scores, ranking, scores_of
from penstock.http.errors import ApiError
from penstock.wire.pooling import PoolingInfo
from tests.generation.pooling.planning import (
    CLASSIFIER,
    CLASSIFY,
    CROSS_ENCODER,
    EMBED,
    TEXT_ALONE,
    VECTORS,
    pooled_of,
    pooling_processor,
)


def test_a_cross_encoder_reads_pairs() -> None:
    processor = pooling_processor(CROSS_ENCODER)
    plan = plan_scores(processor, ["q"], ["a", "b"], api="score", fields="own")
    assert (plan.task, list(plan.inputs)) == (CLASSIFY, [("q", "a"), ("q", "b")])
    assert plan.fields.fields == "own"
    assert scores_of(plan, pooled_of([[0.25], [-3.0]])).tolist() == [0.25, -3.0]
    each = plan_scores(processor, ["p", "q"], ["a", "b"], api="score")
    assert list(each.inputs) == [("p", "a"), ("q", "b")]


def test_a_model_with_both_reads_pairs() -> None:
    both = PoolingInfo((EMBED, CLASSIFY), width=4, labels=1)
    assert plan_scores(pooling_processor(both), ["q"], ["a"], api="score").task is CLASSIFY


def test_vectors_are_compared() -> None:
    plan = plan_scores(pooling_processor(), ["q"], ["a", "b", "c"], api="score")
    assert (plan.task, list(plan.inputs), plan.normalize) == (EMBED, ["q", "a", "b", "c"], True)
    assert (plan.before, plan.field) == (("queries", 1), "documents")  # whose inputs errors name
    pooled = pooled_of([[0.6, 0.8], [1, 0], [0, 1], [-0.6, -0.8]])
    scores = scores_of(plan, pooled)
    assert scores.dtype == np.float32
    assert scores.tolist() == pytest.approx([0.6, 0.8, -1.0])
    each = plan_scores(pooling_processor(), ["p", "q"], ["a", "b"], api="score")
    assert scores_of(each, pooled).tolist() == pytest.approx([0.8, -0.6])


def test_cosine_is_of_normalized_vectors_whatever_the_model_does() -> None:
    plan = plan_scores(pooling_processor(VECTORS, normalizes=False), ["q"], ["a"], api="score")
    assert plan.normalize


@pytest.mark.parametrize(
    ("similarity", "expected"),
    [("dot", [2.0, 6.0]), ("euclidean", [-2.0, -(5.0**0.5)]), ("manhattan", [-2.0, -3.0])],
)
def test_the_similarity_of_the_model(similarity: str, expected: list[float]) -> None:
    processor = pooling_processor(VECTORS, similarity=similarity, normalizes=False)
    plan = plan_scores(processor, ["q"], ["a", "b"], api="score")
    assert not plan.normalize
    pooled = pooled_of([[2.0, 1.0], [0.0, 1.0], [1.0, 3.0]])
    if similarity == "dot":
        pooled = pooled_of([[2.0, 0.0], [1.0, 9.0], [3.0, 1.0]])
    assert scores_of(plan, pooled).tolist() == pytest.approx(expected)


def test_prompts_of_queries_and_documents() -> None:
    prompts = {"query": "q: ", "passage": "p: ", "other": "o: "}
    processor = pooling_processor(VECTORS, prompts=prompts)
    assert list(plan_scores(processor, ["x"], ["y"], api="score").inputs) == ["q: x", "p: y"]
    default = pooling_processor(VECTORS, prompts={"other": "o: "}, default_prompt="other")
    assert list(plan_scores(default, ["x"], ["y"], api="score").inputs) == ["o: x", "o: y"]


@pytest.mark.parametrize(
    ("queries", "documents", "told"),
    [
        ([], ["a"], "query must have at least one"),
        (["q"], [], "texts must have at least one"),
        (["p", "q"], ["a", "b", "c"], "query must be one text, or as many as texts: there are 2 and 3"),
        (["q"], ["a"] * (MAX_INPUTS + 1), f"at most {MAX_INPUTS}"),
    ],
)
def test_counts(queries: list[str], documents: list[str], told: str) -> None:
    with pytest.raises(ApiError, match=told):
        plan_scores(pooling_processor(), queries, documents, api="score", names=("query", "texts"))


def test_models_that_make_no_scores() -> None:
    with pytest.raises(ApiError, match="'tiny-llama' has 3 labels") as caught:
        plan_scores(pooling_processor(CLASSIFIER), ["q"], ["a"], api="score")
    assert caught.value.code == "task_not_supported"
    with pytest.raises(ApiError, match="one for generate"):
        plan_scores(pooling_processor(TEXT_ALONE), ["q"], ["a"], api="score")


def test_equal_scores_keep_their_order() -> None:
    scores = np.array([0.5, 0.9, 0.5, 0.9, 0.1], np.float32)
    assert ranking(scores).tolist() == [1, 3, 0, 2, 4]
    assert ranking(scores, 3).tolist() == [1, 3, 0]
