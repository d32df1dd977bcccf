"""The OpenAPI description of ``/v1/completions``."""

from __future__ import annotations

from penstock.dialects.completions.request_schema import UNSUPPORTED, CompletionRequest
from penstock.dialects.openapi_schema import (
    COUNT,
    FINISH_REASON,
    GENERATION_ERRORS,
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
    generated,
    listed,
    or_null,
    ref,
    shape,
)

DESCRIPTION = ApiDescription(
    route=Route(
        method="post",
        path="/v1/completions",
        tag="Generate",
        operation="createCompletion",
        summary="Complete a prompt",
        reply="Completion",
        errors=GENERATION_ERRORS,
        parameters=(REQUEST_ID,),
        body="CompletionRequest",
        example={"prompt": "Once upon a time", "max_tokens": 32},
        events="Completion",
        columns=True,
    ),
    request=CompletionRequest,
    unsupported=UNSUPPORTED,
    invoked=True,
    replies={
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
            weight_versions=WEIGHT_VERSIONS,
            prompt_token_ids=or_null(TOKENS),
            prompt_logprobs=PROMPT_LOGPROBS,
        ),
        "Completion": generated(
            "A completion; as an event, a piece of one.",
            "text_completion",
            "CompletionChoice",
            usage=or_null(ref("Usage")),
            system_fingerprint=or_null(STRING),
            service_tier=or_null(STRING),
            kv_transfer_params=TRANSFER,
        ),
    },
    required=("prompt",),  # its alternative prompt_embeds is unsupported
)
