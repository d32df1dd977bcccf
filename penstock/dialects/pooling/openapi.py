"""The OpenAPI description of vLLM's ``/pooling``, ``/classify`` and ``/score``."""

from __future__ import annotations

from penstock.dialects.embeddings.openapi import pooled_list
from penstock.dialects.openapi_schema import (
    COUNT,
    GENERATION_ERRORS,
    NUMBER,
    REQUEST_ID,
    STRING,
    ApiDescription,
    Route,
    listed,
    or_null,
    shape,
)
from penstock.dialects.pooling.request_schema import (
    UNSUPPORTED_CLASSIFY,
    UNSUPPORTED_SCORE,
    UNSUPPORTED_TASK,
    ClassifyRequest,
    PoolingTaskRequest,
    ScoreRequest,
)

_POOLING = Route(
    method="post",
    path="/pooling",
    tag="Vectors",
    operation="pool",
    summary="What the model makes of texts",
    reply="Pooled",
    errors=GENERATION_ERRORS,
    parameters=(REQUEST_ID,),
    body="PoolingTaskRequest",
    example={"input": ["Hello", "Good morning"]},
    matrix=True,
)
_SCORE = _POOLING._replace(
    path="/score",
    operation="score",
    summary="Score documents for queries",
    reply="Scores",
    matrix=False,
    body="ScoreRequest",
    example={"queries": "What is a heron?", "documents": ["A bird.", "A fish."]},
)
DESCRIPTIONS = (
    ApiDescription(
        route=_POOLING,
        request=PoolingTaskRequest,
        unsupported=UNSUPPORTED_TASK,
        replies={
            "PooledInput": shape(
                "What has been made of an input.",
                {
                    "index": COUNT,
                    "object": {"type": "string", "const": "pooling"},
                    "data": {
                        "description": "Numbers, a list of them for each token, or base64.",
                        "anyOf": [listed(NUMBER), listed(listed(NUMBER)), STRING],
                    },
                },
            ),
            "Pooled": pooled_list("What has been made of the inputs, in their order.", "PooledInput"),
        },
    ),
    ApiDescription(
        route=_POOLING._replace(
            path="/classify",
            operation="classify",
            summary="Label texts",
            reply="Classified",
            matrix=False,
            body="ClassifyRequest",
        ),
        request=ClassifyRequest,
        unsupported=UNSUPPORTED_CLASSIFY,
        replies={
            "ClassifiedInput": shape(
                "The labels of an input.",
                {"index": COUNT, "label": or_null(STRING), "probs": listed(NUMBER), "num_classes": COUNT},
            ),
            "Classified": pooled_list("The labels of the inputs, in their order.", "ClassifiedInput"),
        },
    ),
    ApiDescription(
        route=_SCORE,
        request=ScoreRequest,
        unsupported=UNSUPPORTED_SCORE,
        replies={
            "Score": shape(
                "How well a document fits its query.",
                {"index": COUNT, "object": {"type": "string", "const": "score"}, "score": NUMBER},
            ),
            "Scores": pooled_list("The scores of the documents, in their order.", "Score"),
        },
        more_routes=(_SCORE._replace(path="/v1/score", operation="scoreOfV1"),),
    ),
)
