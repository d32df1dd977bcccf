"""Plans and replies of rerank routes, without an engine and without a connection."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.dialects.rerank.dialect import Rerank, RerankV1, RerankV2
from penstock.generation.pooling.dialect import PoolingDialect
from penstock.http.errors import ApiError
from tests.generation.pooling.planning import (
    CLASSIFIER,
    CLASSIFY,
    CROSS_ENCODER,
    EMBED,
    TEXT_ALONE,
    json_of,
    plan_of,
    pooled_of,
    pooling_processor,
)

CROSS, VECTORS = pooling_processor(CROSS_ENCODER), pooling_processor()
ROUTES = [Rerank(CROSS), RerankV1(CROSS), RerankV2(CROSS)]
PLAIN, JINA, COHERE = ROUTES


def refusal(dialect: PoolingDialect = PLAIN, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        plan_of(dialect, **{"query": "q", "documents": ["a"]} | fields)
    assert caught.value.status == 400
    return caught.value


def reply(dialect: PoolingDialect, values: list[list[float]], **fields: Any) -> Any:
    plan = plan_of(dialect, **{"query": "q"} | fields)
    return json_of(dialect.reply(plan, pooled_of(values), "abc"))


def test_a_cross_encoder_reads_pairs() -> None:
    for dialect in ROUTES:
        plan = plan_of(dialect, query="q", documents=["a", {"text": "b", "more": 1}])
        assert (plan.task, plan.inputs) == (CLASSIFY, [("q", "a"), ("q", "b")])
        assert plan.activate
        assert plan.field == "documents"


def test_an_embedder_reads_the_query_and_the_documents() -> None:
    dialect = RerankV1(VECTORS)
    plan = plan_of(dialect, query="q", documents=["a", "b"])
    assert (plan.task, plan.inputs) == (EMBED, ["q", "a", "b"])
    body = json_of(dialect.reply(plan, pooled_of([[1, 0, 0, 0], [0.6, 0.8, 0, 0], [0.8, 0.6, 0, 0]]), "abc"))
    assert [(each["index"], each["relevance_score"]) for each in body["results"]] == [(1, 0.8), (0, 0.6)]


@pytest.mark.parametrize("dialect", ROUTES)
def test_the_best_document_is_first(dialect: PoolingDialect) -> None:
    body = reply(dialect, [[0.25], [0.75], [0.5], [0.75]], documents=list("abcd"))
    assert [each["index"] for each in body["results"]] == [1, 3, 2, 0]
    assert [each["relevance_score"] for each in body["results"]] == [0.75, 0.75, 0.5, 0.25]
    assert body["id"] == "rerank-abc"
    assert body["model"] == "tiny-llama"
    assert body["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
    assert body["meta"]["api_version"]["version"] == ("2" if dialect is COHERE else "1")
    assert body["meta"]["tokens"] == {"input_tokens": 12}
    short = reply(dialect, [[0.25], [0.75]], documents=["a", "b"], top_n=1)
    assert [each["index"] for each in short["results"]] == [1]
    assert len(reply(dialect, [[0.25], [0.75]], documents=["a", "b"], top_n=0)["results"]) == 2
    assert len(reply(dialect, [[0.25], [0.75]], documents=["a", "b"], top_n=9)["results"]) == 2


def test_documents_in_results() -> None:
    given = ["text", {"text": "t", "id": 7}]
    shown = [{"text": "text"}, {"text": "t", "id": 7}]
    for dialect, asked, expected in (
        (PLAIN, None, shown),
        (JINA, True, shown),
        (JINA, False, [None, None]),
        (COHERE, None, [None, None]),
        (COHERE, True, shown),
    ):
        body = reply(dialect, [[0.75], [0.5]], documents=given, return_documents=asked)
        assert [each.get("document") for each in body["results"]] == expected


def test_texts_of_documents() -> None:
    documents = [
        {"title": "T", "text": "x", "body": "B"},
        {"body": "only"},
    ]
    plan = plan_of(PLAIN, query="q", documents=documents, rank_fields=["body", "title"])
    assert [pair[1] for pair in plan.inputs] == ["B\nT", "only"]
    parts = {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    plan = plan_of(PLAIN, query=parts, documents=[parts, "c"])
    assert plan.inputs == [("a\nb", "a\nb"), ("a\nb", "c")]


def test_truncation() -> None:
    def cut(dialect: PoolingDialect, **fields: Any) -> tuple[int | None, bool]:
        plan = plan_of(dialect, query="q", documents=["a"], **fields)
        return plan.truncate, plan.truncate_left

    assert cut(PLAIN) == cut(JINA) == (None, False)
    assert cut(COHERE) == (2048, False)
    assert cut(PLAIN, truncate_prompt_tokens=9, truncation_side="left") == (9, True)
    assert cut(PLAIN, truncate_prompt_tokens=-1) == (2048, False)
    assert cut(JINA, max_tokens_per_doc=0, max_tokens_per_query=0) == (None, False)
    assert cut(JINA, max_chunks_per_doc=1) == (2048, False)
    assert cut(JINA, max_chunks_per_doc=10) == (None, False)
    query = CROSS.inputs.count_tokens("q", most=9)
    assert cut(COHERE, max_tokens_per_doc=5) == (5 + query, False)
    assert cut(RerankV2(VECTORS), max_tokens_per_doc=5) == (5, False)
    assert cut(COHERE, max_tokens_per_doc=4096) == (2048, False)


def test_scores_as_they_are() -> None:
    assert not plan_of(PLAIN, query="q", documents=["a"], raw_scores=True).activate
    assert not plan_of(PLAIN, query="q", documents=["a"], use_activation=False).activate


def test_teis_texts() -> None:
    plan = plan_of(PLAIN, query="q", texts=["a", "b"], raw_scores=True, truncation_direction="Left")
    assert (plan.inputs, plan.field) == ([("q", "a"), ("q", "b")], "texts")
    assert (plan.activate, plan.truncate, plan.truncate_left) == (False, 2048, True)
    assert plan_of(PLAIN, query="q", texts=["a"], truncate=False).truncate is None
    assert reply(PLAIN, [[0.25], [0.75]], texts=["a", "b"]) == [
        {"index": 1, "score": 0.75},
        {"index": 0, "score": 0.25},
    ]
    assert reply(PLAIN, [[0.25]], texts=['"'], return_text=True) == [{"index": 0, "text": '"', "score": 0.25}]


@pytest.mark.parametrize(
    ("fields", "field", "word"),
    [
        ({"query": None}, "query", "missing"),
        ({"documents": None}, "documents", "needed"),
        ({"texts": ["a"]}, "documents", "One of"),
        ({"documents": []}, "documents", "at least one"),
        ({"documents": [{"image": "x"}]}, "documents[0]", "no text"),
        ({"documents": ["a", {"title": "x"}], "rank_fields": ["text"]}, "documents[1]", "rank_fields"),
        ({"documents": [{"content": [{"type": "image_url"}]}]}, "documents[0].content[0]", "text"),
        ({"query": {"text": 3}}, "query", "no text"),
        ({"top_n": -1}, "top_n", "at least 0"),
        ({"top_k": 3}, "top_k", "top_n"),
        ({"max_tokens_per_doc": -1}, "max_tokens_per_doc", "at least 0"),
        ({"truncation_side": "middle"}, "truncation_side", "left"),
        ({"texts": ["a"], "documents": None, "truncation_direction": "up"}, "truncation_direction", "left"),
        ({"relevant_spans": {}, "documents": ["a"]}, None, ""),
        ({"relevant_spans": {"max": 1}}, "relevant_spans", "not supported"),
        ({"instruction": "Rank."}, "instruction", "query"),
        ({"max_tokens_per_query": 5}, "max_tokens_per_query", "absent"),
        ({"return_embeddings": True}, "return_embeddings", "not supported"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], field: str | None, word: str) -> None:
    if field is None:
        plan_of(PLAIN, query="q", **fields)
        return
    error = refusal(**fields)
    assert error.param == field
    assert word in error.message


def test_models_that_cannot_score() -> None:
    assert refusal(Rerank(pooling_processor(CLASSIFIER))).code == "task_not_supported"
    assert refusal(Rerank(pooling_processor(TEXT_ALONE))).code == "task_not_supported"


def test_errors_have_the_shapes_that_clients_read() -> None:
    body = json.loads(COHERE.error_body(ApiError(400, "No."), "abc"))
    assert body == {"id": "abc", "message": "No."}
    body = json.loads(PLAIN.error_body(ApiError(400, "No."), "abc"))
    assert body["error"]["message"] == body["detail"] == "No."
