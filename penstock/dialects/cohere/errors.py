"""Errors in the shape of Cohere's API."""

from __future__ import annotations

from penstock.dialects.renamed_fields import with_field
from penstock.http.errors import ApiError, encode_json


def cohere_error(error: ApiError, request_id: str) -> bytes:
    """The body of an error reply."""
    return encode_json({"id": request_id, "message": with_field(error)})
