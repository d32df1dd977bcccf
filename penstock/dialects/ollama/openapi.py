"""The OpenAPI description of Ollama's routes."""

from __future__ import annotations

from penstock.dialects.ollama.request_schema import (
    UNSUPPORTED,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from penstock.dialects.openapi_schema import (
    BODY_ERRORS,
    COUNT,
    FLAG,
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
from penstock.http.sink import LINES

_CALLS = listed(
    shape(
        "A call.",
        {
            "function": shape(
                "What is called.", {"name": STRING, "arguments": {"type": "object"}}, index=COUNT
            )
        },
        id=STRING,
    )
)
_MESSAGE = shape("The message.", {"role": STRING, "content": STRING}, thinking=STRING, tool_calls=_CALLS)
_ENDING = {
    "done_reason": {"type": "string", "enum": ["stop", "length", "abort", "load", "unload"]},
    **dict.fromkeys(("total_duration", "load_duration", "prompt_eval_count"), COUNT),
    **dict.fromkeys(("prompt_eval_duration", "eval_count", "eval_duration"), COUNT),
    "logprobs": listed(ref("TokenLogprob")),
}
_START = {"model": STRING, "created_at": STRING, "done": FLAG}
_CHAT = Route(
    method="post",
    path="/api/chat",
    tag="Ollama",
    operation="chatAsOllama",
    summary="Answer a conversation, as Ollama does",
    reply="OllamaChatReply",
    errors=GENERATION_ERRORS,
    parameters=(REQUEST_ID,),
    body="OllamaChatRequest",
    example={"messages": [{"role": "user", "content": "Say hello"}], "options": {"num_predict": 32}},
    events="OllamaChatReply",
    error="OllamaError",
    stream=LINES.content_type,
    stream_about="Objects, one a line; the last one is done. By default, and with stream.",
)
_LIST = Route("get", "/api/tags", "Ollama", "tagsAsOllama", "List models, as Ollama does", "OllamaModels")
_EMBED = _CHAT._replace(
    path="/api/embed",
    operation="embedAsOllama",
    summary="Make vectors of texts, as Ollama does",
    reply="OllamaVectors",
    body="OllamaEmbedRequest",
    example={"input": ["Hello", "Good morning"]},
    events=None,
)
DESCRIPTIONS = (
    ApiDescription(
        route=_CHAT,
        request=OllamaChatRequest,
        unsupported=(),
        replies={
            "OllamaChatReply": shape(
                "A message, or a piece of it.", {**_START, "message": _MESSAGE}, **_ENDING
            ),
            "OllamaModels": shape("Models.", {"models": listed({"type": "object"})}),
            "OllamaModel": shape("A model.", {"details": {"type": "object"}, "capabilities": listed(STRING)}),
            "OllamaError": shape("Why a request failed.", {"error": STRING}),
        },
        more_routes=(
            _LIST,
            _LIST._replace(path="/api/ps", operation="psAsOllama", summary="List running models"),
            _LIST._replace(
                path="/api/version",
                operation="versionAsOllama",
                summary="The version of Ollama whose API is served",
                reply="Version",
            ),
            _LIST._replace(
                method="post",
                path="/api/show",
                operation="showAsOllama",
                summary="Describe a model",
                reply="OllamaModel",
                body="OllamaShowRequest",
                example={"model": "m"},
                errors=BODY_ERRORS,
                error="OllamaError",
            ),
        ),
        more_requests=(OllamaShowRequest,),
    ),
    ApiDescription(
        route=_CHAT._replace(
            path="/api/generate",
            operation="generateAsOllama",
            summary="Answer or complete a prompt, as Ollama does",
            reply="OllamaGenerateReply",
            body="OllamaGenerateRequest",
            example={"prompt": "Say hello", "options": {"num_predict": 32}},
            events="OllamaGenerateReply",
        ),
        request=OllamaGenerateRequest,
        unsupported=UNSUPPORTED,
        replies={
            "OllamaGenerateReply": shape(
                "A text, or a piece of it.",
                {**_START, "response": STRING},
                thinking=STRING,
                tool_calls=_CALLS,
                **_ENDING,
            )
        },
    ),
    ApiDescription(
        route=_EMBED,
        request=OllamaEmbedRequest,
        unsupported=(),
        replies={
            "OllamaVectors": shape(
                "The vectors, in the order of the inputs.",
                {"model": STRING, "embeddings": listed(listed(NUMBER))},
                total_duration=COUNT,
                load_duration=COUNT,
                prompt_eval_count=COUNT,
            ),
            "OllamaVector": shape("A vector.", {"embedding": listed(NUMBER)}),
        },
        more_routes=(
            _EMBED._replace(
                path="/api/embeddings",
                operation="embeddingsAsOllama",
                summary="Make the vector of a text, as Ollama did",
                reply="OllamaVector",
                body="OllamaEmbeddingsRequest",
                example={"prompt": "Hello"},
            ),
        ),
        more_requests=(OllamaEmbeddingsRequest,),
    ),
)
