"""``/v1beta/models/{model}:generateContent`` and its like: Gemini's API. Requests become chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.config.serve import ServeConfig
from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.chat.request_schema import ChatCompletionRequest
from penstock.dialects.gemini.conversation import (
    convert_choice,
    convert_contents,
    convert_tools,
    json_schema,
)
from penstock.dialects.gemini.errors import error_body
from penstock.dialects.gemini.model_list import model_entry, model_list
from penstock.dialects.gemini.reply import GeminiFields, GeminiReply
from penstock.dialects.gemini.request_schema import (
    UNSUPPORTED_CONFIG,
    GeminiConfig,
    GeminiCount,
    GeminiRequest,
    GeminiThinking,
    camel_case,
)
from penstock.dialects.renamed_fields import renamed
from penstock.generation.dialect import (
    NO_INFO,
    AskedModels,
    CountedPrompt,
    DescribingRoute,
    Dialect,
    RequestInfo,
    TokenCounter,
)
from penstock.generation.input_processor import InputProcessor
from penstock.generation.plan import RequestPlan
from penstock.generation.request.schemas import JsonSchemaFormat, ResponseFormat, StructuredOutputs, Tool
from penstock.generation.request.unsupported_content import UnsupportedContent
from penstock.http.access_keys import GOOGLE_KEY
from penstock.http.errors import ApiError, encode_json, not_served, refused

PREFIX = "/v1beta/models/"
_EFFORTS = {"MINIMAL": "minimal", "LOW": "low", "MEDIUM": "medium", "HIGH": "high"}
_NAMES = {
    "messages": "contents",
    "max_tokens": "generationConfig.maxOutputTokens",
    "temperature": "generationConfig.temperature",
    "top_p": "generationConfig.topP",
    "top_k": "generationConfig.topK",
    "n": "generationConfig.candidateCount",
    "seed": "generationConfig.seed",
    "stop": "generationConfig.stopSequences",
    "presence_penalty": "generationConfig.presencePenalty",
    "frequency_penalty": "generationConfig.frequencyPenalty",
    "top_logprobs": "generationConfig.logprobs",
    "response_format": "generationConfig.responseSchema",
    "structured_outputs": "generationConfig.responseSchema",
    "thinking_token_budget": "generationConfig.thinkingConfig.thinkingBudget",
    "tool_choice": "toolConfig.functionCallingConfig.allowedFunctionNames",
}
"""The fields of chat completions by their names here."""


def model_of(path: str) -> str:
    """The model in the path of a request."""
    return path.partition("/models/")[2].rpartition(":")[0]


class Gemini(Dialect):
    """Whole replies."""

    path = PREFIX + "{model}:generateContent"
    streams: ClassVar[bool] = False

    def __init__(self, config: ServeConfig, processor: InputProcessor) -> None:
        self._chat = ChatCompletions(config, processor)
        self._processor = processor
        self._decoder = processor.decoder(GeminiRequest)
        self._unsupported = processor.unsupported(UNSUPPORTED_CONFIG)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        request = self._decoder.decode(camel_case(body))
        config = request.generationConfig or GeminiConfig()
        thinking = config.thinkingConfig or GeminiThinking()
        if request.cachedContent:
            raise not_served("cachedContent", "send the whole conversation; prefixes are cached")
        try:
            self._unsupported.check_fields(config)
        except ApiError as error:
            field = f"generationConfig.{error.param}"
            raise ApiError(400, f"generationConfig.{error.message}", param=field) from None
        content = self._processor.unsupported_content()
        chat = conversation(request, content)
        self._sample(chat, config)
        self._think(chat, thinking)
        chat.model, chat.stream = model_of(info.path), self.streams
        try:
            plan = self._chat.plan_request(chat, info, content)
        except ApiError as error:
            raise renamed(error, _NAMES) from None
        plan.include_usage, plan.continuous_usage = True, False
        events = b"alt=sse" in info.target
        plan.dialect_fields = GeminiFields(chat.model, bool(thinking.includeThoughts), events)
        return plan

    def _sample(self, chat: ChatCompletionRequest, config: GeminiConfig) -> None:
        """Raises ApiError."""
        if config.maxOutputTokens:
            chat.max_tokens = min(config.maxOutputTokens, self._processor.model_info.max_model_len)
        chat.temperature, chat.top_p, chat.top_k = config.temperature, config.topP, config.topK
        chat.n, chat.seed, chat.stop = config.candidateCount, config.seed, config.stopSequences or None
        chat.presence_penalty, chat.frequency_penalty = config.presencePenalty, config.frequencyPenalty
        chat.logprobs, chat.top_logprobs = config.responseLogprobs, config.logprobs
        schema, kind = config.responseJsonSchema, config.responseMimeType or "text/plain"
        if schema is None and config.responseSchema is not None:
            schema = json_schema(config.responseSchema)
        if kind == "text/x.enum" and schema is not None:
            chat.structured_outputs = StructuredOutputs(choice=[str(each) for each in schema.get("enum", ())])
        elif kind == "application/json" or (schema is not None and kind == "text/plain"):
            wrapped = None if schema is None else JsonSchemaFormat(schema=schema, strict=False)
            chat.response_format = ResponseFormat(
                type="json_object" if schema is None else "json_schema", json_schema=wrapped
            )
        elif kind != "text/plain":
            field = "generationConfig.responseMimeType"
            raise refused(f"{field} must be text/plain, application/json or text/x.enum.", field, kind)

    def _think(self, chat: ChatCompletionRequest, thinking: GeminiThinking) -> None:
        """Raises ApiError."""
        budget, level = thinking.thinkingBudget, (thinking.thinkingLevel or "").upper()
        if level and level != "THINKING_LEVEL_UNSPECIFIED":
            field = "generationConfig.thinkingConfig.thinkingLevel"
            if level not in _EFFORTS:
                raise refused(f"{field} must be {', '.join(_EFFORTS)}.", field, level)
            chat.reasoning_effort = _EFFORTS[level]
        if budget is not None:
            on = budget != 0
            chat.chat_template_kwargs = {"enable_thinking": on, "thinking": on}
            if not self._processor.thinking.unavailable:  # of a model that does not reason there is none
                chat.thinking_token_budget = max(budget, -1)

    def recognizes(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        return path.startswith("/v1beta/") or GOOGLE_KEY in headers

    def reply_format(self, plan: RequestPlan, request_id: str) -> GeminiReply:
        return GeminiReply(plan.request_id or request_id, plan.dialect_fields)

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return error_body(error)


class GeminiStream(Gemini):
    """Streams: server-sent events with ``alt=sse``, otherwise a JSON array."""

    path = PREFIX + "{model}:streamGenerateContent"
    streams = True


def conversation(request: GeminiRequest, content: UnsupportedContent) -> ChatCompletionRequest:
    """A chat completion with the conversation and its functions. ``content`` notes its pictures. Raises
    ApiError."""
    if not request.contents:
        raise ApiError(400, "contents must have at least one turn.", param="contents")
    return ChatCompletionRequest(
        messages=convert_contents(request.systemInstruction, request.contents, content),
        tools=convert_tools(request.tools),
        tool_choice=convert_choice(request.toolConfig),
    )


class GeminiTokenCounter(TokenCounter):
    """Counts the tokens of a conversation."""

    path = PREFIX + "{model}:countTokens"

    def __init__(self, processor: InputProcessor) -> None:
        self._processor = processor
        self._decoder = processor.decoder(GeminiCount)

    def prompt(self, body: bytes, info: RequestInfo, found: Any) -> CountedPrompt:
        asked = self._decoder.decode(camel_case(body))
        request = asked.generateContentRequest or GeminiRequest(
            contents=asked.contents or [], systemInstruction=asked.systemInstruction, tools=asked.tools
        )
        self._processor.check_model(model_of(info.path))
        content = self._processor.unsupported_content()
        chat = conversation(request, content)
        tools = [Tool(function=each.function) for each in chat.tools or () if each.function is not None]
        try:
            text = self._processor.render(
                chat.messages, add_generation_prompt=True, continue_final_message=False, tools=tools or None
            )
        except ApiError as error:
            raise renamed(error, _NAMES) from None
        content.note_shown(chat.messages)
        return CountedPrompt(text, add_special_tokens=False, images=content.shown_images)

    def reply(self, count: int) -> bytes:
        return b'{"totalTokens":%d}' % count

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return error_body(error)


class GeminiModels(DescribingRoute):
    """The served models, or one of them."""

    method = "GET"

    def __init__(self, path: str) -> None:
        self.path = path

    def reply(self, asked: AskedModels) -> bytes:
        if self.path == PREFIX.rstrip("/"):
            return encode_json(model_list(asked.cards.values()))
        return encode_json(model_entry(asked.card(asked.path[len(PREFIX) :])))

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return error_body(error)


GEMINI_ROUTES = (PREFIX.rstrip("/"), PREFIX + "{model}")
