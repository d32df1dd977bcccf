"""The request body of SGLang's ``/generate``: its fields, and which of them are unsupported."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.generation.request.schemas import Int64, JsonObject, PromptToken, Sampling, about
from penstock.generation.request.unsupported import MUST_BE_ABSENT, UnsupportedField, absent, other_names
from penstock.http.request import MAX_REQUEST_ID

MAX_STOPS = 32
"""Stop strings of a request, as in SGLang."""
_UNUSED = about("Not used.")
_TO_LOG = about("Not used: the access log is the server's.")
_OF_SLOW = about("Not used: tokenizers without a fast implementation have such spaces alone.")
Rid = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)]
Salt = Annotated[str, Meta(max_length=512)]


class SglangSampling(Sampling, kw_only=True):
    """SGLang's sampling parameters. What is absent has SGLang's default, not that of the model's files."""

    max_new_tokens: Annotated[
        int | msgspec.UnsetType | None,
        about("Maximum number of tokens to generate; default 128; null: what the context leaves."),
    ] = msgspec.UNSET
    min_new_tokens: Annotated[int | None, about("Minimum number of tokens before the output may end.")] = None
    sampling_seed: Annotated[Int64 | None, about("Random seed; absent: chosen at random.")] = None
    stop: Annotated[
        str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None,
        about("Texts that end the output, at most 32 of 1024 characters."),
    ] = None
    no_stop_trim: Annotated[bool | None, about("Keep the stop string or token in the text.")] = None
    json_schema: Annotated[str | None, about("The text of a JSON schema that the output must match.")] = None
    regex: Annotated[str | None, about("A regular expression that the output must match.")] = None
    ebnf: Annotated[str | None, about("A grammar that the output must match.")] = None
    spaces_between_special_tokens: Annotated[bool | None, _OF_SLOW] = None
    stop_regex: str | list[str] | None = None
    beam_width: int | None = None
    structural_tag: str | None = None
    custom_params: JsonObject | None = None
    watermark: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    min_tokens: Any = None
    seed: Any = None
    include_stop_str_in_output: Any = None
    structured_outputs: Any = None
    logprobs: Any = None


class SglangRequest(msgspec.Struct, kw_only=True):
    """Body of POST /generate. Of several prompts, lists of values must have equal ones."""

    text: Annotated[
        str | list[str] | None, about("A prompt, or a list of prompts.", extra_json_schema={"minItems": 1})
    ] = None
    input_ids: Annotated[
        list[PromptToken | list[PromptToken]] | None,
        about("Token ids of a prompt, or a list of such lists.", extra_json_schema={"minItems": 1}),
    ] = None
    sampling_params: Annotated[SglangSampling | list[SglangSampling] | None, about("How to sample.")] = None
    return_logprob: Annotated[bool | list[bool] | None, about("Return the logprobs of tokens.")] = None
    logprob_start_len: Annotated[
        int | list[int] | None,
        about("Place in the prompt from which its logprobs are returned; default -1: those of the output."),
    ] = None
    top_logprobs_num: Annotated[
        int | list[int] | None, about("Alternatives to return per token; only with return_logprob.")
    ] = None
    token_ids_logprob: Annotated[
        list[int | list[int]] | None,
        about("Tokens whose logprobs are returned for each output token; only with return_logprob."),
    ] = None
    return_text_in_logprobs: Annotated[bool | None, about("Logprobs with the texts of tokens.")] = None
    stream: Annotated[bool | None, about("Send server-sent events.")] = None
    incremental_streaming_output: Annotated[
        bool | None, about("Events have what is new; by default they repeat all that was sent, as SGLang's.")
    ] = None
    rid: Annotated[Rid | list[Rid] | None, about("The request's id, or one per prompt.")] = None
    return_prompt_token_ids: Annotated[bool | None, about("Return the prompt's token ids.")] = None
    priority: Annotated[Int64 | None, about("Scheduling priority; higher values run earlier.")] = None
    lora_path: Annotated[str | list[str] | None, about("The name of a LoRA adapter, or of the model.")] = None
    cache_salt: Annotated[
        Salt | list[Salt] | None, about("Prompts with different salts do not share cached prefixes.")
    ] = None
    extra_key: Annotated[Salt | list[Salt] | None, about("As cache_salt; both together may be set.")] = None
    session_id: Annotated[
        str | None, about("Requests with the same one run on the same engine, as with X-Session-ID.")
    ] = None
    log_metrics: Annotated[bool | None, _UNUSED] = None
    no_logs: Annotated[bool | None, _TO_LOG] = None
    background: Annotated[bool | None, _UNUSED] = None
    custom_labels: Annotated[Any, _UNUSED] = None
    conversation_id: Annotated[Any, _UNUSED] = None
    routing_key: Annotated[Any, _UNUSED] = None
    input_embeds: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    modalities: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    return_hidden_states: Any = None
    return_routed_experts: bool | None = None
    return_sampling_mask: Any = None
    return_entropy: bool | None = None
    return_flat_raw_top_logprobs: bool | None = None
    return_flat_raw_output_top_logprobs: bool | None = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    max_thinking_tokens: int | None = None
    require_reasoning: bool | None = None
    watermark: Any = None
    max_new_tokens: Any = None
    max_tokens: Any = None


