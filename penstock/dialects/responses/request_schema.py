"""The request body of ``/v1/responses``: its fields, and which of them are unsupported."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from penstock.generation.request.schemas import IMAGE_URL, GenerateRequest, JsonObject, about
from penstock.generation.request.unsupported import COMMON, MUST_BE_ABSENT, UnsupportedField, absent


class ContentPart(msgspec.Struct, gc=False, omit_defaults=True):
    """A part of a message, of a tool's output or of reasoning."""

    type: Annotated[
        str,
        about("input_text, output_text, refusal, reasoning_text, summary_text, input_image, input_file …"),
    ]
    text: str | None = None
    refusal: Annotated[str | None, about("The text of a part of type refusal.")] = None
    annotations: Annotated[Any, about("Not used.")] = None
    prompt_cache_breakpoint: Annotated[Any, about("Not used: the whole prompt is kept or not.")] = None
    logprobs: Annotated[Any, about("Not used.")] = None
    image_url: Annotated[Any, about(f"Of an input_image. {IMAGE_URL}")] = None
    detail: Annotated[Any, about("Of an input_image: auto, low, high or original.")] = None
    input_audio: Annotated[Any, about("Not used: the model is told that it cannot hear it.")] = None
    file_id: Annotated[Any, about("Not served: there are no files.")] = None
    file_data: Annotated[Any, about("Not used, likewise.")] = None
    file_url: Annotated[Any, about("Not used, likewise.")] = None
    filename: Annotated[Any, about("Not used, likewise.")] = None


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item of the conversation: a message, a call, what a call returned, or reasoning."""

    type: Annotated[
        str | None,
        about(
            "message (default), function_call, function_call_output, custom_tool_call, "
            "custom_tool_call_output, computer_call, computer_call_output, image_generation_call, reasoning, "
            "compaction, compaction_trigger or item_reference."
        ),
    ] = None
    id: Annotated[str | None, about("The item's id; that of a stored item in an item_reference.")] = None
    role: Annotated[str | None, about("Of a message: user, assistant, system or developer.")] = None
    content: Annotated[str | list[ContentPart] | None, about("Of a message or of reasoning.")] = None
    summary: Annotated[list[ContentPart] | None, about("Of reasoning.")] = None
    encrypted_content: Annotated[str | None, about("Of reasoning or compaction: as a response had it.")] = (
        None
    )
    call_id: Annotated[str | None, about("Of a call, and of what it returned.")] = None
    name: Annotated[str | None, about("Of a call: the tool's name.")] = None
    namespace: Annotated[str | None, about("Of a call: the namespace of the tool.")] = None
    arguments: Annotated[str | JsonObject | None, about("Of a function_call: JSON text.")] = None
    input: Annotated[str | None, about("Of a custom_tool_call.")] = None
    output: Annotated[
        str | list[ContentPart] | ContentPart | None,
        about("What a call returned: a text, or parts; of a computer_call_output a screenshot."),
    ] = None
    pending_safety_checks: Annotated[Any, about("Of a computer_call. Not used.")] = None
    acknowledged_safety_checks: Annotated[Any, about("Of a computer_call_output. Not used.")] = None
    action: Annotated[Any, about("Of a computer_call; of an image_generation_call, not used.")] = None
    actions: Annotated[Any, about("Of a computer_call.")] = None
    result: Annotated[Any, about("Of an image_generation_call: the image, as base64.")] = None
    status: Annotated[str | None, about("Not used.")] = None
    phase: Annotated[str | None, about("Not used.")] = None
    caller: Annotated[Any, about("Not used.")] = None
    internal_chat_message_metadata_passthrough: Annotated[Any, about("Not used: Codex's notes.")] = None


class TextFormat(msgspec.Struct, kw_only=True):
    """The format of the text."""

    type: Annotated[str, about("text, json_object or json_schema.")]
    name: Annotated[str | None, about("Not used.")] = None
    description: Annotated[str | None, about("Not used.")] = None
    schema: Annotated[JsonObject | None, about("The schema that the text must match.")] = None
    strict: Annotated[
        bool | None, about("false: drop keywords of the schema that cannot be enforced; otherwise an error.")
    ] = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Annotated[str | None, about("Not used: no open model knows it.")] = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Annotated[
        str | None,
        about("A variable for the chat template; sets enable_thinking as well: false for none."),
    ] = None
    summary: Annotated[
        str | None,
        about("auto, concise or detailed: the reasoning is returned as summary instead of content."),
    ] = None
    generate_summary: Annotated[str | None, about("An older name of summary.")] = None
    context: Annotated[str | None, about("Not used.")] = None


_SEARCH = about("Not used: of a web search, which clients offer without asking their users.")


class NamespacedTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function, or a custom tool with free text."""

    type: Annotated[str, about("function or custom; tools of other types are not offered.")]
    name: str | None = None
    description: str | None = None
    parameters: Annotated[JsonObject | None, about("Of a function: JSON schema of its arguments.")] = None
    strict: Annotated[
        bool | None, about("true: keywords of parameters that cannot be enforced are an error.")
    ] = None
    format: Annotated[
        JsonObject | None, about("Of a custom tool: text (default), or a grammar that its input must match.")
    ] = None
    allowed_callers: Annotated[Any, about("Not used: the model calls.")] = None
    defer_loading: Annotated[Any, about("Not used: the model sees every tool.")] = None


