"""The APIs that the gateway knows, for text and for vectors, and the shape of its own errors in each."""

from __future__ import annotations

import msgspec

from penstock.dialects.cohere.errors import cohere_error
from penstock.dialects.gemini.errors import error_body as gemini_error
from penstock.dialects.messages import errors as messages_errors
from penstock.dialects.tei.errors import tei_error
from penstock.gateway.requests.gemini_path import BATCH_EMBED, EMBED, GENERATE, STREAM
from penstock.gateway.requests.named_response import COMPACT, RESPONSES
from penstock.http.errors import ApiError

OLLAMA, GEMINI = "ollama", "gemini"
APIS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    RESPONSES: "responses",
    COMPACT: "responses",
    "/v1/messages": "messages",
    "/api/chat": OLLAMA,
    "/api/generate": OLLAMA,
    GENERATE: GEMINI,
    STREAM: GEMINI,
}
"""Names by the path of their requests."""
_VECTOR_PATHS = {
    "embeddings": ("/v1/embeddings", "/embeddings", "/embedding"),
    "rerank": ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"),
    "score": ("/score", "/v1/score"),
    "classify": ("/classify", "/v1/classify"),
    "pooling": ("/pooling", "/v1/pooling"),
    "cohere": ("/v1/embed", "/v2/embed"),
    "tei": ("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity"),
    OLLAMA: ("/api/embed", "/api/embeddings"),
    GEMINI: (EMBED, BATCH_EMBED),
}
VECTOR_APIS = {path: name for name, paths in _VECTOR_PATHS.items() for path in paths}
"""Names of those that make vectors, scores or labels, by the path of their requests. These have input tokens
alone, and their replies, which may be of many megabytes, are not read but for their usage."""
OTHER_API = "other"
OLLAMA_ROUTES = "/api/"
"""With which the routes of Ollama's API begin."""
GEMINI_ROUTES = "/v1beta/"
_COHERE = frozenset({*_VECTOR_PATHS["cohere"], "/v2/rerank"})
_TEI = frozenset(_VECTOR_PATHS["tei"])


def gateway_error(status: int, code: str, message: str) -> ApiError:
    """An error made by the gateway."""
    return ApiError(status, f"gateway: {message}", type="gateway_error", code=code)


def error_body(error: ApiError, request_id: str, *, messages: bool, path: str = "") -> bytes:
    """``messages``: in Anthropic's shape. ``path``: whose API may have a shape of its own."""
    if path.startswith(OLLAMA_ROUTES):
        return msgspec.json.encode({"error": error.message})
    if path.startswith(GEMINI_ROUTES):
        return gemini_error(error)
    if path in _COHERE:
        return cohere_error(error, request_id)
    if path in _TEI:
        return tei_error(error, request_id)
    return messages_errors.error_body(error, request_id) if messages else error.body()


def error_event(error: ApiError, request_id: str, *, messages: bool, path: str = "") -> bytes:
    """An error event that clients of every dialect recognize: those of completions and chat by ``error``,
    those of responses by the same, or by the event's type and its own fields, those of messages by their
    shape. The empty line ends an incomplete event."""
    if path.startswith(OLLAMA_ROUTES):
        return b"\n%b\n" % error_body(error, request_id, messages=False, path=path)
    if path.startswith(GEMINI_ROUTES):  # whose clients look for it outside of events
        return b"\n\n%b\n\n" % gemini_error(error)
    if messages:
        data = messages_errors.error_body(error, request_id)
    else:
        fields = error.fields()
        data = msgspec.json.encode({"type": "error", "error": fields} | {**fields, "type": "error"})
    return b"\n\nevent: error\ndata: %b\n\n" % data


_REFUSALS = {408: "late", 431: "headers_too_large"}
"""Why a request is rejected, by the status of errors without a code; all others are malformed."""


def rejection_reason(error: ApiError) -> str:
    """Why a request is rejected: the error's code, if it has one of its own."""
    return error.code if isinstance(error.code, str) else _REFUSALS.get(error.status, "malformed")
