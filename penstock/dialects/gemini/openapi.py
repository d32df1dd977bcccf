"""The OpenAPI description of Gemini's routes."""

from __future__ import annotations

from penstock.dialects.gemini.request_schema import (
    GeminiCount,
    GeminiEmbedBatch,
    GeminiEmbedRequest,
    GeminiRequest,
)
from penstock.dialects.openapi_schema import (
    BODY_ERRORS,
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

_MODEL: Schema = {
    "in": "path",
    "name": "model",
    "required": True,
    "description": "A served name.",
    "schema": {"type": "string", "minLength": 1},
}
_EXAMPLE = {"contents": [{"parts": [{"text": "Say hello"}]}], "generationConfig": {"maxOutputTokens": 32}}
_GENERATE = Route(
    method="post",
    path="/v1beta/models/{model}:generateContent",
    tag="Gemini",
    operation="generateAsGemini",
    summary="Answer a conversation, as Gemini does",
    reply="GeminiReply",
    errors=GENERATION_ERRORS,
    parameters=(_MODEL, REQUEST_ID),
    body="GeminiRequest",
    example=_EXAMPLE,
    error="GeminiError",
)
_CONTENT = shape("A turn.", {"role": STRING, "parts": listed({"type": "object"})})
_EMBED = _GENERATE._replace(
    path="/v1beta/models/{model}:embedContent",
    operation="embedAsGemini",
    summary="Make the vector of a text, as Gemini does",
    reply="GeminiVector",
    body="GeminiEmbedRequest",
    example={"content": {"parts": [{"text": "Hello"}]}},
)
_TEXT = ApiDescription(
    route=_GENERATE,
    request=GeminiRequest,
    unsupported=(),
    replies={
        "GeminiReply": shape(
            "A reply, or a piece of it.",
            {
                "candidates": listed(
                    shape(
                        "An output, or a piece of it.",
                        {"index": COUNT, "content": _CONTENT},
                        finishReason=STRING,
                        avgLogprobs=NUMBER,
                        logprobsResult={"type": "object"},
                    )
                ),
                "modelVersion": STRING,
                "responseId": STRING,
            },
            usageMetadata={"type": "object"},
        ),
        "GeminiReplies": {"description": "Pieces of a reply.", **listed(ref("GeminiReply"))},
        "GeminiCounted": shape("Tokens.", {"totalTokens": COUNT}),
        "GeminiModel": shape("A model.", {"name": STRING, "inputTokenLimit": COUNT}),
        "GeminiModels": shape("Models.", {"models": listed(ref("GeminiModel"))}),
        "GeminiError": shape(
            "Why a request failed.",
            {"error": shape("The error.", {"code": COUNT, "message": STRING, "status": STRING})},
        ),
    },
    more_routes=(
        _GENERATE._replace(
            path="/v1beta/models/{model}:streamGenerateContent",
            operation="streamAsGemini",
            summary="The same as a JSON array, or with alt=sse as server-sent events",
            reply="GeminiReplies",
            parameters=(
                _MODEL,
                REQUEST_ID,
                {"in": "query", "name": "alt", "schema": {"enum": ["sse", "json"]}},
            ),
        ),
        _GENERATE._replace(
            path="/v1beta/models/{model}:countTokens",
            operation="countAsGemini",
            summary="Count the tokens of a conversation",
            reply="GeminiCounted",
            errors=BODY_ERRORS,
            parameters=(_MODEL,),
            body="GeminiCount",
        ),
        Route("get", "/v1beta/models", "Gemini", "modelsAsGemini", "List models", "GeminiModels"),
        Route(
            "get",
            "/v1beta/models/{model}",
            "Gemini",
            "modelAsGemini",
            "Describe a model",
            "GeminiModel",
            errors=(404,),
            parameters=(_MODEL,),
            error="GeminiError",
        ),
    ),
    more_requests=(GeminiCount,),
)
DESCRIPTIONS = (
    _TEXT,
    ApiDescription(
        route=_EMBED,
        request=GeminiEmbedRequest,
        unsupported=(),
        replies={
            "GeminiValues": shape("The values of a vector.", {"values": listed(NUMBER)}),
            "GeminiVector": shape("A vector.", {"embedding": ref("GeminiValues")}),
            "GeminiVectors": shape("Vectors.", {"embeddings": listed(ref("GeminiValues"))}),
        },
        more_routes=(
            _EMBED._replace(
                path="/v1beta/models/{model}:batchEmbedContents",
                operation="embedTextsAsGemini",
                summary="Make vectors of texts, as Gemini does",
                reply="GeminiVectors",
                body="GeminiEmbedBatch",
                example={"requests": [{"content": {"parts": [{"text": "Hello"}]}}]},
            ),
        ),
        more_requests=(GeminiEmbedBatch,),
    ),
)