_NO_MEDIA = "this model takes text alone, so it must be absent"
_NO_RANK = "send the header X-data-parallel-rank"
_FALSE = "it must be false or absent"
UNSUPPORTED = (
    UnsupportedField("audio_data", absent, _NO_MEDIA),
    UnsupportedField("bootstrap_host", absent, MUST_BE_ABSENT),
    UnsupportedField("bootstrap_port", absent, MUST_BE_ABSENT),
    UnsupportedField("bootstrap_room", absent, MUST_BE_ABSENT),
    UnsupportedField("custom_logit_processor", absent, MUST_BE_ABSENT),
    UnsupportedField("data_parallel_rank", lambda value: False, _NO_RANK),
    UnsupportedField("image_data", absent, _NO_MEDIA),
    UnsupportedField("input_embeds", absent, "send text or input_ids instead"),
    UnsupportedField("max_thinking_tokens", lambda value: False, MUST_BE_ABSENT),
    UnsupportedField("modalities", absent, _NO_MEDIA),
    UnsupportedField("require_reasoning", absent, _FALSE),
    UnsupportedField("return_entropy", absent, _FALSE),
    UnsupportedField("return_flat_raw_output_top_logprobs", absent, _FALSE),
    UnsupportedField("return_flat_raw_top_logprobs", absent, _FALSE),
    UnsupportedField("return_hidden_states", absent, _FALSE),
    UnsupportedField("return_routed_experts", absent, _FALSE),
    UnsupportedField("return_sampling_mask", absent, _FALSE),
    UnsupportedField("routed_dp_rank", lambda value: False, _NO_RANK),
    UnsupportedField("session_params", absent, "send the whole prompt, and session_id"),
    UnsupportedField("video_data", absent, _NO_MEDIA),
    UnsupportedField("watermark", absent, MUST_BE_ABSENT),
    *other_names("sampling_params.max_new_tokens", "max_new_tokens", "max_tokens"),
)
UNSUPPORTED_SAMPLING = (
    UnsupportedField("beam_width", lambda value: value == 1, "it must be 1 or absent"),
    UnsupportedField("custom_params", absent, MUST_BE_ABSENT),
    UnsupportedField("stop_regex", absent, "send stop or regex"),
    UnsupportedField("structural_tag", absent, "send json_schema, regex or ebnf"),
    UnsupportedField("watermark", absent, MUST_BE_ABSENT),
    *other_names("max_new_tokens", "max_tokens", "max_completion_tokens"),
    *other_names("min_new_tokens", "min_tokens"),
    *other_names("sampling_seed", "seed"),
    *other_names("no_stop_trim", "include_stop_str_in_output"),
    *other_names("json_schema, regex or ebnf", "structured_outputs"),
    *other_names("return_logprob and top_logprobs_num, beside sampling_params", "logprobs"),
)
