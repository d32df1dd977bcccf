"""The OpenAPI description of Cohere's routes for vectors."""

from __future__ import annotations

from penstock.dialects.cohere.request_schema import UNSUPPORTED, CohereEmbedRequest
from penstock.dialects.openapi_schema import (
    GENERATION_ERRORS,
    INTEGER,
    NUMBER,
    REQUEST_ID,
    STRING,
    ApiDescription,
    Route,
    listed,
    shape,
)

_NUMBERS, _INTEGERS = listed(listed(NUMBER)), listed(listed(INTEGER))
_EMBED = Route(
    method="post",
    path="/v2/embed",
    tag="Vectors",
    operation="embedAsCohere",
    summary="Make vectors of texts, as Cohere's version 2 does",
    reply="CohereEmbeddings",
    errors=GENERATION_ERRORS,
    parameters=(REQUEST_ID,),
    body="CohereEmbedRequest",
    example={"texts": ["Hello"], "input_type": "search_document", "embedding_types": ["float"]},
    error="CohereError",
)
DESCRIPTION = ApiDescription(
    route=_EMBED,
    request=CohereEmbedRequest,
    unsupported=UNSUPPORTED,
    replies={
        "CohereEmbeddings": shape(
            "The vectors, in the order of the inputs.",
            {
                "id": STRING,
                "embeddings": {
                    "description": "By type; of version 1 without embedding_types, lists of numbers.",
                    "anyOf": [
                        shape(
                            "Those that were asked for.",
                            {},
                            float=_NUMBERS,
                            base64=listed(STRING),
                            **dict.fromkeys(("int8", "uint8", "binary", "ubinary"), _INTEGERS),
                        ),
                        _NUMBERS,
                    ],
                },
                "texts": listed(STRING),
            },
            response_type={"type": "string", "enum": ["embeddings_by_type", "embeddings_floats"]},
            meta={"type": "object", "description": "Version and counts."},
        ),
        "CohereError": shape("Why a request failed.", {"message": STRING}, id=STRING),
    },
    more_routes=(
        _EMBED._replace(
            path="/v1/embed", operation="embedAsCohereV1", summary="The same, as Cohere's version 1 does"
        ),
    ),
)
