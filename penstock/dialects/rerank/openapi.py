"""The OpenAPI description of rerank routes."""

from __future__ import annotations

from penstock.dialects.openapi_schema import (
    COUNT,
    GENERATION_ERRORS,
    NUMBER,
    REQUEST_ID,
    STRING,
    ApiDescription,
    Route,
    listed,
    ref,
    shape,
)
from penstock.dialects.rerank.request_schema import UNSUPPORTED, RerankRequest

_RERANK = Route(
    method="post",
    path="/rerank",
    tag="Vectors",
    operation="rerank",
    summary="Order documents by their relevance to a query, as vLLM, Infinity and TEI do",
    reply="RankedOrTexts",
    errors=GENERATION_ERRORS,
    parameters=(REQUEST_ID,),
    body="RerankRequest",
    example={"query": "What is a pipe?", "documents": ["It carries water.", "It rains."], "top_n": 1},
)
DESCRIPTION = ApiDescription(
    route=_RERANK,
    request=RerankRequest,
    unsupported=UNSUPPORTED,
    replies={
        "RankedDocument": shape(
            "A document.",
            {"index": COUNT, "relevance_score": NUMBER},
            document={"type": "object", "description": "As the request has it, a text as the field text."},
        ),
        "Ranked": shape(
            "Documents, the best one first.",
            {"id": STRING, "model": STRING, "results": listed(ref("RankedDocument"))},
            object={"type": "string", "const": "list"},
            usage=shape("Tokens.", {"prompt_tokens": COUNT, "total_tokens": COUNT}),
            meta={"type": "object", "description": "Cohere's version and counts."},
        ),
        "RankedTexts": {
            "description": "Texts, the best one first.",
            **listed(shape("A text.", {"index": COUNT, "score": NUMBER}, text=STRING)),
        },
        "RankedOrTexts": {
            "description": "Documents; of a request with texts, TEI's list. The best one is first.",
            "anyOf": [ref("Ranked"), ref("RankedTexts")],
        },
    },
    more_routes=(
        _RERANK._replace(
            path="/v1/rerank", operation="rerankAsJina", summary="The same, as Jina and Cohere's version 1 do"
        ),
        _RERANK._replace(
            path="/v2/rerank",
            operation="rerankAsCohere",
            summary="The same, as Cohere's version 2 does",
            error="CohereError",
        ),
    ),
)
