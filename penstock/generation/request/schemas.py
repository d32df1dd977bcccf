"""Request body fields that APIs share, with their JSON types: all fields of OpenAI's and vLLM's endpoints.

Only types are checked here. :mod:`penstock.generation.request.validation` checks values, and
:mod:`penstock.generation.request.unsupported` refuses known fields that are unsupported. A ``null`` field is
treated as absent. Descriptions become part of ``/openapi.json``.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.http.request import MAX_REQUEST_ID


def about(description: str, **bounds: Any) -> Meta:
    """A field's description and the bounds of its value."""
    return Meta(description=description, **bounds)


Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
PromptToken = Annotated[int, Meta(ge=0)]
JsonObject = dict[str, Any]
IMAGE_URL = (
    "The image: {url, detail}, or the URL alone. data: with base64; https: and http: from hosts that the "
    "operator allows. A model without vision is told that it cannot see it."
)
_OF_HELPERS = "Not used; the openai package's helpers add it to messages."

# For /openapi.json only; other code checks it and has its own error messages.
_TOKEN_KEYS = {"propertyNames": {"pattern": "^[0-9]+$"}}


class Part(msgspec.Struct, gc=False):
    """A part of a message's content."""

    type: Annotated[
        str,
        about("text, refusal, thinking, reasoning, image_url, or what no model here can see: file …"),
    ]
    text: str | None = None
    refusal: Annotated[str | None, about("The text of a part of type refusal.")] = None
    thinking: Annotated[
        str | list[JsonObject] | None, about("Reasoning, in a part of type thinking: a text, or parts.")
    ] = None
    reasoning: Annotated[str | None, about("Reasoning, in a part of type reasoning.")] = None
    image_url: Annotated[Any, about(IMAGE_URL)] = None
    image: Annotated[Any, about("Another name of image_url, in a part of type image.")] = None
    url: Annotated[Any, about("Another name of image_url, likewise.")] = None
    detail: Annotated[Any, about("Beside an image_url that is a text.")] = None
    uuid: Annotated[Any, about("Not used: an image is known by its bytes.")] = None
    input_audio: Annotated[Any, about("Not used: the model is told that it cannot hear it.")] = None
    audio_url: Annotated[Any, about("Not used, likewise.")] = None
    video_url: Annotated[Any, about("Not used, likewise.")] = None
    file: Annotated[Any, about("Not used, likewise.")] = None
    cache_control: Annotated[Any, about("Not used: the whole prompt is kept or not.")] = None
    prompt_cache_breakpoint: Annotated[Any, about("Not used, likewise.")] = None

    def value(self) -> str | None:
        """The text, which is in the field of the part's type."""
        return self.refusal if self.type == "refusal" else self.text

    def thought(self) -> str | None:
        """The reasoning of a part of type thinking or reasoning; None: it is of another type."""
        if self.type == "reasoning":
            return self.reasoning or ""
        if self.type != "thinking":
            return None
        given = self.thinking or ""
        return given if isinstance(given, str) else "".join(str(part.get("text", "")) for part in given)


class FunctionCall(msgspec.Struct, gc=False):
    name: str
    arguments: Annotated[str | JsonObject | None, about("A JSON object, or its text.")] = None
    parsed_arguments: Annotated[Any, about(_OF_HELPERS)] = None


class CustomCall(msgspec.Struct, gc=False):
    name: str
    input: Annotated[str, about("The text that the model wrote.")] = ""


class ToolCall(msgspec.Struct, gc=False):
    function: Annotated[FunctionCall | None, about("Of the type function.")] = None
    id: str | None = None
    type: Annotated[str, about("function or custom.")] = "function"
    custom: Annotated[CustomCall | None, about("Of the type custom.")] = None
    index: Annotated[Any, about(_OF_HELPERS)] = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | list[str | Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, about("Another name of reasoning_content.")] = None
    thinking: Annotated[str | None, about("Another name of reasoning_content.")] = None
    thought: Annotated[str | None, about("Another name of reasoning_content.")] = None
    refusal: Annotated[str | None, about("The text of a message without content.")] = None
    token_ids: Annotated[
        list[PromptToken] | None,
        about("Of an answer: its token ids as the reply had them. The prompt then begins with them."),
    ] = None
    prompt_token_ids: Annotated[
        list[PromptToken] | None, about("Of an answer with token_ids: its prompt's, as the reply had them.")
    ] = None
    annotations: Annotated[Any, about("Not used.")] = None
    audio: Annotated[Any, about("Not supported.")] = None
    function_call: Annotated[Any, about("Not supported; send tool_calls.")] = None
    parsed: Annotated[Any, about(_OF_HELPERS)] = None


