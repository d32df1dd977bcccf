"""The OpenAPI description of ``/v1/messages``."""

from __future__ import annotations

from penstock.dialects.messages.request_schema import UNSUPPORTED, CountTokensRequest, MessagesRequest
from penstock.dialects.openapi_schema import (
    BODY_ERRORS,
    COUNT,
    GENERATION_ERRORS,
    REQUEST_ID,
    STRING,
    ApiDescription,
    Route,
    Schema,
    listed,
    or_null,
    ref,
    shape,
)

_STOP_REASONS = (
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "model_context_window_exceeded",
)
_STOP: dict[str, Schema] = {
    "stop_reason": or_null({"type": "string", "enum": list(_STOP_REASONS)}),
    "stop_sequence": or_null(STRING),
}
_USAGE: dict[str, Schema] = {
    "input_tokens": {"description": "Those that were not in the prefix cache.", **COUNT},
    "cache_creation_input_tokens": COUNT,
    "cache_read_input_tokens": COUNT,
    "output_tokens": COUNT,
}


def _const(value: str) -> Schema:
    return {"type": "string", "const": value}


_BLOCKS = {
    "MessagesText": shape("Text.", {"type": _const("text"), "text": STRING}),
    "MessagesThinking": shape(
        "Reasoning.", {"type": _const("thinking"), "thinking": STRING, "signature": STRING}
    ),
    "MessagesToolUse": shape(
        "A call of a tool.",
        {"type": _const("tool_use"), "id": STRING, "name": STRING, "input": {"type": "object"}},
    ),
}
_BLOCK: Schema = {"anyOf": [ref(name) for name in _BLOCKS]}
_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"} | {
    "input_json_delta": "partial_json"
}
_DELTA: Schema = {
    "anyOf": [
        shape("The next piece of a block.", {"type": _const(kind), field: STRING})
        for kind, field in _DELTAS.items()
    ]
}
_EVENT: Schema = {
    "description": "An event of a streamed message; `event` is the same as its type.",
    "anyOf": [
        shape("The beginning.", {"type": _const("message_start"), "message": ref("AnthropicMessage")}),
        shape(
            "A block begins.",
            {"type": _const("content_block_start"), "index": COUNT, "content_block": _BLOCK},
        ),
        shape("A piece.", {"type": _const("content_block_delta"), "index": COUNT, "delta": _DELTA}),
        shape("A block ends.", {"type": _const("content_block_stop"), "index": COUNT}),
        shape(
            "Why the message ends.",
            {
                "type": _const("message_delta"),
                "delta": shape("The changes.", _STOP),
                "usage": shape("Tokens.", _USAGE),
            },
        ),
        shape("The end.", {"type": _const("message_stop")}),
        shape("Sent while nothing else is.", {"type": _const("ping")}),
    ],
}

DESCRIPTION = ApiDescription(
    route=Route(
        method="post",
        path="/v1/messages",
        tag="Generate",
        operation="createMessage",
        summary="Answer a conversation, in Anthropic's format",
        reply="AnthropicMessage",
        errors=GENERATION_ERRORS,
        parameters=(REQUEST_ID,),
        body="MessagesRequest",
        example={"messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 32},
        events="MessagesEvent",
        error="MessagesError",
    ),
    request=MessagesRequest,
    more_routes=(
        Route(
            method="post",
            path="/v1/messages/count_tokens",
            tag="Tokens",
            operation="countMessageTokens",
            summary="Count the input tokens of a message",
            reply="MessagesTokenCount",
            errors=BODY_ERRORS,
            body="CountTokensRequest",
            example={"messages": [{"role": "user", "content": "Say hello"}]},
            error="MessagesError",
        ),
    ),
    more_requests=(CountTokensRequest,),
    unsupported=UNSUPPORTED,
    replies={
        **_BLOCKS,
        "AnthropicMessage": shape(
            "A message.",
            {
                "id": STRING,
                "type": _const("message"),
                "role": _const("assistant"),
                "model": STRING,
                "content": listed(_BLOCK),
                **_STOP,
                "usage": shape("Tokens.", _USAGE, service_tier=STRING),
            },
        ),
        "MessagesEvent": _EVENT,
        "MessagesTokenCount": shape("Tokens of a prompt.", {"input_tokens": COUNT}),
        "MessagesError": shape(
            "Why a request failed.",
            {
                "type": _const("error"),
                "error": shape("The error.", {"type": STRING, "message": STRING}),
                "request_id": STRING,
            },
        ),
    },
)
