"""The OpenAPI description of ``/v1/chat/completions``."""

from __future__ import annotations

from penstock.dialects.chat.request_schema import UNSUPPORTED, ChatCompletionRequest
from penstock.dialects.openapi_schema import (
    COUNT,
    FINISH_REASON,
    GENERATION_ERRORS,
    PROMPT_LOGPROBS,
    REQUEST_ID,
    STOP_REASON,
    STRING,
    TOKENS,
    TRANSFER,
    WEIGHT_VERSIONS,
    ApiDescription,
    Route,
    Schema,
    generated,
    listed,
    or_null,
    ref,
    shape,
)

_PIECE: dict[str, Schema] = {"arguments": STRING}
_FUNCTION: dict[str, Schema] = {"name": STRING} | _PIECE
_CHAT_LOGPROBS = or_null(
    shape("Log probabilities of the tokens.", {"content": or_null(listed(ref("TokenLogprob")))})
)
_TOOL_TYPE = {"type": "string", "enum": ["function", "custom"]}
DESCRIPTION = ApiDescription(
    route=Route(
        method="post",
        path="/v1/chat/completions",
        tag="Generate",
        operation="createChatCompletion",
        summary="Answer a conversation",
        reply="ChatCompletion",
        errors=GENERATION_ERRORS,
        parameters=(REQUEST_ID,),
        body="ChatCompletionRequest",
        example={"messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 32},
        events="ChatCompletionChunk",
        columns=True,
    ),
    request=ChatCompletionRequest,
    unsupported=UNSUPPORTED,
    invoked=True,
    replies={
        "ToolCallReply": shape(
            "A call of a function or a custom tool.",
            {"id": STRING, "type": _TOOL_TYPE},
            function=shape("The function and the JSON text of its arguments.", _FUNCTION),
            custom=shape("The custom tool and its input.", {"name": STRING, "input": STRING}),
        ),
        "ToolCallPiece": shape(
            "A piece of a call. The first one of a call has id, type and name.",
            {"index": COUNT},
            function=shape("The next piece of the arguments.", _PIECE, name=STRING),
            custom=shape("The next piece of the input.", {"input": STRING}, name=STRING),
            id=STRING,
            type=_TOOL_TYPE,
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
            weight_versions=WEIGHT_VERSIONS,
        ),
        "ChatCompletion": generated(
            "A chat completion.",
            "chat.completion",
            "ChatChoice",
            usage=ref("Usage"),
            prompt_token_ids=or_null(TOKENS),
            prompt_logprobs=PROMPT_LOGPROBS,
            system_fingerprint=or_null(STRING),
            service_tier=or_null(STRING),
            kv_transfer_params=TRANSFER,
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
            weight_versions=WEIGHT_VERSIONS,
        ),
        "ChatCompletionChunk": generated(
            "An event of a streamed chat completion.",
            "chat.completion.chunk",
            "ChatChunkChoice",
            usage=or_null(ref("Usage")),
            service_tier=or_null(STRING),
            prompt_token_ids=or_null(TOKENS),
            kv_transfer_params=TRANSFER,
        ),
    },
)
