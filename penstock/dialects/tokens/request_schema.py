"""The request body of ``/inference/v1/generate``: its fields, and which of them are unsupported."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.generation.request.schemas import (
    Int64,
    JsonObject,
    PromptToken,
    StreamOptions,
    VllmSampling,
    about,
)
from penstock.generation.request.unsupported import (
    COMMON,
    MUST_BE_ABSENT,
    UnsupportedField,
    absent,
    other_names,
)
from penstock.http.request import MAX_REQUEST_ID

_INTERNAL = about("Not used: vLLM's programs add it, and its server sets it.")


class TokenSampling(VllmSampling, kw_only=True):
    """vLLM's sampling parameters. What is absent has vLLM's default, not that of the model's files; but for
    max_tokens, which then is what the context leaves."""

    stop: Annotated[
        str | Annotated[list[str], Meta(max_length=16)] | None,
        about("Texts that end the output, at most 16 of 1024 characters."),
    ] = None
    logprobs: Annotated[
        int | None, about("Alternatives to return per token; 0: the sampled token alone; -1: all.")
    ] = None
    detokenize: Annotated[bool | None, about("false: no text is needed; not with stop or output_mode.")] = (
        None
    )
    output_kind: Annotated[Any, _INTERNAL] = None
    skip_clone: Annotated[Any, _INTERNAL] = None
    flat_logprobs: Annotated[Any, _INTERNAL] = None
    output_text_buffer_length: Annotated[Any, _INTERNAL] = None
    skip_reading_prefix_cache: bool | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    trace_decode_token_ids: list[int] | None = None
    extra_args: JsonObject | None = None
    max_new_tokens: Any = None
    max_completion_tokens: Any = None
    min_new_tokens: Any = None
    sampling_seed: Any = None
    no_stop_trim: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_grammar: Any = None
    guided_choice: Any = None


class TokensRequest(msgspec.Struct, kw_only=True):
    """Body of POST /inference/v1/generate."""

    token_ids: Annotated[
        list[PromptToken] | None, about("The prompt's token ids.", extra_json_schema={"minItems": 1})
    ] = None
    sampling_params: Annotated[TokenSampling | None, about("How to sample.")] = None
    model: Annotated[str | None, about("A served model; default: the first one.")] = None
    request_id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)] | None,
        about("Part of the reply's request_id; the header X-Request-Id takes precedence."),
    ] = None
    stream: Annotated[bool | None, about("Send tokens as server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, about("Only with stream.")] = None
    return_token_ids: Annotated[bool | None, about("Return the prompt's token ids, too.")] = None
    return_routed_experts: Annotated[
        bool | None,
        about(
            "Return the experts of all tokens but the last, for models with experts; not with stream or stop."
        ),
    ] = None
    output_mode: Annotated[
        str | None,
        about(
            "tokens (default), or text: the text as well, and logprobs with the tokens' texts.",
            extra_json_schema={"enum": ["tokens", "text", None]},
        ),
    ] = None
    priority: Annotated[Int64 | None, about("Scheduling priority; lower values run earlier; default 0.")] = (
        None
    )
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=1024)] | None,
        about("Prompts with different salts do not share cached prefixes."),
    ] = None
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None
    reasoning_ended: Annotated[
        bool | None,
        about("true: structured_outputs hold from the first token; default: as the prompt's end says."),
    ] = None
    token_offsets: Annotated[Any, about("Not used: where the tokens are in the rendered text.")] = None
    reasoning_parser_kwargs: Annotated[Any, about("Not used: the prompt's end says the same.")] = None
    parse_context: Annotated[Any, about("Not used: for output_mode derender.")] = None
    features: Any = None
    content_parts: list[Any] | None = None


_NO_IMAGES = "this model takes text alone, so it must be absent"
UNSUPPORTED = (
    UnsupportedField("content_parts", absent, _NO_IMAGES),
    UnsupportedField("ec_transfer_params", absent, MUST_BE_ABSENT),
    UnsupportedField("features", absent, _NO_IMAGES),
    UnsupportedField("kv_transfer_params", absent, MUST_BE_ABSENT),
)
UNSUPPORTED_SAMPLING = (
    UnsupportedField("extra_args", absent, MUST_BE_ABSENT),
    UnsupportedField("prompt_logprob_start", absent, "it must be 0 or absent"),
    UnsupportedField("prompt_logprob_token_ids", absent, MUST_BE_ABSENT),
    UnsupportedField("repetition_detection", absent, MUST_BE_ABSENT),
    UnsupportedField("routed_experts_prompt_start", absent, "it must be 0 or absent"),
    UnsupportedField("skip_reading_prefix_cache", absent, "it must be false or absent"),
    UnsupportedField("spaces_between_special_tokens", bool, "it must be true or absent"),
    UnsupportedField("trace_decode_token_ids", absent, MUST_BE_ABSENT),
    UnsupportedField("watermarking", absent, "it must be false or absent"),
    *other_names("max_tokens", "max_new_tokens", "max_completion_tokens"),
    *other_names("min_tokens", "min_new_tokens"),
    *other_names("seed", "sampling_seed"),
    *other_names("include_stop_str_in_output", "no_stop_trim"),
    *(row for row in COMMON if "write structured_outputs" in row.allowed),
)
