"""``/v1/chat/completions``: checks a request body and makes its plan and reply format."""

from __future__ import annotations

from typing import Any

from penstock.config.serve import ServeConfig
from penstock.dialects.chat.reply import ChatReply
from penstock.dialects.chat.request_schema import UNSUPPORTED, ChatCompletionRequest
from penstock.dialects.chat.tools import parse_tools
from penstock.generation.dialect import NO_INFO, Dialect, RequestInfo
from penstock.generation.input_processor import InputProcessor, opens_turn
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.conversation import message_text
from penstock.generation.request import validation
from penstock.generation.request.schemas import Message
from penstock.generation.request.tool_choice import parse_tool_choice
from penstock.generation.request.unsupported_content import UnsupportedContent
from penstock.http.errors import refused


class ChatCompletions(Dialect):
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"
    columns = True
    lifts_images = True

    def __init__(self, config: ServeConfig, processor: InputProcessor) -> None:
        self._processor = processor
        self._strict = config.strict_schema
        self._decoder = processor.decoder(ChatCompletionRequest, messages="messages")
        self._unsupported = processor.unsupported(UNSUPPORTED)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        request = self._decoder.decode(body, info.turn)
        self._processor.require_model(request.model)
        return self.plan_request(request, info)

    def decode(self, body: bytes) -> ChatCompletionRequest:
        """The request in a body. Raises ApiError."""
        return self._decoder.decode(body)

    def plan_request(
        self,
        request: ChatCompletionRequest,
        info: RequestInfo = NO_INFO,
        content: UnsupportedContent | None = None,
    ) -> RequestPlan:
        """Check a request and make its plan. ``content``: has the pictures of an API that has made the
        messages from its own. Raises ApiError."""
        processor = self._processor
        self._unsupported.check_fields(request)
        tools, inputs = parse_tools(request.tools)
        choice = parse_tool_choice(
            tools,
            request.tool_choice,
            one_call=request.parallel_tool_calls is False,
            constrained=request.structured_outputs is not None,
            known_format=processor.output_format.calls_tools,
            whitespace=processor.json_whitespace,
            syntax=processor.call_syntax,
            inputs=inputs,
        )
        processor.check_model(request.model)
        logprobs = self._logprobs(request)
        max_tokens, field = request.max_completion_tokens, "max_completion_tokens"
        if max_tokens is None:
            max_tokens, field = request.max_tokens, "max_tokens"
        if max_tokens is not None:
            validation.check_max_tokens(max_tokens, processor.model_info.max_model_len, field)
        opening = opens_turn(request.add_generation_prompt, request.continue_final_message)
        unsupported = content or processor.unsupported_content()
        unsupported.replace_parts(request.messages)
        prefix, text = processor.continue_sampled(
            request.messages,
            add_generation_prompt=opening,
            continue_final_message=bool(request.continue_final_message),
            tools=choice.tools,
            documents=request.documents,
            variables=self._template_variables(request),
            turn=info.turn,
        )
        plan = processor.plan(request, info.request_id, [text], max_tokens=max_tokens, logprobs=logprobs)
        plan.dialect_fields = request.service_tier
        warnings = (choice.warning, unsupported.warning("messages"))
        plan.warning = "; ".join(filter(None, warnings)) or None
        if unsupported.images:
            unsupported.note_shown(request.messages)
            plan.images = unsupported.shown_images
        plan.prefix = prefix
        plan.add_special_tokens = bool(request.add_special_tokens) and not prefix
        if not opening:
            plan.role = request.messages[-1].role
        if request.echo:
            plan.echo_text = _text_to_echo(request.messages[-1], plan.role)
        processor.set_output_format(
            plan,
            choice,
            text,
            continued=request.messages[-1] if request.continue_final_message else None,
            show_reasoning=request.include_reasoning is not False,
            one_call=request.parallel_tool_calls is False,
        )
        return plan

    def reply_format(self, plan: RequestPlan, request_id: str) -> ChatReply:
        id = f"chatcmpl-{plan.request_id or request_id}"
        tier = plan.dialect_fields is not None
        return ChatReply(id, plan.model, plan.role, show_tier=tier, strict=self._strict)

    def _template_variables(self, request: ChatCompletionRequest) -> dict[str, Any] | None:
        """Sets the budget of its effort, if it has none. Raises ApiError."""
        variables, budget = self._processor.thinking.effort(
            request.reasoning_effort, "reasoning_effort", request.chat_template_kwargs
        )
        if request.thinking_token_budget is None:
            request.thinking_token_budget = budget
        return variables

    def _logprobs(self, request: ChatCompletionRequest) -> int:
        alternatives = request.top_logprobs or 0
        if alternatives:
            if not request.logprobs:
                raise refused("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
            processor = self._processor
            alternatives = validation.resolve_logprobs(
                alternatives, processor.max_logprobs, processor.model_info.vocab_size, "top_logprobs"
            )
        elif request.logprob_token_ids and not request.logprobs:
            raise refused(
                "when using `logprob_token_ids`, `logprobs` must be set to true.", "logprob_token_ids"
            )
        return alternatives if request.logprobs else -1


def _text_to_echo(message: Message, role: str) -> str:
    """The text of ``message`` if a reply of the same ``role`` continues it."""
    return message_text(message) if message.role == role and message.content is not None else ""
