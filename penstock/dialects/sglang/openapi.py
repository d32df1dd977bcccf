"""The OpenAPI description of SGLang's ``/generate``."""

from __future__ import annotations

from penstock.dialects.openapi_schema import (
    COUNT,
    GENERATION_ERRORS,
    NUMBER,
    REQUEST_ID,
    STRING,
    TOKENS,
    WEIGHT_VERSIONS,
    ApiDescription,
    Route,
    Schema,
    listed,
    or_null,
    ref,
    shape,
)
from penstock.dialects.sglang.request_schema import UNSUPPORTED, SglangRequest

_LOGPROBS: Schema = {
    "description": "Per token: its logprob (null: it has none), its id, and its text or null.",
    **listed({"type": "array", "minItems": 3, "maxItems": 3}),
}
_TOPS = listed(or_null(_LOGPROBS))
_META = shape(
    "What is known of an output.",
    {
        "id": STRING,
        "finish_reason": or_null({"type": "object", "description": "Its type is stop, length or abort."}),
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "cached_tokens": COUNT,
        "weight_version": STRING,
    },
    weight_versions=WEIGHT_VERSIONS,
    e2e_latency=NUMBER,
    input_token_logprobs=_LOGPROBS,
    output_token_logprobs=_LOGPROBS,
    output_token_logprobs_length=COUNT,
    input_top_logprobs=_TOPS,
    output_top_logprobs=_TOPS,
    input_token_ids_logprobs=_TOPS,
    output_token_ids_logprobs=_TOPS,
)
DESCRIPTION = ApiDescription(
    route=Route(
        method="post",
        path="/generate",
        tag="Tokens",
        operation="generateAsSglang",
        summary="Continue texts or token ids, as SGLang's server does",
        reply="SglangReply",
        errors=GENERATION_ERRORS,
        parameters=(REQUEST_ID,),
        body="SglangRequest",
        example={"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 32}, "return_logprob": True},
        events="SglangOutput",
    ),
    request=SglangRequest,
    unsupported=UNSUPPORTED,
    replies={
        "SglangOutput": shape(
            "An output; in an event, what there is of it by then.",
            {"text": STRING, "output_ids": TOKENS, "meta_info": _META},
            index=COUNT,
            prompt_token_ids=TOKENS,
        ),
        "SglangReply": {
            "description": "The output, or a list of them for several prompts or outputs.",
            "anyOf": [ref("SglangOutput"), listed(ref("SglangOutput"))],
        },
    },
)
