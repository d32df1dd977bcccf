"""The routes that are relayed: those that infer, and those that describe models.

All others are refused. Model servers have many routes that administer them (sleep, load weights, abort
requests, change settings), each release has new ones, and a server may have them below a root path as well.
Which endpoint such a request would reach is undefined, and the gateway's own key for its endpoints must not
grant them to clients.
"""

from __future__ import annotations

from penstock.http.errors import ApiError

_V1_FAMILIES = frozenset(
    {
        "audio",
        "batches",
        "chat",
        "classify",
        "completions",
        "conversations",
        "detokenize",
        "embeddings",
        "files",
        "images",
        "messages",
        "moderations",
        "pooling",
        "realtime",
        "rerank",
        "reranking",
        "responses",
        "score",
        "tokenize",
        "uploads",
        "vector_stores",
        "videos",
    }
)
"""APIs of OpenAI, Anthropic and Jina: ``/v1/NAME`` and what is below it."""
_ROUTES = frozenset(
    {
        "/apply-template",
        "/chat_tokenize",
        "/classify",
        "/completion",
        "/detokenize",
        "/embed",
        "/embed_sparse",
        "/embedding",
        "/embeddings",
        "/encode",
        "/generate",
        "/generate_stream",
        "/inference/v1/generate",
        "/infill",
        "/invocations",
        "/pooling",
        "/predict",
        "/rerank",
        "/reranking",
        "/score",
        "/tokenize",
        "/v2/embed",
        "/v2/rerank",
    }
)
"""Other inference routes of vLLM, SGLang, llama.cpp and TGI."""
_READ_ROUTES = frozenset(
    {
        "/",
        "/docs",
        "/get_model_info",
        "/health",
        "/health_generate",
        "/info",
        "/metrics",
        "/model_info",
        "/models",
        "/openapi.json",
        "/ping",
        "/ready",
        "/tokenizer_info",
        "/v1/health",
        "/v1/models",
        "/version",
    }
)
"""Relayed only if they read: below some of them servers load and unload models. Health, metrics and version
are the gateway's own on its port, and the model server's behind Envoy."""
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


def check_relayed(method: str, path: str) -> None:
    """Refuse a request that no endpoint is to get. ``path`` is decoded once; what is still encoded, or leads
    upwards, may be another route for the endpoint. Raises ApiError."""
    if not _is_relayed(method, path):
        raise ApiError(
            403,
            f"The gateway does not relay {method} {path[:200]}, only inference routes such as "
            "POST /v1/chat/completions, and GET /v1/models. Routes that administer one model server are for "
            "those who can reach it directly.",
            code="administrative",
        )


def _is_relayed(method: str, path: str) -> bool:
    if path in _ROUTES:
        return True
    if path in _READ_ROUTES:
        return method in _READING or path == "/ping"
    if not path.startswith("/v1/") or "%" in path or "\\" in path:
        return False
    below = path.removeprefix("/v1/").split("/")
    if not {".", ".."}.isdisjoint(below):
        return False
    return below[0] in _V1_FAMILIES or (below[0] == "models" and method in _READING)
