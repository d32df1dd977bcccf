"""JSON schemas of the replies, for the OpenAPI document alone: replies are put together as bytes."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

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
    """An object with fields that are always there, and some that need not be."""
    return {
        "type": "object",
        "description": description,
        "required": list(required),
        "properties": required | optional,
    }


FINISH_REASON = or_null({"type": "string", "enum": ["stop", "length", "tool_calls"]})
STOP_REASON = {
    "description": "The stop string or the id of the stop token that ended the output.",
    "anyOf": [STRING, INTEGER, {"type": "null"}],
}
_TRANSFER = or_null(
    {"type": "object", "description": "What the engine's connector of KV caches says at the end."}
)
_PIECE: dict[str, Schema] = {"arguments": STRING}
_FUNCTION: dict[str, Schema] = {"name": STRING} | _PIECE
_TOKEN: dict[str, Schema] = {"token": STRING, "logprob": NUMBER, "bytes": or_null(listed(COUNT))}
_CHAT_LOGPROBS = or_null(
    shape("Log probabilities of the tokens.", {"content": or_null(listed(ref("TokenLogprob")))})
)
_PROMPT_LOGPROBS = or_null(
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


def _reply(description: str, kind: str, choice: str, **optional: Schema) -> Schema:
    required = {
        "id": STRING,
        "object": {"type": "string", "const": kind},
        "created": {"type": "integer", "description": "Seconds since 1970."},
        "model": STRING,
        "choices": listed(ref(choice)),
    }
    return shape(description, required, **optional)


_ERROR = shape(
    "The error.",
    {
        "message": STRING,
        "type": STRING,
        "param": {"description": "The field at fault.", **or_null(STRING)},
        "code": {"anyOf": [STRING, INTEGER, {"type": "null"}]},
    },
)
_OPERATION: dict[str, Schema] = {
    "operation": STRING,
    "key": STRING,
    "outcome": {"enum": ["done", "partial", "aborted", "conflict", "undecided"]},
    "failed": {"description": "Ranks of the engines that did not do it.", **listed(COUNT)},
    "engines": listed(ref("Receipt")),
}

REPLIES: dict[str, Schema] = {
    "Error": shape("Why a request failed.", {"error": _ERROR}),
    "Usage": shape(
        "Tokens of a request.",
        {"prompt_tokens": COUNT, "total_tokens": COUNT, "completion_tokens": COUNT},
        prompt_tokens_details=or_null({"type": "object"}),
        completion_tokens_details=or_null({"type": "object"}),
    ),
    "TokenLogprob": shape(
        "A generated token and its alternatives.",
        _TOKEN | {"top_logprobs": listed(shape("An alternative.", _TOKEN))},
    ),
    "CompletionLogprobs": shape(
        "Log probabilities, one entry per token.",
        {
            "text_offset": listed(COUNT),
            "token_logprobs": listed(or_null(NUMBER)),
            "tokens": listed(STRING),
            "top_logprobs": listed(or_null({"type": "object", "additionalProperties": NUMBER})),
        },
    ),
    "CompletionChoice": shape(
        "One output, or a piece of it.",
        {"index": COUNT, "text": STRING, "logprobs": or_null(ref("CompletionLogprobs"))}
        | {"finish_reason": FINISH_REASON},
        stop_reason=STOP_REASON,
        token_ids=or_null(TOKENS),
        prompt_token_ids=or_null(TOKENS),
        prompt_logprobs=_PROMPT_LOGPROBS,
    ),
    "Completion": _reply(
        "A completion; as an event, a piece of one.",
        "text_completion",
        "CompletionChoice",
        usage=or_null(ref("Usage")),
        system_fingerprint=or_null(STRING),
        service_tier=or_null(STRING),
        kv_transfer_params=_TRANSFER,
    ),
    "ToolCallReply": shape(
        "A call of a function.",
        {
            "id": STRING,
            "type": {"type": "string", "const": "function"},
            "function": shape("The function and the JSON text of its arguments.", _FUNCTION),
        },
    ),
    "ToolCallPiece": shape(
        "A piece of a call. The first one of a call has id, type and name.",
        {"index": COUNT, "function": shape("The next piece of the arguments.", _PIECE, name=STRING)},
        id=STRING,
        type={"type": "string", "const": "function"},
    ),
    "ChatChoice": shape(
        "One output.",
        {
            "index": COUNT,
            "message": shape(
                "The message.",
                {"role": STRING, "content": or_null(STRING), "refusal": or_null(STRING)},
                reasoning=or_null(STRING),
                tool_calls=listed(ref("ToolCallReply")),
            ),
            "logprobs": _CHAT_LOGPROBS,
            "finish_reason": FINISH_REASON,
        },
        stop_reason=STOP_REASON,
        token_ids=or_null(TOKENS),
    ),
    "ChatCompletion": _reply(
        "A chat completion.",
        "chat.completion",
        "ChatChoice",
        usage=ref("Usage"),
        prompt_token_ids=or_null(TOKENS),
        prompt_logprobs=_PROMPT_LOGPROBS,
        system_fingerprint=or_null(STRING),
        service_tier=or_null(STRING),
        kv_transfer_params=_TRANSFER,
    ),
    "ChatChunkChoice": shape(
        "A piece of one output.",
        {
            "index": COUNT,
            "delta": shape(
                "What the event adds to the message.",
                {},
                role=STRING,
                content=STRING,
                reasoning=STRING,
                tool_calls=listed(ref("ToolCallPiece")),
            ),
            "finish_reason": FINISH_REASON,
        },
        logprobs=_CHAT_LOGPROBS,
        stop_reason=STOP_REASON,
        token_ids=or_null(TOKENS),
    ),
    "ChatCompletionChunk": _reply(
        "An event of a streamed chat completion.",
        "chat.completion.chunk",
        "ChatChunkChoice",
        usage=or_null(ref("Usage")),
        prompt_token_ids=or_null(TOKENS),
        kv_transfer_params=_TRANSFER,
    ),
    "Model": shape(
        "A served model.",
        {
            "id": STRING,
            "object": {"type": "string", "const": "model"},
            "created": INTEGER,
            "owned_by": STRING,
        },
        root=or_null(STRING),
        parent=or_null(STRING),
        max_model_len=COUNT,
    ),
    "ModelList": shape(
        "The served models.", {"object": {"type": "string", "const": "list"}, "data": listed(ref("Model"))}
    ),
    "Tokens": shape(
        "A tokenized text.",
        {"count": COUNT, "max_model_len": COUNT, "tokens": TOKENS},
        token_strs=or_null(listed(STRING)),
    ),
    "Text": shape("The text of tokens.", {"prompt": STRING}),
    "Version": shape("The server's version.", {"version": STRING}),
    "Engine": shape(
        "One engine, as of its latest step.",
        {"rank": COUNT, "up": FLAG, "draining": FLAG, "asleep": FLAG, "running": COUNT, "waiting": COUNT},
    ),
    "Engines": shape("Every engine.", {"engines": listed(ref("Engine"))}),
    "Receipt": shape(
        "What one engine did.",
        {
            "rank": COUNT,
            "epoch": or_null(COUNT),
            "step": or_null(COUNT),
            "repeated": FLAG,
            "restarted": FLAG,
            "error": or_null(STRING),
            "code": STRING,
        },
        result={},
    ),
    "Operation": shape("What all engines did.", _OPERATION),
    "FailedOperation": shape(
        "What engines did, and which of them failed.",
        _OPERATION | {"error": _ERROR},
    ),
    "Sleeping": shape("Whether engines sleep.", {"is_sleeping": FLAG}),
    "Load": shape("How busy the process is.", {"server_load": COUNT}),
}
"""By the names that references use."""
