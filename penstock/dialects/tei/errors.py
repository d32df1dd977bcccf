"""Errors in the shape of TEI's API."""

from __future__ import annotations

from penstock.dialects.renamed_fields import with_field
from penstock.http.errors import ApiError, encode_json

_ERROR_TYPES = {429: "Overloaded", 503: "Unhealthy"}


def tei_error(error: ApiError, request_id: str) -> bytes:
    """The body of an error reply."""
    kind = _ERROR_TYPES.get(error.status) or ("Backend" if error.status >= 500 else "Validation")
    return encode_json({"error": with_field(error), "error_type": kind})
