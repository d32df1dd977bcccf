"""``/api/chat`` and ``/api/generate``: Ollama's API. Requests become chat completions, whose rules hold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from penstock.config.serve import ServeConfig
from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.chat.request_schema import ChatCompletionRequest
from penstock.dialects.ollama.models import untagged
from penstock.dialects.ollama.reply import OllamaFields, OllamaReply, loaded
from penstock.dialects.ollama.request_schema import (
    UNSUPPORTED,
    UNSUPPORTED_OPTIONS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from penstock.dialects.renamed_fields import renamed
from penstock.dialects.whole_calls import MissingCallIds
from penstock.generation.dialect import NO_INFO, Dialect, RequestInfo
from penstock.generation.input_processor import InputProcessor
from penstock.generation.media.source import image_of
from penstock.generation.plan import ASSISTANT, RequestPlan, answer_at_once
from penstock.generation.request import validation
from penstock.generation.request.schemas import (
    FunctionCall,
    JsonSchemaFormat,
    Message,
    Part,
    ResponseFormat,
    ToolCall,
)
from penstock.generation.request.unsupported_content import UnsupportedContent, joined
from penstock.http.errors import ApiError, encode_json, refused

_ROLES = ("system", "user", ASSISTANT, "tool")
_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "reasoning_effort": "think",
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    **{name: f"options.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: f"options.{name}" for name in ("presence_penalty", "frequency_penalty")},
}
"""The fields of a chat completion by their names here."""


class OllamaDialect(Dialect):
    """What both routes have in common."""

    generate: ClassVar[bool] = False
    """Whether requests have a prompt instead of messages."""

    def __init__(self, config: ServeConfig, processor: InputProcessor) -> None:
        self._chat = ChatCompletions(config, processor)
        self._processor = processor
        self._unsupported_options = processor.unsupported(UNSUPPORTED_OPTIONS)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        try:
            plan = self._planned(body, info)
        except ApiError as error:
            names = _NAMES | {"messages": "prompt"} if self.generate else _NAMES
            raise renamed(error, names) from None
        plan.include_usage, plan.continuous_usage = True, False
        return plan

    @abstractmethod
    def _planned(self, body: bytes, info: RequestInfo) -> RequestPlan:
        """Errors have the names that fields have in chat completions."""

    def _plan_messages(
        self,
        request: OllamaRequest,
        chat: ChatCompletionRequest,
        info: RequestInfo,
        content: UnsupportedContent,
    ) -> RequestPlan:
        if not chat.messages:
            self._processor.check_model(chat.model)
            return answer_at_once(loaded(self._reply_fields(request), unload=request.keep_alive == 0))
        last = chat.messages[-1]
        chat.continue_final_message = last.role == ASSISTANT and not last.tool_calls
        plan = self._chat.plan_request(chat, info, content)
        plan.dialect_fields = self._reply_fields(request)
        return plan

    def _reply_fields(self, request: OllamaRequest) -> OllamaFields:
        return OllamaFields(request.model or self._processor.model_info.names[0], self.generate)

    def _fields(self, request: OllamaRequest) -> ChatCompletionRequest:
        """A chat completion without its messages. Raises ApiError."""
        options = request.options or OllamaOptions()
        try:
            self._unsupported_options.check_fields(options)
        except ApiError as error:
            raise ApiError(400, f"options.{error.message}", param=f"options.{error.param}") from None
        limit, think = options.num_predict or 0, request.think
        switch = None if think is None else bool(think)  # templates differ in its name
        return ChatCompletionRequest(
            messages=[],
            model=untagged(request.model, self._processor),
            stream=request.stream is not False,
            max_tokens=min(limit, self._processor.model_info.max_model_len) if limit > 0 else None,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
            stop=options.stop,
            repetition_penalty=options.repeat_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            response_format=_format(request.format),
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            reasoning_effort=think if isinstance(think, str) else None,
            include_reasoning=think is not False,
            chat_template_kwargs=None if think is None else {"enable_thinking": switch, "thinking": switch},
        )

    def recognizes(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        return path.startswith("/api/")

    def reply_format(self, plan: RequestPlan, request_id: str) -> OllamaReply:
        return OllamaReply(plan.request_id or request_id, plan.dialect_fields)

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return encode_json({"error": error.message})


class OllamaChat(OllamaDialect):
    """Conversations."""

    path = "/api/chat"

    def __init__(self, config: ServeConfig, processor: InputProcessor) -> None:
        super().__init__(config, processor)
        self._decoder = processor.decoder(OllamaChatRequest)

    def _planned(self, body: bytes, info: RequestInfo) -> RequestPlan:
        request = self._decoder.decode(body)
        chat = self._fields(request)
        content = self._processor.unsupported_content()
        chat.messages, chat.tools = _conversation(request.messages or [], content), request.tools
        return self._plan_messages(request, chat, info, content)


class OllamaGenerate(OllamaDialect):
    """Prompts."""

    path = "/api/generate"
    generate = True

    def __init__(self, config: ServeConfig, processor: InputProcessor) -> None:
        super().__init__(config, processor)
        self._decoder = processor.decoder(OllamaGenerateRequest)
        self._unsupported = processor.unsupported(UNSUPPORTED)

    def _planned(self, body: bytes, info: RequestInfo) -> RequestPlan:
        request = self._decoder.decode(body)
        self._unsupported.check_fields(request)
        chat = self._fields(request)
        if request.prompt and request.raw:
            if request.system:
                raise ApiError(400, "system has no effect on a raw prompt: send one of them.", param="system")
            return self._plan_raw(request, chat, info)
        content = self._processor.unsupported_content()
        if request.prompt:
            system = [Message("system", request.system)] if request.system else []
            images = _images(request.images, "images", content)
            chat.messages = [*system, _message(request.prompt, images)]
        return self._plan_messages(request, chat, info, content)

    def _plan_raw(
        self, request: OllamaGenerateRequest, chat: ChatCompletionRequest, info: RequestInfo
    ) -> RequestPlan:
        """The plan of a prompt that no template is applied to."""
        processor, alternatives = self._processor, -1
        processor.check_model(chat.model)
        if request.logprobs:
            size = processor.model_info.vocab_size
            wanted = request.top_logprobs or 0
            alternatives = validation.resolve_logprobs(wanted, processor.max_logprobs, size, "top_logprobs")
        prompts = [request.prompt or ""]
        plan = processor.plan(
            chat, info.request_id, prompts, max_tokens=chat.max_tokens, logprobs=alternatives
        )
        plan.dialect_fields = self._reply_fields(request)
        return plan


def _format(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    """Keywords of the schema that cannot be enforced are dropped, as Ollama does. Raises ApiError."""
    if given in ("json", "", None):
        return ResponseFormat(type="json_object") if given else None
    if isinstance(given, str):
        raise refused("format must be json or a JSON schema.", "format", given)
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=given, strict=False))


def _conversation(given: list[OllamaMessage], content: UnsupportedContent) -> list[Message]:
    """Raises ApiError."""
    ids, messages = MissingCallIds(), list[Message]()
    for number, each in enumerate(given):
        if each.role not in _ROLES:
            field = f"messages[{number}].role"
            raise refused(f"{field} must be {', '.join(_ROLES)}.", field, each.role)
        images = _images(each.images, f"messages[{number}].images", content)
        message = _message(each.content, images, each.role)
        message.thinking = each.thinking
        if each.tool_calls:
            message.tool_calls = [
                ToolCall(
                    FunctionCall(call.function.name, call.function.arguments),
                    ids.of_call(call.id, call.function.name),
                )
                for call in each.tool_calls
            ]
        if each.role == "tool":
            message.name = each.tool_name
            message.tool_call_id = ids.of_result(each.tool_call_id, each.tool_name)
        messages.append(message)
    return messages


def _images(given: list[str] | None, field: str, content: UnsupportedContent) -> list[str | Part]:
    """Raises ApiError."""
    places = [(data, f"{field}[{number}]") for number, data in enumerate(given or ())]
    if content.sees_images:
        return [content.see(image_of(data, place)) for data, place in places]
    return [content.add("image", place) for _, place in places]


def _message(text: str | None, images: list[str | Part], role: str = "user") -> Message:
    """Images come before the text, as Ollama puts them."""
    return Message(role, joined([*images, text] if text else images))
