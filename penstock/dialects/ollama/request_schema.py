"""The request bodies of Ollama's API: their fields, and which of them are unsupported."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.dialects.chat.request_schema import ChatTool
from penstock.generation.request.schemas import Int64, JsonObject, about
from penstock.generation.request.unsupported import UnsupportedField, absent

_OF_RUNNER = about("Not used: how the model runs is decided when the server starts.")


class OllamaOptions(msgspec.Struct, kw_only=True):
    """How to sample. What is absent has the default of the model's files."""

    num_predict: Annotated[int | None, about("Maximum number of tokens; below 1: what fits.")] = None
    temperature: Annotated[float | None, about("Sampling temperature, >= 0; 0: greedy.")] = None
    top_k: Annotated[int | None, about("Number of most likely tokens to sample from; 0: all.")] = None
    top_p: Annotated[float | None, about("Total probability of the tokens to sample from; (0, 1].")] = None
    min_p: Annotated[float | None, about("Minimum probability relative to the likeliest token; [0, 1].")] = (
        None
    )
    seed: Annotated[Int64 | None, about("Random seed; absent or -1: chosen at random.")] = None
    stop: Annotated[
        str | Annotated[list[str], Meta(max_length=16)] | None,
        about("Texts that end the output, at most 16 of 1024 characters."),
    ] = None
    repeat_penalty: Annotated[
        float | None, about("Divides logits of the tokens of prompt and output; > 0.")
    ] = None
    presence_penalty: Annotated[float | None, about("Of tokens that occur in the output; [-2, 2].")] = None
    frequency_penalty: Annotated[float | None, about("Per occurrence in the output; [-2, 2].")] = None
    repeat_last_n: Annotated[Any, about("Not used: penalties look at all tokens.")] = None
    num_ctx: Annotated[Any, about("Not used: the context is the server's (--max-model-len).")] = None
    num_keep: Annotated[Any, about("Not used: no prompt is cut.")] = None
    num_batch: Annotated[Any, _OF_RUNNER] = None
    num_gpu: Annotated[Any, _OF_RUNNER] = None
    main_gpu: Annotated[Any, _OF_RUNNER] = None
    num_thread: Annotated[Any, _OF_RUNNER] = None
    use_mmap: Annotated[Any, _OF_RUNNER] = None
    mirostat: float | None = None
    tfs_z: float | None = None
    typical_p: float | None = None


class OllamaCallFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: Annotated[JsonObject | str | None, about("A JSON object, or its text.")] = None
    index: Annotated[Any, about("Not used.")] = None


class OllamaToolCall(msgspec.Struct, kw_only=True):
    function: OllamaCallFunction
    id: str | None = None
    type: Annotated[Any, about("Not used.")] = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One message of a conversation."""

    role: Annotated[str, about("system, user, assistant or tool.")]
    content: str | None = None
    thinking: Annotated[str | None, about("The reasoning of an assistant's message.")] = None
    images: Annotated[list[str] | None, about("Base64. A model without vision is told of them.")] = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: Annotated[str | None, about("Of a tool's result: the function that was called.")] = None
    tool_call_id: Annotated[str | None, about("Of a tool's result: the call that it answers.")] = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """The fields that both generating routes have."""

    model: Annotated[str | None, about("A served model, with or without :latest; default: the first.")] = None
    stream: Annotated[bool | None, about("false: send one JSON object; default: one per line.")] = None
    format: Annotated[
        str | JsonObject | None, about("json, or a JSON schema, that the output must match.")
    ] = None
    options: OllamaOptions | None = None
    think: Annotated[
        bool | str | None, about("Whether to think, or how hard: low, medium, high; default: the template's.")
    ] = None
    logprobs: Annotated[bool | None, about("Return log probabilities.")] = None
    top_logprobs: Annotated[int | None, about("Alternatives to return per token; only with logprobs.")] = None
    keep_alive: Annotated[Any, about("Not used: the model stays loaded.")] = None
    truncate: Annotated[Any, about("Not used: a prompt that is too long is an error.")] = None
    shift: Annotated[Any, about("Not used: an output ends where the context does.")] = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """Body of POST /api/chat."""

    messages: Annotated[
        list[OllamaMessage] | None,
        about("The conversation, oldest message first; none: nothing is generated."),
    ] = None
    tools: Annotated[list[ChatTool] | None, about("Functions that the model may call.")] = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """Body of POST /api/generate."""

    prompt: Annotated[str | None, about("What to answer; absent or empty: nothing is generated.")] = None
    system: Annotated[str | None, about("The system prompt; not with raw.")] = None
    raw: Annotated[bool | None, about("true: complete the prompt as it is, without the template.")] = None
    images: Annotated[list[str] | None, about("Base64. A model without vision is told of them.")] = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None


class OllamaEmbedding(msgspec.Struct, kw_only=True):
    """The fields that both routes for vectors have."""

    model: Annotated[str | None, about("A served model, with or without :latest; default: the first.")] = None
    options: Annotated[JsonObject | None, _OF_RUNNER] = None
    keep_alive: Annotated[Any, about("Not used: the model stays loaded.")] = None


class OllamaEmbedRequest(OllamaEmbedding, kw_only=True):
    """Body of POST /api/embed."""

    input: Annotated[str | list[str] | None, about("A text, or a list of texts.")] = None
    truncate: Annotated[
        bool | None, about("Cut texts that are too long (default); false: they are an error.")
    ] = None
    dimensions: Annotated[int | None, about("How many values of each vector are wanted.")] = None


class OllamaEmbeddingsRequest(OllamaEmbedding, kw_only=True):
    """Body of POST /api/embeddings, an older form."""

    prompt: Annotated[str | None, about("A text.")] = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """Body of POST /api/show."""

    model: Annotated[str | None, about("A served model.")] = None
    name: Annotated[str | None, about("An earlier name of model.")] = None
    verbose: Annotated[Any, about("Not used.")] = None


UNSUPPORTED = (
    UnsupportedField("suffix", absent, "text is completed at its end only"),
    UnsupportedField("template", absent, "the server's own is used (--chat-template); send raw without it"),
    UnsupportedField("context", absent, "send the conversation to /api/chat"),
)
UNSUPPORTED_OPTIONS = (
    UnsupportedField("mirostat", absent, "it must be 0 or absent"),
    UnsupportedField("tfs_z", lambda value: value == 1, "it must be 1 or absent"),
    UnsupportedField("typical_p", lambda value: value == 1, "it must be 1 or absent"),
)
