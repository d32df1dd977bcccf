"""The OpenAPI description of ``/v1/responses``."""

from __future__ import annotations

from penstock.dialects.openapi_schema import (
    BODY_ERRORS,
    COUNT,
    FLAG,
    GENERATION_ERRORS,
    NUMBER,
    STRING,
    TRANSFER,
    WEIGHT_VERSIONS,
    ApiDescription,
    Route,
    Schema,
    listed,
    or_null,
    ref,
    shape,
)
from penstock.dialects.responses.request_schema import UNSUPPORTED, ResponseRequest

_OBJECT: Schema = {"type": "object"}
_TIME: Schema = {"type": "integer", "description": "Seconds since 1970."}
_STATUS: Schema = {"type": "string", "enum": ["in_progress", "completed", "incomplete"]}


def _item(description: str, kind: str, required: dict[str, Schema], **optional: Schema) -> Schema:
    own: dict[str, Schema] = {"id": STRING, "type": {"type": "string", "const": kind}, "status": _STATUS}
    return shape(description, own | required, **optional)


def _part(description: str, kind: str, **more: Schema) -> Schema:
    return shape(description, {"type": {"type": "string", "const": kind}, "text": STRING} | more)


DESCRIPTION = ApiDescription(
    route=Route(
        method="post",
        path="/v1/responses",
        tag="Generate",
        operation="createResponse",
        summary="Answer a conversation of items",
        reply="Response",
        errors=GENERATION_ERRORS,
        body="ResponseRequest",
        example={"input": "Say hello", "max_output_tokens": 32},
        events="ResponseEvent",
    ),
    request=ResponseRequest,
    more_routes=(
        Route(
            method="post",
            path="/v1/responses/input_tokens",
            tag="Tokens",
            operation="countResponseTokens",
            summary="Count the input tokens of a response",
            reply="ResponseInputTokens",
            errors=BODY_ERRORS,
            body="ResponseRequest",
            example={"input": "Say hello"},
        ),
        Route(
            method="post",
            path="/v1/responses/compact",
            tag="Generate",
            operation="compactResponse",
            summary="Replace a conversation by a summary of it",
            reply="CompactedResponse",
            errors=GENERATION_ERRORS,
            body="ResponseRequest",
            example={"input": "Say hello"},
        ),
    ),
    unsupported=UNSUPPORTED,
    required=("input",),
    invoked=True,
    replies={
        "ResponseMessage": _item(
            "Text of the model.",
            "message",
            {
                "role": {"type": "string", "const": "assistant"},
                "content": listed(
                    _part(
                        "The text.",
                        "output_text",
                        annotations=listed(_OBJECT),
                        logprobs=listed(ref("TokenLogprob")),
                    )
                ),
            },
        ),
        "ResponseReasoning": _item(
            "What the model thought: as summary if the request asks for one, otherwise as content.",
            "reasoning",
            {"summary": listed(_part("All of it.", "summary_text"))},
            content=listed(_part("All of it.", "reasoning_text")),
            encrypted_content=or_null(STRING),
        ),
        "ResponseFunctionCall": _item(
            "A call of a function; arguments are JSON text.",
            "function_call",
            {"call_id": STRING, "name": STRING, "arguments": STRING},
            namespace=STRING,
        ),
        "ResponseCustomToolCall": _item(
            "A call of a custom tool.",
            "custom_tool_call",
            {"call_id": STRING, "name": STRING, "input": STRING},
            namespace=STRING,
        ),
        "ResponseCompaction": shape(
            "A summary of the conversation, sealed: an input item of later requests.",
            {
                "id": STRING,
                "type": {"type": "string", "const": "compaction"},
                "encrypted_content": STRING,
            },
        ),
        "CompactedResponse": shape(
            "A compacted conversation: messages that stay, and one item of type compaction.",
            {
                "id": STRING,
                "object": {"type": "string", "const": "response.compaction"},
                "created_at": _TIME,
                "output": listed({"anyOf": [ref("InputItem"), ref("ResponseCompaction")]}),
                "usage": ref("ResponseUsage"),
            },
        ),
        "ResponseUsage": shape(
            "Tokens of a response.",
            {
                "input_tokens": COUNT,
                "input_tokens_details": shape("Of the input.", {"cached_tokens": COUNT}, image_tokens=COUNT),
                "output_tokens": COUNT,
                "output_tokens_details": shape("Of the output.", {"reasoning_tokens": COUNT}),
                "total_tokens": COUNT,
            },
        ),
        "Response": shape(
            "A response. Beside its own fields it repeats those of the request.",
            {
                "id": STRING,
                "object": {"type": "string", "const": "response"},
                "created_at": _TIME,
                "completed_at": or_null(_TIME),
                "status": {
                    "type": "string",
                    "enum": ["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"],
                },
                "error": or_null(shape("Why it failed.", {"code": STRING, "message": STRING})),
                "incomplete_details": or_null(shape("Why it is incomplete.", {"reason": STRING})),
                "output": listed(
                    {
                        "anyOf": [
                            ref("ResponseMessage"),
                            ref("ResponseReasoning"),
                            ref("ResponseFunctionCall"),
                            ref("ResponseCustomToolCall"),
                            ref("ResponseCompaction"),
                        ]
                    }
                ),
                "usage": or_null(ref("ResponseUsage")),
                "model": STRING,
                "previous_response_id": or_null(STRING),
                "instructions": or_null(STRING),
                "tools": listed(_OBJECT),
                "tool_choice": {"anyOf": [STRING, _OBJECT]},
                "parallel_tool_calls": FLAG,
                "text": _OBJECT,
                "reasoning": or_null(_OBJECT),
                "truncation": STRING,
                "max_output_tokens": or_null(COUNT),
                "max_tool_calls": or_null(COUNT),
                "temperature": NUMBER,
                "top_p": NUMBER,
                "presence_penalty": NUMBER,
                "frequency_penalty": NUMBER,
                "top_logprobs": COUNT,
                "store": FLAG,
                "background": FLAG,
                "service_tier": STRING,
                "metadata": _OBJECT,
                "user": or_null(STRING),
                "safety_identifier": or_null(STRING),
                "prompt_cache_key": or_null(STRING),
            },
            kv_transfer_params=TRANSFER,
            weight_versions=WEIGHT_VERSIONS,
        ),
        "ResponseInputTokens": shape("Tokens of a prompt.", {"object": STRING, "input_tokens": COUNT}),
        "ResponseEvent": shape(
            "An event of a streamed response. Its type says which other fields it has.",
            {"type": STRING, "sequence_number": COUNT},
            response=ref("Response"),
            output_index=COUNT,
            item=_OBJECT,
            item_id=STRING,
            content_index=COUNT,
            summary_index=COUNT,
            part=_OBJECT,
            delta=STRING,
            text=STRING,
            arguments=STRING,
            input=STRING,
            logprobs=listed(ref("TokenLogprob")),
        ),
    },
)
