"""Errors in the shape of Google's APIs."""

from __future__ import annotations

from penstock.http.errors import ApiError, encode_json

_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def error_body(error: ApiError) -> bytes:
    """An error in the shape of Google's APIs."""
    status = _STATUSES.get(error.status) or ("INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
    return encode_json({"error": {"code": error.status, "message": error.message, "status": status}})
