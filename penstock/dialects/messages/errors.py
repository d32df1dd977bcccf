"""Errors in the shape of Anthropic's API."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from penstock.dialects.renamed_fields import with_field
from penstock.http.errors import ApiError

_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
TOO_LONG = "prompt is too long"
"""How clients recognize that they must shorten the conversation."""

_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
"""What clients act on, by the field at fault: they go on without threads, and send whole conversations."""

VERSION_HEADER = b"anthropic-version"
"""All clients of Anthropic's API send it, on all routes."""

_encode = msgspec.json.Encoder().encode


def is_anthropic(path: str, headers: Collection[bytes]) -> bool:
    """Whether a request is for Anthropic's API, or from a client of it. ``headers``: their names in lower
    case."""
    return path.startswith("/v1/messages") or VERSION_HEADER in headers


def error_type(status: int) -> str:
    """Anthropic's type of an error with this HTTP status."""
    return _TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")


def error_body(error: ApiError, request_id: str) -> bytes:
    """The body of an error reply, or the data of an error event."""
    message = error.message
    if error.param == "input_tokens":  # the prompt is longer than the context
        message = f"{TOO_LONG}: {message}"
    else:
        message = with_field(error)
    fields: dict[str, object] = {"type": error_type(error.status), "message": message}
    if error.param in _DETAILS:
        fields["details"] = _DETAILS[error.param]
    return _encode({"type": "error", "error": fields, "request_id": request_id})
