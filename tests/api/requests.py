"""Requests of the application without a connection."""

from __future__ import annotations

from penstock.api.api_request import ApiRequest
from penstock.http.request import HttpRequest
from tests.http.requests import http_request


def api_request(
    http: HttpRequest | None = None, *, request_id: str = "7", tenant: str | None = None
) -> ApiRequest:
    """One that has just arrived; by default without a body."""
    request = ApiRequest(http or http_request(), request_id=request_id, on_end=lambda request, error: None)
    request.tenant = tenant
    return request
