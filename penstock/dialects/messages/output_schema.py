"""The JSON schema that a request wants its output to match."""

from __future__ import annotations

from typing import NamedTuple

from penstock.dialects.messages.request_schema import CountTokensRequest
from penstock.generation.request.schemas import JsonObject
from penstock.http.errors import ApiError, refused


class OutputSchema(NamedTuple):
    field: str
    """Its path in the request."""
    schema: JsonObject


def output_schema(request: CountTokensRequest) -> OutputSchema | None:
    """From output_config.format, or its earlier name; None: the output is free. Raises ApiError."""
    config = request.output_config
    field, format = "output_config.format", None if config is None else config.format
    if format is None:
        field, format = "output_format", request.output_format
    if format is None:
        return None
    if format.type != "json_schema":
        raise refused(f"{field}.type must be json_schema.", f"{field}.type", format.type)
    if format.schema is None:
        raise ApiError(400, f"{field}.schema is missing.", param=f"{field}.schema")
    return OutputSchema(f"{field}.schema", format.schema)
