"""Parts of the OpenAPI document that APIs share: the description of a route, and common JSON schemas.

Replies are built as bytes, so their schemas are written by hand, here and with each API, for the document
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.generation.request.unsupported import UnsupportedField
from penstock.http.request import MAX_REQUEST_ID

Schema = dict[str, Any]

EVENTS = "text/event-stream"

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
TOKENS: Schema = {"type": "array", "items": COUNT}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def listed(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def shape(description: str, required: dict[str, Schema], **optional: Schema) -> Schema:
    """An object with required and optional fields."""
    return {
        "type": "object",
        "description": description,
        "required": list(required),
        "properties": required | optional,
    }


class Route(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    tag: str
    operation: str
    summary: str
    reply: str | Schema
    """Name of the reply's schema, or the whole response object of a reply without one."""
    errors: tuple[int, ...] = ()
    parameters: tuple[Schema, ...] = ()
    body: str | None = None
    """Name of the request body's schema."""
    example: Schema | None = None
    events: str | None = None
    """Name of the schema of one event of a streamed reply."""
    error: str = "Error"
    """Name of the schema of its errors."""
    columns: bool = False
    """Whether the reply may be columns."""
    matrix: bool = False
    """Whether the reply may be a matrix of vectors."""
    stream: str = EVENTS
    """Content type of a streamed reply."""
    stream_about: str = ""
    """What it is made of, if that is not events."""


class ApiDescription(NamedTuple):
    """One generating API in the document."""

    route: Route
    request: type[msgspec.Struct]
    """Type of the request body; its name is ``route.body``."""
    unsupported: tuple[UnsupportedField, ...]
    replies: dict[str, Schema]
    """Schemas of the reply and its events by the names that references use."""
    required: tuple[str, ...] = ()
    """Fields that the type leaves optional and that requests need."""
    invoked: bool = False
    """Whether ``/invocations`` serves it, too."""
    more_routes: tuple[Route, ...] = ()
    """The API's other routes."""
    more_requests: tuple[type[msgspec.Struct], ...] = ()
    """Types of their request bodies."""


def check_names(descriptions: Sequence[ApiDescription]) -> Sequence[ApiDescription]:
    """The descriptions. Raises ValueError if two APIs share a path or the name of a schema."""
    seen: dict[str, str] = {}
    for each in descriptions:
        for name in (each.route.path, each.request.__name__, *each.replies):
            if name in seen:
                raise ValueError(f"{each.route.path} and {seen[name]} both define {name}: names are unique")
            seen[name] = each.route.path
    return descriptions


BODY_ERRORS = (400, 404, 408, 413, 415, 500, 503)
"""Statuses of a route that reads a body."""
GENERATION_ERRORS = (*BODY_ERRORS, 429)
REQUEST_ID: Schema = {
    "in": "header",
    "name": "X-Request-Id",
    "description": "Becomes part of the reply's id.",
    "schema": {"type": "string", "maxLength": MAX_REQUEST_ID},
}
FINISH_REASON = or_null({"type": "string", "enum": ["stop", "length", "tool_calls", "abort"]})
WEIGHT_VERSIONS = listed(
    shape(
        "Output tokens start to end, the latter excluded, were made by one version of the weights.",
        {"start": COUNT, "end": COUNT, "version": STRING},
        adapter={"description": "Digest of the LoRA adapter, if there is one.", **STRING},
    )
)
STOP_REASON = {
    "description": "The stop string or the id of the stop token that ended the output.",
    "anyOf": [STRING, INTEGER, {"type": "null"}],
}
TRANSFER = or_null(
    {"type": "object", "description": "What the engine's connector of KV caches says at the end."}
)
TOKEN: dict[str, Schema] = {"token": STRING, "logprob": NUMBER, "bytes": or_null(listed(COUNT))}
PROMPT_LOGPROBS = or_null(
    listed(
        or_null(
            {
                "type": "object",
                "description": "Candidates by token id, the prompt's own first.",
                "additionalProperties": shape(
                    "A candidate.", {"logprob": NUMBER, "rank": COUNT, "decoded_token": STRING}
                ),
            }
        )
    )
)


def generated(description: str, kind: str, choice: str, **optional: Schema) -> Schema:
    """Schema of a generated reply; ``choice``: name of the schema of its choices."""
    required = {
        "id": STRING,
        "object": {"type": "string", "const": kind},
        "created": {"type": "integer", "description": "Seconds since 1970."},
        "model": STRING,
        "choices": listed(ref(choice)),
    }
    return shape(description, required, **optional)


ERROR = shape(
    "The error.",
    {
        "message": STRING,
        "type": STRING,
        "param": {"description": "The field at fault.", **or_null(STRING)},
        "code": {"anyOf": [STRING, INTEGER, {"type": "null"}]},
    },
)

SHARED: dict[str, Schema] = {
    "Error": shape("Why a request failed.", {"error": ERROR}),
    "Usage": shape(
        "Tokens of a request.",
        {"prompt_tokens": COUNT, "total_tokens": COUNT, "completion_tokens": COUNT},
        prompt_tokens_details=or_null({"type": "object"}),
        completion_tokens_details=or_null({"type": "object"}),
    ),
    "TokenLogprob": shape(
        "A generated token and its alternatives.",
        TOKEN | {"top_logprobs": listed(shape("An alternative.", TOKEN))},
    ),
}
"""Schemas by the names that references use."""
