"""The request body of ``/v1/chat/completions``: its fields, and which of them are unsupported."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from penstock.config.options.effort_map import REASONING_EFFORTS
from penstock.generation.request.schemas import Function, GenerateRequest, JsonObject, Message, about
from penstock.generation.request.unsupported import COMMON, MUST_BE_ABSENT, UnsupportedField, absent


class CustomTool(msgspec.Struct, kw_only=True, gc=False):
    name: str
    description: str | None = None
    format: Annotated[JsonObject | None, about("text (default), or a grammar that the input must match.")] = (
        None
    )


class ChatTool(msgspec.Struct, kw_only=True, gc=False):
    """A function, or a custom tool with free text."""

    type: Annotated[str, about("function or custom.")] = "function"
    function: Annotated[Function | None, about("Of the type function.")] = None
    custom: Annotated[CustomTool | None, about("Of the type custom.")] = None


class ChatCompletionRequest(GenerateRequest, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[
        list[Message], about("The conversation, oldest message first.", extra_json_schema={"minItems": 1})
    ]
    max_completion_tokens: Annotated[int | None, about("Maximum number of tokens to generate.")] = None
    logprobs: Annotated[bool | None, about("Return log probabilities.")] = None
    top_logprobs: Annotated[int | None, about("Alternatives to return per token; only with logprobs.")] = None
    add_generation_prompt: Annotated[
        bool | None, about("Start the assistant's turn; default true unless continue_final_message.")
    ] = None
    continue_final_message: Annotated[bool | None, about("Continue the last message.")] = None
    chat_template_kwargs: Annotated[JsonObject | None, about("Variables for the chat template.")] = None
    documents: Annotated[list[JsonObject] | None, about("Documents for the chat template.")] = None
    tools: Annotated[list[ChatTool] | None, about("Functions and custom tools for the chat template.")] = None
    tool_choice: Annotated[
        str | JsonObject | None,
        about(
            "none, auto (default with tools), required, a function or custom tool to call, or allowed_tools."
        ),
    ] = None
    parallel_tool_calls: Annotated[bool | None, about("false: at most one tool call per message.")] = None
    reasoning_effort: Annotated[
        str | None,
        about(
            "A variable for the chat template; sets enable_thinking as well: false for none.",
            extra_json_schema={"enum": [*REASONING_EFFORTS, None]},
        ),
    ] = None
    include_reasoning: Annotated[bool | None, about("false: omit reasoning from the reply.")] = None
    chat_template: str | None = None
    return_prompt_text: bool | None = None
    media_io_kwargs: JsonObject | None = None
    mm_processor_kwargs: JsonObject | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Annotated[Any, about("Not used: a guess at the output changes its speed alone.")] = None
    web_search_options: Any = None
    moderation: Any = None


UNSUPPORTED = (
    *COMMON,
    UnsupportedField("audio", absent, MUST_BE_ABSENT),
    UnsupportedField("chat_template", absent, "the server's own is used (--chat-template)"),
    UnsupportedField("function_call", lambda value: value == "none", "write tool_choice"),
    UnsupportedField("functions", absent, "write tools"),
    UnsupportedField("media_io_kwargs", absent, MUST_BE_ABSENT),
    UnsupportedField("mm_processor_kwargs", absent, MUST_BE_ABSENT),
    UnsupportedField("modalities", lambda value: value == ["text"], '["text"] is served alone'),
    UnsupportedField("moderation", absent, MUST_BE_ABSENT),
    UnsupportedField("return_prompt_text", absent, "it must be false or absent"),
    UnsupportedField("web_search_options", lambda value: False, MUST_BE_ABSENT),
)
