"""Replies of rerank routes: documents, the best one first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.dialects.rerank.request_schema import RerankDocument
from penstock.generation.pooling.dialect import PoolingBody
from penstock.generation.pooling.plan import PooledInputs, PoolingPlan
from penstock.generation.pooling.scoring import ranking, scores_of
from penstock.generation.pooling.vector_text import joined, json_pieces, number_texts
from penstock.http.errors import encode_json


class RerankFields(NamedTuple):
    """What the reply needs of the request."""

    of_tei: bool
    """Whether the request, and so the reply, has TEI's shape."""
    top: int | None
    """How many documents are returned; None: all."""
    documents: Sequence[RerankDocument] | None
    """As the request has them; None: they are not returned."""


def rerank_reply(plan: PoolingPlan, pooled: PooledInputs, request_id: str, *, version: int) -> PoolingBody:
    """The fields of vLLM's and Jina's reply and of Cohere's, whose version ``version`` is the route's. Raises
    ApiError."""
    tokens = pooled.usage.prompt_tokens
    head = {
        "id": f"rerank-{plan.request_id or request_id}",
        "object": "list",
        "model": plan.model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "meta": {
            "api_version": {"version": str(version)},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": tokens},
        },
    }
    return PoolingBody(json_pieces(encode_json(head)[:-1], b',"results":[', _results(plan, pooled), b"]}"))


def ranked_texts(plan: PoolingPlan, pooled: PooledInputs) -> PoolingBody:
    """TEI's reply. Raises ApiError."""
    return PoolingBody(json_pieces(b"[", _results(plan, pooled), b"]"))


def _results(plan: PoolingPlan, pooled: PooledInputs) -> Iterator[bytes]:
    """Raises ApiError, at once."""
    fields: RerankFields = plan.fields.fields
    scores = scores_of(plan, pooled)
    texts = number_texts(scores)
    order = ranking(scores, fields.top).tolist()
    return joined(_result(index, texts[index], fields) for index in order)


def _result(index: int, score: bytes, fields: RerankFields) -> bytes:
    document = b""
    if fields.documents is not None:
        given = fields.documents[index]
        if fields.of_tei:
            document = b',"text":%b' % encode_json(given)
        else:
            document = b',"document":%b' % encode_json({"text": given} if isinstance(given, str) else given)
    name = b"score" if fields.of_tei else b"relevance_score"
    return b'{"index":%d%b,"%b":%b}' % (index, document, name, score)
