"""The HTTP error for a stream that failed."""

from __future__ import annotations

from penstock.http.admission import BEGUN, UNAVAILABLE_RETRY_MS, retry_headers
from penstock.http.errors import ApiError
from penstock.streaming.stream import StreamError

LOST_CODES = frozenset({"engine_died", "server_stopped"})
"""Errors of requests that were running: see :data:`BEGUN`."""


def stream_failed(error: StreamError) -> ApiError:
    """The HTTP error for a stream that failed before anything was sent."""
    retry_after_ms = error.retry_after_ms or (UNAVAILABLE_RETRY_MS if error.status == 503 else 0)
    headers = retry_headers(retry_after_ms) if retry_after_ms else []
    if error.code in LOST_CODES:
        headers.append(BEGUN)
    return ApiError(error.status, error.message, code=error.code, param=error.param, headers=headers)