class ResponseTool(NamespacedTool, kw_only=True, omit_defaults=True):
    """A function, a custom tool with free text, or a namespace of both. Hosted tools are unsupported."""

    type: Annotated[str, about("function, custom or namespace; tools of other types are not offered.")]
    tools: Annotated[list[NamespacedTool] | None, about("Of a namespace.")] = None
    external_web_access: Annotated[Any, _SEARCH] = None
    filters: Annotated[Any, _SEARCH] = None
    search_content_types: Annotated[Any, _SEARCH] = None
    search_context_size: Annotated[Any, _SEARCH] = None
    user_location: Annotated[Any, _SEARCH] = None


class ResponseRequest(GenerateRequest, kw_only=True):
    """Body of POST /v1/responses."""

    input: Annotated[
        str | list[InputItem] | None, about("The user's message, or the items of the conversation.")
    ] = None
    instructions: Annotated[str | None, about("A system message before all items.")] = None
    tools: Annotated[list[ResponseTool] | None, about("Tools that the model may call.")] = None
    tool_choice: Annotated[
        str | JsonObject | None,
        about("none, auto (default), required, a function or custom tool to call, or allowed_tools."),
    ] = None
    parallel_tool_calls: Annotated[bool | None, about("false: at most one tool call.")] = None
    text: Annotated[TextOptions | None, about("Format of the text.")] = None
    reasoning: Annotated[ReasoningOptions | None, about("How the model reasons.")] = None
    truncation: Annotated[
        str | None, about("auto: drop the oldest items if the context is too small; disabled: an error.")
    ] = None
    max_output_tokens: Annotated[int | None, about("Maximum number of tokens, reasoning included.")] = None
    max_tool_calls: Annotated[
        int | None, about("Not used: limits hosted tools, of which there are none.")
    ] = None
    include: Annotated[
        list[str] | None, about("reasoning.encrypted_content, message.output_text.logprobs.")
    ] = None
    top_logprobs: Annotated[int | None, about("Alternatives to return per token, with logprobs.")] = None
    store: Annotated[bool | None, about("Keep the response; default true if the server has a store.")] = None
    metadata: Annotated[
        dict[str, str] | None, about("Notes of the client, at most 16, that the response repeats.")
    ] = None
    background: Annotated[bool | None, about("Generate without waiting for the client; needs store.")] = None
    previous_response_id: Annotated[str | None, about("A stored response that this one continues.")] = None
    request_id: Annotated[str | None, about("Not used: ids of responses are the server's own.")] = None
    chat_template_kwargs: Annotated[JsonObject | None, about("Variables for the chat template.")] = None
    include_reasoning: Annotated[bool | None, about("false: omit reasoning from the response.")] = None
    client_metadata: Annotated[Any, about("Not used: what a client notes for itself.")] = None
    type: Annotated[str | None, about("Over a WebSocket: response.create.")] = None
    stream_id: Annotated[str | None, about("Over a WebSocket: what every event of the response repeats.")] = (
        None
    )
    generate: Annotated[
        bool | None, about("false: prepare the prompt, and answer with a response without output.")
    ] = None
    background_options: Annotated[Any, about("Not used: every response begins as soon as it can.")] = None
    access_programs: Annotated[Any, about("Not used: of OpenAI's models.")] = None
    image: Annotated[Any, about("Not used: the model sees no images.")] = None
    prompt: Any = None
    conversation: Any = None
    context_management: Annotated[
        Any,
        about('[{"type": "compaction", "compact_threshold": N}]: summarize a longer conversation first.'),
    ] = None
    moderation: Any = None


UNSUPPORTED = (
    *COMMON,
    UnsupportedField("logprob_token_ids", absent, MUST_BE_ABSENT),
    UnsupportedField("best_of", lambda value: value == 1, "it must be 1 or absent"),
    UnsupportedField("conversation", absent, "continue a response by previous_response_id"),
    UnsupportedField("echo", absent, "it must be false or absent"),
    UnsupportedField("max_tokens", lambda value: False, "write max_output_tokens"),
    UnsupportedField("moderation", absent, MUST_BE_ABSENT),
    UnsupportedField("n", lambda value: value == 1, "a response has one output, so it must be 1 or absent"),
    UnsupportedField("prompt", absent, "prompt templates are not kept here; send instructions and input"),
    UnsupportedField("prompt_logprobs", lambda value: False, MUST_BE_ABSENT),
    UnsupportedField("response_format", absent, 'write text: {"format": …}'),
    UnsupportedField("return_routed_experts", absent, "it must be false or absent"),
    UnsupportedField("return_token_ids", absent, "it must be false or absent"),
)
