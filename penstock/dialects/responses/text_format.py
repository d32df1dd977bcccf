"""The field ``text.format`` of a request: what the text of the output must match."""

from __future__ import annotations

from penstock.dialects.responses.request_schema import ResponseRequest, TextFormat
from penstock.http.errors import ApiError, shown


def text_format(request: ResponseRequest) -> TextFormat | None:
    """The format: with a schema, or without one any JSON object; None: the text is free. Raises ApiError."""
    format = None if request.text is None else request.text.format
    if format is None or format.type == "text":
        return None
    if format.type not in ("json_object", "json_schema"):
        raise ApiError(
            400,
            f"text.format.type must be text, json_object or json_schema, got {shown(format.type)!r}.",
            param="text.format.type",
        )
    if format.type == "json_schema" and format.schema is None:
        raise ApiError(
            400, "text.format: the type 'json_schema' needs the field 'schema'.", param="text.format.schema"
        )
    if format.type == "json_object":
        format.schema = None
    return format
