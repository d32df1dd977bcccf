"""The request bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, and their unsupported fields."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.generation.request.schemas import Int64, JsonObject, about
from penstock.generation.request.unsupported import MUST_BE_ABSENT, UnsupportedField, absent

_CACHE = about(
    "The prompt is wanted for its ttl, 5m or 1h, after the last use. In system it marks what stays the same."
)


class InnerBlock(msgspec.Struct, kw_only=True):
    """A block within a block, such as the text of a tool's result."""

    type: Annotated[
        str,
        about(
            "text, image, document, search_result or tool_reference; others are unsupported. A model "
            "without vision is told that it cannot see images."
        ),
    ]
    text: str | None = None
    tool_name: Annotated[str | None, about("Of a tool_reference.")] = None
    source: Annotated[
        str | JsonObject | None,
        about(
            "Of an image: base64 with media_type and data, or url. Of a document: its text or blocks; the "
            "model is told that it cannot see others."
        ),
    ] = None
    content: Annotated[str | list[JsonObject] | JsonObject | None, about("Of a search result.")] = None
    title: str | None = None
    context: str | None = None
    citations: Annotated[Any, about("Not used: no citations are made.")] = None
    cache_control: Annotated[Any, _CACHE] = None


class ContentBlock(msgspec.Struct, kw_only=True):
    """A block of a message's content; its type says which of the other fields it has."""

    type: Annotated[
        str,
        about(
            "text, image, tool_use, tool_result, thinking, redacted_thinking, document, search_result or "
            "tool_reference; others are unsupported. A model without vision is told that it cannot see "
            "images."
        ),
    ]
    text: str | None = None
    tool_name: Annotated[str | None, about("Of a tool_reference.")] = None
    id: Annotated[str | None, about("Of a tool_use.")] = None
    name: Annotated[str | None, about("The tool of a tool_use.")] = None
    input: Annotated[Any, about("The arguments of a tool_use, an object.")] = None
    tool_use_id: Annotated[str | None, about("The call that a tool_result answers.")] = None
    content: Annotated[
        str | list[InnerBlock] | JsonObject | None, about("Of a tool_result or search_result.")
    ] = None
    is_error: Annotated[bool | None, about("Whether the tool failed.")] = None
    thinking: str | None = None
    signature: Annotated[str | None, about("Of thinking: as it was returned; never an error.")] = None
    encrypted_content: Annotated[str | None, about("Of a compaction, as it was returned.")] = None
    tool_changes: Annotated[Any, about("Of a compaction. Not used.")] = None
    data: Annotated[Any, about("Of redacted_thinking. Not used.")] = None
    source: Annotated[
        str | JsonObject | None,
        about(
            "Of an image: base64 with media_type and data, or url. Of a document: its text or blocks; the "
            "model is told that it cannot see others."
        ),
    ] = None
    title: str | None = None
    context: str | None = None
    caller: Annotated[Any, about("Not used.")] = None
    toolset_name: Annotated[Any, about("Not used.")] = None
    citations: Annotated[Any, about("Not used: no citations are made.")] = None
    cache_control: Annotated[Any, _CACHE] = None


class InputMessage(msgspec.Struct, kw_only=True):
    """A turn of the conversation."""

    role: Annotated[str, about("user, assistant or system.")]
    content: str | list[ContentBlock]
    id: Annotated[Any, about("Not used.")] = None
    clear_context: Annotated[Any, about("Not used.")] = None
    output_config: Annotated[Any, about("Not used: that of the request counts.")] = None


