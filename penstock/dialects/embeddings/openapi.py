"""The OpenAPI description of ``/v1/embeddings``."""

from __future__ import annotations

from penstock.dialects.embeddings.request_schema import UNSUPPORTED, EmbeddingRequest
from penstock.dialects.openapi_schema import (
    COUNT,
    GENERATION_ERRORS,
    NUMBER,
    REQUEST_ID,
    STRING,
    ApiDescription,
    Route,
    Schema,
    listed,
    ref,
    shape,
)


def pooled_list(description: str, item: str) -> Schema:
    """Schema of a list of what has been made of inputs."""
    required = {
        "id": STRING,
        "object": {"type": "string", "const": "list"},
        "created": {"type": "integer", "description": "Seconds since 1970."},
        "model": STRING,
        "data": listed(ref(item)),
        "usage": ref("Usage"),
    }
    return shape(description, required)


VECTOR: Schema = {
    "description": "Numbers; with base64, the bytes of the vector.",
    "anyOf": [listed(NUMBER), STRING],
}
DESCRIPTION = ApiDescription(
    route=Route(
        method="post",
        path="/v1/embeddings",
        tag="Vectors",
        operation="createEmbedding",
        summary="Make vectors of texts",
        reply="Embeddings",
        errors=GENERATION_ERRORS,
        parameters=(REQUEST_ID,),
        body="EmbeddingRequest",
        example={"input": ["Hello", "Good morning"]},
        matrix=True,
    ),
    request=EmbeddingRequest,
    unsupported=UNSUPPORTED,
    replies={
        "Embedding": shape(
            "The vector of an input.",
            {"index": COUNT, "object": {"type": "string", "const": "embedding"}, "embedding": VECTOR},
        ),
        "Embeddings": pooled_list("The vectors, in the order of the inputs.", "Embedding"),
    },
)
