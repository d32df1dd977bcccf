"""The OpenAPI description of TEI's routes."""

from __future__ import annotations

from penstock.dialects.openapi_schema import (
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
from penstock.dialects.tei.request_schema import (
    TeiEmbedRequest,
    TeiPredictRequest,
    TeiSimilarityRequest,
    TeiTextsRequest,
)
from penstock.generation.pooling.request_fields import UNSUPPORTED_POOLING

_EMBED = Route(
    method="post",
    path="/embed",
    tag="Vectors",
    operation="embedAsTei",
    summary="Make vectors of texts, as TEI does",
    reply="TeiVectors",
    errors=GENERATION_ERRORS,
    parameters=(REQUEST_ID,),
    body="TeiEmbedRequest",
    example={"inputs": ["Hello"]},
    error="TeiError",
)
DESCRIPTION = ApiDescription(
    route=_EMBED,
    request=TeiEmbedRequest,
    unsupported=UNSUPPORTED_POOLING,
    replies={
        "TeiVectors": {"description": "A vector of each input.", **listed(listed(NUMBER))},
        "TeiTokenVectors": {
            "description": "For each input a vector of each token.",
            **listed(listed(listed(NUMBER))),
        },
        "TeiLabels": {
            "description": "Labels of an input.",
            **listed(shape("A label.", {"score": NUMBER, "label": STRING})),
        },
        "TeiPredictions": {
            "description": "Labels of the input, or of each input of a list, the likeliest one first.",
            "anyOf": [ref("TeiLabels"), listed(ref("TeiLabels"))],
        },
        "TeiCosines": {"description": "The cosine of each sentence.", **listed(NUMBER)},
        "TeiError": shape("Why a request failed.", {"error": STRING, "error_type": STRING}),
    },
    more_routes=(
        _EMBED._replace(
            path="/embed_all",
            operation="embedTokensAsTei",
            summary="Make a vector of each token",
            reply="TeiTokenVectors",
            body="TeiTextsRequest",
        ),
        _EMBED._replace(
            path="/predict",
            operation="predictAsTei",
            summary="Label texts or pairs of texts, as TEI does",
            reply="TeiPredictions",
            body="TeiPredictRequest",
        ),
        _EMBED._replace(
            path="/similarity",
            operation="compareAsTei",
            summary="Compare a sentence with others by their vectors, as TEI does",
            reply="TeiCosines",
            body="TeiSimilarityRequest",
            example={"inputs": {"source_sentence": "Hello", "sentences": ["Hi", "Bye"]}},
        ),
    ),
    more_requests=(TeiTextsRequest, TeiPredictRequest, TeiSimilarityRequest),
)