class SystemBlock(msgspec.Struct, kw_only=True):
    type: Annotated[str, about("text.")]
    text: str
    citations: Annotated[Any, about("Not used.")] = None
    cache_control: Annotated[Any, _CACHE] = None


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool that the client runs."""

    name: str | None = None
    type: Annotated[
        str | None,
        about("custom, or a client tool of Anthropic's: bash_…, text_editor_…, memory_…; no server tools."),
    ] = None
    description: str | None = None
    input_schema: Annotated[
        JsonObject | None, about("JSON schema of the input; required by custom tools.")
    ] = None
    strict: Annotated[
        bool | None, about("true: keywords of the schema that cannot be enforced are an error.")
    ] = None
    max_characters: Annotated[Any, about("Not used.")] = None
    allowed_callers: Annotated[Any, about("Not used: the model calls.")] = None
    defer_loading: Annotated[Any, about("Not used: the model sees every tool.")] = None
    eager_input_streaming: Annotated[Any, about("Not used: arguments are always streamed.")] = None
    input_examples: Annotated[Any, about("Not used.")] = None
    cache_control: Annotated[Any, _CACHE] = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    type: Annotated[str, about("auto, any, tool or none.")]
    name: Annotated[str | None, about("Only with the type tool.")] = None
    disable_parallel_tool_use: Annotated[bool | None, about("true: at most one call.")] = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    type: Annotated[str, about("enabled, adaptive, between_tools or disabled.")]
    budget_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        about("Maximum tokens of thinking, after which it is ended; with the type enabled."),
    ] = None
    display: Annotated[str | None, about("omitted: thinking is empty, and its text is in the signature.")] = (
        None
    )


class MessagesOutputFormat(msgspec.Struct, kw_only=True):
    type: Annotated[str, about("json_schema.")]
    schema: Annotated[JsonObject | None, about("The JSON schema that the output must match.")] = None
    name: Annotated[Any, about("Not used.")] = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: Annotated[str | None, about("The variable reasoning_effort of the chat template.")] = None
    format: MessagesOutputFormat | None = None
    task_budget: Annotated[Any, about("Not used.")] = None


class RequestMetadata(msgspec.Struct, kw_only=True):
    user_id: Annotated[str | None, about("Whose requests these are.")] = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    messages: Annotated[
        list[InputMessage], about("The conversation, oldest turn first.", extra_json_schema={"minItems": 1})
    ]
    model: Annotated[str | None, about("A served model or alias; default: the first model.")] = None
    system: Annotated[str | list[SystemBlock] | None, about("The system prompt.")] = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[
        MessagesOutputFormat | None, about("An earlier name of output_config.format.")
    ] = None
    chat_template_kwargs: Annotated[JsonObject | None, about("Variables for the chat template.")] = None
    cache_control: Annotated[Any, _CACHE] = None
    context_management: Annotated[
        Any,
        about(
            "edits of type compact_20260112: summarize a longer conversation first. A warning names others."
        ),
    ] = None
    compaction: Annotated[
        Any, about('{"type": "summarize"}: only summarize the conversation, in a compaction block.')
    ] = None
    speed: Annotated[Any, about("Not used.")] = None
    betas: Annotated[Any, about("Not used.")] = None
    fallbacks: Annotated[Any, about("Not used: the model declines nothing by policy.")] = None
    fallback_credit_token: Annotated[Any, about("Not used, likewise.")] = None
    billing_policy: Annotated[Any, about("Not used.")] = None
    mcp_servers: Annotated[list[Any] | None, about("Not supported; not counted.")] = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[
        Annotated[int, Meta(ge=0)],
        about("Maximum number of tokens to generate; the context may leave less. 0: only fill the cache."),
    ]
    stream: Annotated[bool | None, about("Send server-sent events.")] = None
    temperature: Annotated[float | None, about("Sampling temperature, >= 0; 0: greedy.")] = None
    top_p: Annotated[float | None, about("Total probability of the tokens to sample from; (0, 1].")] = None
    top_k: Annotated[int | None, about("Number of most likely tokens to sample from; 0 or -1: all.")] = None
    stop_sequences: Annotated[
        Annotated[list[str], Meta(max_length=16)] | None,
        about("Texts that end the output, at most 16 of 1024 characters."),
    ] = None
    metadata: RequestMetadata | None = None
    service_tier: Annotated[str | None, about("Not used: all requests are served alike.")] = None
    container: Annotated[Any, about("Not supported.")] = None
    thread: Annotated[
        Any, about("Not supported: the server keeps no conversation. Clients then send the whole one.")
    ] = None
    inference_geo: Annotated[Any, about("Not used.")] = None
    diagnostics: Annotated[Any, about("Not used.")] = None
    seed: Annotated[Int64 | None, about("Random seed; absent or -1: chosen at random.")] = None
    min_p: Annotated[float | None, about("Minimum probability relative to the likeliest token; [0, 1].")] = (
        None
    )
    priority: Annotated[Int64 | None, about("Scheduling priority; lower values run earlier.")] = None
    session_id: Annotated[
        str | None, about("Requests with the same one run on the same engine, as with X-Session-ID.")
    ] = None
    kv_hints: Annotated[JsonObject | None, about("For vLLM's engines, in its shape.")] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=1024)] | None,
        about("Prompts with different salts do not share cached prefixes."),
    ] = None


UNSUPPORTED = (
    UnsupportedField("container", absent, MUST_BE_ABSENT),
    UnsupportedField("mcp_servers", absent, MUST_BE_ABSENT),
    UnsupportedField("thread", absent, MUST_BE_ABSENT),
)
