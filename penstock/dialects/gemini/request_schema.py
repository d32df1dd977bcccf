"""The request bodies of Gemini's API: their fields, and which of them are unsupported."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.generation.request.schemas import Int64, JsonObject, about
from penstock.generation.request.unsupported import MUST_BE_ABSENT, UnsupportedField, absent

_SNAKE = re.compile(
    rb'"(system_instruction|generation_config|tool_config|function_calling_config|allowed_function_names'
    rb"|function_declarations|function_call|function_response|inline_data|file_data|thought_signature"
    rb"|max_output_tokens|top_p|top_k|stop_sequences|candidate_count|response_mime_type|response_schema"
    rb"|thinking_config|thinking_budget|include_thoughts|safety_settings|task_type|output_dimensionality"
    rb'|auto_truncate)"(?=\s*:)'
)
_UNUSED = about("Not used.")
_MEDIA = about(
    "An image: {mimeType, data} with base64, or {mimeType, fileUri} with an https: URL. The model is told of "
    "what it cannot see."
)


def camel_case(body: bytes) -> bytes:
    """The body with the names that fields have in Google's JSON, which may also be written in snake case."""
    return _SNAKE.sub(lambda name: re.sub(rb"_(.)", lambda each: each[1].upper(), name[0]), body)


class GeminiCall(msgspec.Struct, kw_only=True):
    name: str
    args: JsonObject | None = None
    id: str | None = None


class GeminiResponse(msgspec.Struct, kw_only=True):
    name: str | None = None
    response: Annotated[Any, about("What the function returned: output or result, error, or any object.")] = (
        None
    )
    id: str | None = None
    parts: Annotated[list[JsonObject] | None, _MEDIA] = None
    willContinue: Annotated[Any, _UNUSED] = None
    scheduling: Annotated[Any, _UNUSED] = None


class GeminiPart(msgspec.Struct, kw_only=True):
    """A part of a turn: one of text, functionCall, functionResponse, inlineData and fileData."""

    text: str | None = None
    thought: Annotated[bool | None, about("Whether the text is reasoning.")] = None
    thoughtSignature: Annotated[str | None, about("As it was returned; never an error.")] = None
    functionCall: GeminiCall | None = None
    functionResponse: GeminiResponse | None = None
    inlineData: Annotated[JsonObject | None, _MEDIA] = None
    fileData: Annotated[JsonObject | None, _MEDIA] = None
    executableCode: Any = None
    codeExecutionResult: Any = None
    videoMetadata: Annotated[Any, _UNUSED] = None
    mediaResolution: Annotated[Any, _UNUSED] = None


class GeminiContent(msgspec.Struct, kw_only=True):
    """A turn of the conversation."""

    parts: list[GeminiPart] | None = None
    role: Annotated[str | None, about("user (default), model or function.")] = None


