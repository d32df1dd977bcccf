"""The OpenAPI description of ``/inference/v1/generate``."""

from __future__ import annotations

from penstock.dialects.openapi_schema import (
    COUNT,
    FINISH_REASON,
    GENERATION_ERRORS,
    INTEGER,
    NUMBER,
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
    listed,
    or_null,
    ref,
    shape,
)
from penstock.dialects.tokens.derender_schema import DerenderChatRequest, DerenderCompletionRequest
from penstock.dialects.tokens.request_schema import UNSUPPORTED, TokensRequest

_MODE: Schema = {"type": "string", "enum": ["tokens", "text"]}
_CANDIDATE: dict[str, Schema] = {"token_id": COUNT, "logprob": NUMBER, "rank": or_null(INTEGER)}
_BY_ID = shape(
    "A generated token; its candidates are the token itself, then the alternatives in order.",
    {"token": STRING} | _CANDIDATE | {"top_logprobs": listed(shape("A candidate.", _CANDIDATE))},
)
_LOGPROBS = or_null(
    shape(
        "Log probabilities of the tokens; with output_mode text as in chat completions.",
        {"content": listed({"anyOf": [_BY_ID, ref("TokenLogprob")]})},
    )
)
DESCRIPTION = ApiDescription(
    route=Route(
        method="post",
        path="/inference/v1/generate",
        tag="Tokens",
        operation="generateTokens",
        summary="Generate token ids from token ids",
        reply="GeneratedTokens",
        errors=GENERATION_ERRORS,
        parameters=(REQUEST_ID,),
        body="TokensRequest",
        example={"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 32}},
        events="GeneratedTokensEvent",
        columns=True,
    ),
    request=TokensRequest,
    unsupported=UNSUPPORTED,
    replies={
        "RenderedChat": ref("TokensRequest") | {"description": "A request for token ids."},
        "RenderedCompletion": listed(ref("TokensRequest")) | {"description": "One request per prompt."},
        "TokensChoice": shape(
            "One output.",
            {"index": COUNT, "token_ids": TOKENS, "finish_reason": FINISH_REASON, "logprobs": _LOGPROBS},
            stop_reason=STOP_REASON,
            weight_versions=or_null(WEIGHT_VERSIONS),
            text={"type": "string", "description": "With output_mode text."},
            routed_experts=or_null({"type": "string", "description": "A .npy file in base64."}),
        ),
        "GeneratedTokens": shape(
            "Token ids of all outputs.",
            {"request_id": STRING, "output_mode": _MODE, "choices": listed(ref("TokensChoice"))},
            model=STRING,
            created={"type": "integer", "description": "Seconds since 1970."},
            usage=ref("Usage"),
            prompt_token_ids=or_null(TOKENS),
            prompt_logprobs=PROMPT_LOGPROBS,
            kv_transfer_params=TRANSFER,
        ),
        "GeneratedTokensEvent": shape(
            "The next tokens of an output.",
            {"request_id": STRING, "output_mode": _MODE, "choices": listed(ref("TokensChoice"))},
            usage=ref("Usage"),
            prompt_token_ids=TOKENS,
            kv_transfer_params=TRANSFER,
        ),
    },
    required=("token_ids", "sampling_params"),
    more_requests=(DerenderChatRequest, DerenderCompletionRequest),
    more_routes=(
        Route(
            method="post",
            path="/v1/chat/completions/render",
            tag="Tokens",
            operation="renderChatCompletion",
            summary="A chat completion's request as one for token ids",
            reply="RenderedChat",
            errors=GENERATION_ERRORS,
            parameters=(REQUEST_ID,),
            body="ChatCompletionRequest",
            example={"messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 32},
        ),
        Route(
            method="post",
            path="/v1/completions/render",
            tag="Tokens",
            operation="renderCompletion",
            summary="A completion's request as one for token ids for each prompt",
            reply="RenderedCompletion",
            errors=GENERATION_ERRORS,
            parameters=(REQUEST_ID,),
            body="CompletionRequest",
            example={"prompt": "Once upon a time", "max_tokens": 32},
        ),
        Route(
            method="post",
            path="/v1/chat/completions/derender",
            tag="Tokens",
            operation="derenderChatCompletion",
            summary="Generated token ids as the reply to a chat completion",
            reply="ChatCompletion",
            errors=GENERATION_ERRORS,
            parameters=(REQUEST_ID,),
            body="DerenderChatRequest",
            example={
                "generate_response": {"choices": [{"index": 0, "token_ids": [1, 2, 3]}]},
                "chat_request": {"messages": [{"role": "user", "content": "Say hello"}]},
            },
        ),
        Route(
            method="post",
            path="/v1/completions/derender",
            tag="Tokens",
            operation="derenderCompletion",
            summary="Generated token ids as the reply to a completion",
            reply="Completion",
            errors=GENERATION_ERRORS,
            parameters=(REQUEST_ID,),
            body="DerenderCompletionRequest",
            example={
                "generate_responses": [{"choices": [{"index": 0, "token_ids": [1, 2, 3]}]}],
                "completion_request": {"prompt": "Once upon a time"},
            },
        ),
    ),
)
