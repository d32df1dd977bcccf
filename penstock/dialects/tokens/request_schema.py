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
    StructuredOutputs,
    about,
)
from penstock.generation.request.unsupported import MUST_BE_ABSENT, UnsupportedField, absent
from penstock.http.request import MAX_REQUEST_ID

_INTERNAL = about("Not used: vLLM's programs add it, and its server sets it.")


class TokenSampling(msgspec.Struct, kw_only=True):
    """vLLM's sampling parameters. What is absent has vLLM's default, not that of the model's files; but for
    max_tokens, which then is what the context leaves."""

    n: Annotated[int | None, about("Number of choices; choice i is sampled with seed + i.")] = None
    temperature: Annotated[float | None, about("Sampling temperature, >= 0; 0: greedy; default 1.")] = None
    top_p: Annotated[float | None, about("Total probability of the tokens to sample from; (0, 1].")] = None
    top_k: Annotated[int | None, about("Number of most likely tokens to sample from; 0 or -1: all.")] = None
    min_p: Annotated[
        float | None, about("Minimum probability relative to the most likely token; [0, 1].")
    ] = None
    seed: Annotated[Int64 | None, about("Random seed; absent or -1: chosen at random.")] = None
    max_tokens: Annotated[int | None, about("Maximum number of tokens to generate.")] = None
    min_tokens: Annotated[int | None, about("Minimum number of tokens before the output may end.")] = None
    stop: Annotated[
        str | Annotated[list[str], Meta(max_length=16)] | None,
        about("Texts that end the output, at most 16 of 1024 characters."),
    ] = None
    stop_token_ids: Annotated[list[int] | None, about("Token ids that end the output.")] = None
    include_stop_str_in_output: Annotated[bool | None, about("Include the stop string in the text.")] = None
    ignore_eos: Annotated[bool | None, about("Continue after an end-of-sequence token.")] = None
    presence_penalty: Annotated[float | None, about("Penalty for tokens in the output; [-2, 2].")] = None
    frequency_penalty: Annotated[
        float | None, about("Penalty per occurrence of a token in the output; [-2, 2].")
    ] = None
    repetition_penalty: Annotated[float | None, about("Divides logits of prompt and output tokens; > 0.")] = (
        None
    )
    logit_bias: Annotated[
        dict[int, float] | None,
        about(
            "Values to add to logits, by token id; clamped to [-100, 100].",
            extra_json_schema={"propertyNames": {"pattern": "^[0-9]+$"}},
        ),
    ] = None
    allowed_token_ids: Annotated[list[int] | None, about("Token ids that may be generated.")] = None
    bad_words: Annotated[list[str] | None, about("Texts that must not be generated.")] = None
    logprobs: Annotated[
        int | None, about("Alternatives to return per token; 0: the sampled token alone; -1: all.")
    ] = None
    prompt_logprobs: Annotated[
        int | None, about("Alternatives to return per prompt token; not with stream.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, about("Constraint that the output's text must match.")
    ] = None
    skip_special_tokens: Annotated[bool | None, about("Omit special tokens from texts; default true.")] = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=32767)] | None, about("Tokens per event; default: the server's.")
    ] = None
    detokenize: Annotated[bool | None, about("false: no text is needed; not with stop or output_mode.")] = (
        None
    )
    output_kind: Annotated[Any, _INTERNAL] = None
    skip_clone: Annotated[Any, _INTERNAL] = None
    flat_logprobs: Annotated[Any, _INTERNAL] = None
    output_text_buffer_length: Annotated[Any, _INTERNAL] = None
    skip_reading_prefix_cache: bool | None = None
    logprob_token_ids: Annotated[
        list[int] | None,
        about("Tokens whose logprobs are returned for each token, in place of the likeliest ones'."),
    ] = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    trace_decode_token_ids: list[int] | None = None
    routed_experts_prompt_start: int | None = None
    thinking_token_budget: int | None = None
    repetition_detection: JsonObject | None = None
    extra_args: JsonObject | None = None
    watermarking: bool | None = None


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
    UnsupportedField("thinking_token_budget", lambda value: value == -1, "it must be -1 or absent"),
    UnsupportedField("trace_decode_token_ids", absent, MUST_BE_ABSENT),
    UnsupportedField("watermarking", absent, "it must be false or absent"),
)