class Function(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: Annotated[
        bool | None, about("true: keywords of parameters that cannot be enforced are an error.")
    ] = None


class Tool(msgspec.Struct, kw_only=True, gc=False):
    """A function the model may call. Chat templates print the fields in this order."""

    type: str = "function"
    function: Function


class StreamOptions(msgspec.Struct, gc=False):
    include_usage: Annotated[bool | None, about("Send a final event with the usage.")] = None
    continuous_usage_stats: Annotated[bool | None, about("Send the usage with every event.")] = None
    include_obfuscation: Annotated[bool | None, about("Not used: events are never padded.")] = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """OpenAI's wrapper of a JSON schema."""

    schema: Annotated[JsonObject | None, about("The schema that the output must match.")] = None
    name: Annotated[str | None, about("Not used.")] = None
    description: Annotated[str | None, about("Not used.")] = None
    strict: Annotated[
        bool | None, about("false: drop keywords of the schema that cannot be enforced; otherwise an error.")
    ] = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Annotated[str, about("text, json_object or json_schema.")]
    json_schema: Annotated[JsonSchemaFormat | None, about("Only with the type json_schema.")] = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A constraint on the output: one of json, json_object, regex, choice and grammar."""

    json: Annotated[JsonObject | str | None, about("A JSON schema, or its text.")] = None
    json_object: Annotated[bool | None, about("Any JSON object.")] = None
    regex: Annotated[str | None, about("A regular expression, in the syntax of Rust's regex crate.")] = None
    choice: Annotated[list[str] | None, about("One of these texts.")] = None
    grammar: Annotated[str | None, about("A context-free grammar, in llguidance's Lark or in GBNF.")] = None
    disable_any_whitespace: Annotated[bool | None, about("JSON without whitespace.")] = None
    disable_additional_properties: Annotated[
        bool | None, about("Forbid properties that the schema does not name.")
    ] = None
    whitespace_pattern: Annotated[str | None, about("Regular expression of the whitespace in JSON.")] = None
    structural_tag: Annotated[str | JsonObject | None, about("Not supported.")] = None


class Sampling(msgspec.Struct, kw_only=True):
    """Sampling parameters that have the same names in vLLM's and SGLang's APIs."""

    temperature: Annotated[float | None, about("Sampling temperature, >= 0; 0: greedy; default 1.")] = None
    top_p: Annotated[
        float | None, about("Nucleus sampling: total probability of the tokens to sample from; (0, 1].")
    ] = None
    top_k: Annotated[int | None, about("Number of most likely tokens to sample from; 0 or -1: all.")] = None
    min_p: Annotated[
        float | None, about("Minimum probability relative to the most likely token; [0, 1].")
    ] = None
    n: Annotated[int | None, about("Number of choices per prompt; choice i is sampled with seed + i.")] = None
    stop_token_ids: Annotated[list[int] | None, about("Token ids that end the output.")] = None
    ignore_eos: Annotated[bool | None, about("Continue after an end-of-sequence token.")] = None
    presence_penalty: Annotated[
        float | None, about("Penalty for tokens that occur in the output; [-2, 2].")
    ] = None
    frequency_penalty: Annotated[
        float | None, about("Penalty per occurrence of a token in the output; [-2, 2].")
    ] = None
    repetition_penalty: Annotated[float | None, about("Divides logits of prompt and output tokens; > 0.")] = (
        None
    )
    logit_bias: Annotated[
        dict[int, float] | None,
        about("Values to add to logits, by token id; clamped to [-100, 100].", extra_json_schema=_TOKEN_KEYS),
    ] = None
    skip_special_tokens: Annotated[bool | None, about("Omit special tokens from the text; default true.")] = (
        None
    )
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1, le=32767)] | None, about("Tokens per event; default: the server's.")
    ] = None


class VllmSampling(Sampling, kw_only=True):
    """vLLM's sampling parameters that each of its APIs has."""

    max_tokens: Annotated[int | None, about("Maximum number of tokens to generate.")] = None
    min_tokens: Annotated[int | None, about("Minimum number of tokens before the output may end.")] = None
    seed: Annotated[Int64 | None, about("Random seed; absent or -1: chosen at random.")] = None
    include_stop_str_in_output: Annotated[bool | None, about("Include the stop string in the output.")] = None
    allowed_token_ids: Annotated[
        list[int] | None, about("Token ids that may be generated; all others are excluded.")
    ] = None
    bad_words: Annotated[list[str] | None, about("Texts that must not be generated.")] = None
    prompt_logprobs: Annotated[
        int | None, about("Alternatives to return per prompt token; not with stream.")
    ] = None
    logprob_token_ids: Annotated[
        list[int] | None,
        about("Tokens whose logprobs are returned for each token, in place of the likeliest ones'."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, about("Constraint that the output must match.")
    ] = None
    spaces_between_special_tokens: bool | None = None
    routed_experts_prompt_start: int | None = None
    thinking_token_budget: Annotated[
        int | None,
        about("Maximum tokens of reasoning, after which it is ended; -1 or absent: no limit of its own."),
    ] = None
    repetition_detection: JsonObject | None = None
    watermarking: bool | None = None


class PromptCacheOptions(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How long a prompt is wanted in the prefix cache."""

    ttl: Annotated[str | None, about("After its last use: 30m, 1h …, at most 24h.")] = None
    mode: Annotated[str | None, about("implicit or explicit; not used: prefixes are found by tokens.")] = None
    prewarm: Annotated[bool | None, about("Only fill the prefix cache.")] = None
    comparison_response_id: Annotated[str | None, about("Not used.")] = None


class GenerateRequest(VllmSampling, kw_only=True):
    """The fields that completions and chat completions share."""

    model: Annotated[str | None, about("A served model; default: the first one.")] = None
    stream: Annotated[bool | None, about("Send tokens as server-sent events.")] = None
    temperature: Annotated[float | None, about("Sampling temperature, >= 0; 0: greedy.")] = None
    stream_options: Annotated[StreamOptions | None, about("Only with stream.")] = None
    stop: Annotated[
        str | Annotated[list[str], Meta(max_length=4)] | None,
        about("Stop strings, at most 4 of 1024 characters."),
    ] = None
    return_token_ids: Annotated[bool | None, about("Return token ids of prompt and output.")] = None
    return_weight_versions: Annotated[
        bool | None, about("Return which version of the weights made which output tokens.")
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        about("Maximum number of prompt tokens to keep; -1: as many as fit."),
    ] = None
    truncation_side: Annotated[
        str | None, about("Side on which truncation drops tokens: left (default) or right.")
    ] = None
    stream_interval_ms: Annotated[
        Annotated[int, Meta(ge=1, le=60_000)] | None,
        about("Milliseconds between events; not with stream_interval."),
    ] = None
    priority: Annotated[Int64 | None, about("Scheduling priority; lower values run earlier; default 0.")] = (
        None
    )
    request_id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID)] | None,
        about("Part of the reply's id; the header X-Request-Id takes precedence."),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=1024)] | None,
        about("Prompts with different salts do not share cached prefixes."),
    ] = None
    add_special_tokens: Annotated[
        bool | None, about("Add special tokens such as BOS to the prompt; default true, for chat false.")
    ] = None
    echo: Annotated[
        bool | None, about("Return the prompt (chat: the continued message) before the output.")
    ] = None
    user: Annotated[str | None, about("Not used: your end user.")] = None
    safety_identifier: Annotated[str | None, about("Not used: your end user.")] = None
    store: Annotated[bool | None, about("Not used: these replies are not stored.")] = None
    metadata: Annotated[JsonObject | None, about("Not used: these replies are not stored.")] = None
    service_tier: Annotated[
        str | None, about("Not used: the reply's service_tier is default if the request has one.")
    ] = None
    verbosity: Annotated[str | None, about("Not used: no open model knows it.")] = None
    prompt_cache_key: Annotated[
        str | None, about("Requests with the same one run on the same engine, as with X-Session-ID.")
    ] = None
    prompt_cache_retention: Annotated[
        str | None, about("in_memory, or 24h: the prompt is wanted so long after its last use.")
    ] = None
    prompt_cache_options: Annotated[PromptCacheOptions | None, about("How long the prompt is wanted.")] = None
    session_id: Annotated[
        str | None, about("Requests with the same one run on the same engine, as with X-Session-ID.")
    ] = None
    kv_hints: Annotated[JsonObject | None, about("For vLLM's engines, in its shape.")] = None
    response_format: Annotated[ResponseFormat | None, about("JSON format that the output must match.")] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, about("Constraint that the output must match; not with response_format.")
    ] = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    best_of: Annotated[
        int | None,
        about("Number of choices to generate per prompt; the n most likely are returned; not with stream."),
    ] = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    return_tokens_as_token_ids: Annotated[
        bool | None,
        about("Spell tokens in logprobs as token_id:5, so that each can be told from all others."),
    ] = None
    return_token_offsets: Annotated[
        bool | None, about("Not used: for vLLM's routes that only render prompts.")
    ] = None
    return_routed_experts: Annotated[
        bool | None,
        about(
            "Return the experts of every token but the last as routed_experts, for models with experts; not "
            "with stream or stop."
        ),
    ] = None
    mm_payload: Annotated[str | None, about("Not used: for the same routes, with images.")] = None
    return_mm_kwargs: Annotated[bool | None, about("Not used: an older name of mm_payload.")] = None
    kv_transfer_params: JsonObject | None = None
    ec_transfer_params: JsonObject | None = None
    vllm_xargs: JsonObject | None = None
