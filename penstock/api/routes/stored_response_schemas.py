"""The routes of stored responses in the OpenAPI document."""

from __future__ import annotations

from penstock.dialects.openapi_schema import Route, Schema

_TAG = "Stored responses"


def _in(place: str, name: str, description: str, schema: Schema, *, required: bool = False) -> Schema:
    return {"in": place, "name": name, "description": description, "schema": schema, "required": required}


_ID = _in("path", "response_id", "The response's id.", {"type": "string", "minLength": 1}, required=True)
_PATH = "/v1/responses/{response_id}"

ROUTES = (
    Route(
        "get",
        _PATH,
        _TAG,
        "getResponse",
        "Read a stored response, or follow one in the background",
        "Response",
        errors=(400, 404, 500),
        parameters=(
            _ID,
            _in(
                "query",
                "stream",
                "Send the events of a background response, to its end.",
                {"type": "boolean", "default": False},
            ),
            _in(
                "query",
                "starting_after",
                "Only events with sequence numbers above this.",
                {"type": "integer", "minimum": 0},
            ),
        ),
        events="ResponseEvent",
    ),
    Route(
        "delete",
        _PATH,
        _TAG,
        "deleteResponse",
        "Delete a stored response",
        "DeletedResponse",
        errors=(404, 500),
        parameters=(_ID,),
    ),
    Route(
        "post",
        f"{_PATH}/cancel",
        _TAG,
        "cancelResponse",
        "End a response that runs in the background",
        "Response",
        errors=(400, 404, 500),
        parameters=(_ID,),
    ),
    Route(
        "get",
        f"{_PATH}/input_items",
        _TAG,
        "listInputItems",
        "The items that a response answered, with those of responses before it",
        "ResponseInputItems",
        errors=(400, 404, 500),
        parameters=(
            _ID,
            _in("query", "after", "Only items after the one with this id.", {"type": "string"}),
            _in(
                "query",
                "limit",
                "Maximum number of items.",
                {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
            ),
            _in("query", "order", "The latest first, or last.", {"enum": ["desc", "asc"], "default": "desc"}),
        ),
    ),
)

SCHEMAS: dict[str, Schema] = {
    "DeletedResponse": {
        "type": "object",
        "description": "The response is deleted.",
        "required": ["id", "object", "deleted"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": "response"},
            "deleted": {"const": True},
        },
    },
    "ResponseInputItems": {
        "type": "object",
        "description": "Some items.",
        "required": ["object", "data", "first_id", "last_id", "has_more"],
        "properties": {
            "object": {"const": "list"},
            "data": {"type": "array", "items": {"type": "object"}},
            "first_id": {"type": ["string", "null"]},
            "last_id": {"type": ["string", "null"]},
            "has_more": {"type": "boolean"},
        },
    },
}