class GeminiFunction(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: Annotated[JsonObject | None, about("Their schema, in Google's spelling.")] = None
    parametersJsonSchema: Annotated[JsonObject | None, about("Their JSON schema.")] = None
    response: Annotated[Any, _UNUSED] = None
    responseJsonSchema: Annotated[Any, _UNUSED] = None
    behavior: Annotated[Any, _UNUSED] = None


class GeminiTool(msgspec.Struct, kw_only=True):
    """Functions that the client runs."""

    functionDeclarations: list[GeminiFunction] | None = None
    googleSearch: Any = None
    googleSearchRetrieval: Any = None
    codeExecution: Any = None
    urlContext: Any = None
    computerUse: Any = None
    fileSearch: Any = None
    googleMaps: Any = None


class GeminiCallingConfig(msgspec.Struct, kw_only=True):
    mode: Annotated[str | None, about("AUTO, ANY, VALIDATED or NONE.")] = None
    allowedFunctionNames: list[str] | None = None


class GeminiToolConfig(msgspec.Struct, kw_only=True):
    functionCallingConfig: GeminiCallingConfig | None = None
    retrievalConfig: Annotated[Any, _UNUSED] = None


class GeminiThinking(msgspec.Struct, kw_only=True):
    includeThoughts: Annotated[bool | None, about("Return reasoning, as parts with thought.")] = None
    thinkingBudget: Annotated[int | None, about("Tokens of reasoning; 0: none, -1: no limit.")] = None
    thinkingLevel: Annotated[str | None, about("MINIMAL, LOW, MEDIUM or HIGH.")] = None


class GeminiConfig(msgspec.Struct, kw_only=True):
    """How to generate. What is absent has the default of the model's files."""

    temperature: float | None = None
    topP: float | None = None
    topK: int | None = None
    candidateCount: int | None = None
    maxOutputTokens: int | None = None
    stopSequences: Annotated[list[str], Meta(max_length=16)] | None = None
    presencePenalty: float | None = None
    frequencyPenalty: float | None = None
    seed: Int64 | None = None
    responseMimeType: Annotated[str | None, about("text/plain, application/json or text/x.enum.")] = None
    responseSchema: Annotated[JsonObject | None, about("In Google's spelling.")] = None
    responseJsonSchema: JsonObject | None = None
    responseLogprobs: bool | None = None
    logprobs: Annotated[int | None, about("Alternatives per token; only with responseLogprobs.")] = None
    thinkingConfig: GeminiThinking | None = None
    responseModalities: list[str] | None = None
    mediaResolution: Annotated[Any, _UNUSED] = None
    speechConfig: Any = None
    imageConfig: Annotated[Any, _UNUSED] = None
    enableEnhancedCivicAnswers: Annotated[Any, _UNUSED] = None


class GeminiRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1beta/models/{model}:generateContent."""

    contents: Annotated[list[GeminiContent], about("The conversation.", extra_json_schema={"minItems": 1})]
    systemInstruction: GeminiContent | None = None
    generationConfig: GeminiConfig | None = None
    tools: list[GeminiTool] | None = None
    toolConfig: GeminiToolConfig | None = None
    model: Annotated[Any, about("Not used: the path names it.")] = None
    safetySettings: Annotated[Any, _UNUSED] = None
    labels: Annotated[Any, _UNUSED] = None
    serviceTier: Annotated[Any, _UNUSED] = None
    store: Annotated[Any, _UNUSED] = None
    cachedContent: str | None = None


class GeminiCount(msgspec.Struct, kw_only=True):
    """Body of POST /v1beta/models/{model}:countTokens."""

    contents: list[GeminiContent] | None = None
    generateContentRequest: Annotated[
        GeminiRequest | None, about("A whole request, in place of contents.")
    ] = None
    systemInstruction: GeminiContent | None = None
    tools: list[GeminiTool] | None = None
    generationConfig: Annotated[Any, _UNUSED] = None
    model: Annotated[Any, about("Not used: the path names it.")] = None


class GeminiEmbedRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1beta/models/{model}:embedContent."""

    content: Annotated[GeminiContent, about("The text, whose parts are joined.")]
    taskType: Annotated[
        str | None,
        about("RETRIEVAL_QUERY, RETRIEVAL_DOCUMENT …: which of the model's prompts precedes the text."),
    ] = None
    title: Annotated[str | None, about("Of a document.")] = None
    outputDimensionality: Annotated[int | None, about("How many values of the vector are wanted.")] = None
    autoTruncate: Annotated[
        bool | None, about("Cut a text that is too long (default); false: it is an error.")
    ] = None
    model: Annotated[Any, about("Not used: the path names it.")] = None


class GeminiEmbedBatch(msgspec.Struct, kw_only=True):
    """Body of POST /v1beta/models/{model}:batchEmbedContents."""

    requests: Annotated[list[GeminiEmbedRequest], about("The texts.", extra_json_schema={"minItems": 1})]
    model: Annotated[Any, about("Not used: the path names it.")] = None


def _only_text(value: Any) -> bool:
    return [str(each).upper() for each in value] == ["TEXT"]


UNSUPPORTED_CONFIG = (
    UnsupportedField("responseModalities", _only_text, "TEXT is served alone"),
    UnsupportedField("speechConfig", absent, MUST_BE_ABSENT),
)
