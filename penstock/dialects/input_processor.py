"""Request bodies to plans.

Planning is pure: it reads the body, the model's facts and its chat template, and raises ApiError for what
cannot be served. Prompts are tokenized by the caller, in a thread where they are long.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.config.options import ServeConfig
from penstock.dialects import unsupported
from penstock.generation import sampling_params
from penstock.generation.body_decoder import BodyDecoder
from penstock.generation.chat_template import RESERVED, ChatTemplate
from penstock.generation.conversation import conversation
from penstock.generation.model_info import ModelInfo
from penstock.generation.parsers.message import MessageFormat
from penstock.generation.parsers.registry import output_format
from penstock.generation.plan import RequestPlan, TokenizePlan
from penstock.generation.prompts import check_vocabulary, parse_prompts, truncation
from penstock.generation.request_schemas import (
    MAX_REQUEST_ID,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    Message,
    TokenizeRequest,
    Tool,
)
from penstock.generation.stream_interval import IntervalPolicy
from penstock.generation.structured_output import Constraint, parse_constraint
from penstock.generation.tokenizer import Tokenizer
from penstock.generation.tool_choice import ToolChoice, parse_tool_choice
from penstock.http.errors import ApiError, refused, unknown_model

DEFAULT_MAX_TOKENS = 16
"""Of a completion that names none, as in OpenAI's API."""


class InputProcessor:
    """Plans requests for one served model."""

    def __init__(
        self, config: ServeConfig, info: ModelInfo, tokenizer: Tokenizer, template: ChatTemplate | None
    ) -> None:
        """``template`` None: chat requests are refused."""
        strict = config.strict_requests
        self._completions = BodyDecoder(CompletionRequest, strict=strict)
        self._chats = BodyDecoder(ChatCompletionRequest, strict=strict)
        self._tokenizes = BodyDecoder(TokenizeRequest, strict=strict)
        self._detokenizes = BodyDecoder(DetokenizeRequest, strict=strict)
        served = {"kv_transfer_params"} if info.transfers_kv else set()
        self._gate_completion = unsupported.UnsupportedFieldCheck(unsupported.COMPLETION, served)
        self._gate_chat = unsupported.UnsupportedFieldCheck(unsupported.CHAT, served)
        self._gate_tokenize = unsupported.UnsupportedFieldCheck(unsupported.TOKENIZE)
        self._model_info = info
        self._model = info.names[0]
        self._names = frozenset(info.all_names)
        self._adapters = frozenset(adapter.name for adapter in info.adapters)
        self._most_logprobs = config.max_logprobs
        self._force_usage = config.enable_force_include_usage
        self._interval_policy = IntervalPolicy(config)
        self._most_tokens = min(info.max_model_len, info.defaults.max_new_tokens or info.max_model_len)
        self._tokenizer = tokenizer
        self._template = template
        self._format = output_format(
            config.tool_call_parser, config.reasoning_parser, template.source if template else ""
        )
        self._special_markers = tokenizer.has_special(self._format.markers)
        self._draw = random.Random().getrandbits

    def unknown_fields(self) -> dict[str, int]:
        """How often requests had each field that is not known, since the start."""
        counts: dict[str, int] = {}
        for decoder in (self._completions, self._chats, self._tokenizes, self._detokenizes):
            for name, count in decoder.unknown.items():
                counts[name] = counts.get(name, 0) + count
        return counts

    # -- generating

    def completion(self, body: bytes, request_id: str | None = None) -> RequestPlan:
        """Plan of a body of /v1/completions. ``request_id``: of a header. Raises ApiError."""
        request = self._completions.decode(body)
        self._gate_completion.check(request)
        self._check_model(request.model)
        logprobs = -1
        if request.logprobs is not None:
            sampling_params.check_logprobs(logprobs := request.logprobs, self._most_logprobs)
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        if max_tokens or not request.echo:
            sampling_params.check_max_tokens(max_tokens, self._model_info.max_model_len)
        prompts = parse_prompts(request.prompt, self._model_info.vocab_size)
        plan = self._plan(request, request_id, prompts, max_tokens, logprobs)
        plan.echo = bool(request.echo)
        if plan.echo and logprobs > plan.prompt_logprobs:
            plan.prompt_logprobs = logprobs
            plan.base = msgspec.structs.replace(plan.base, prompt_logprobs=logprobs)
        plan.add_special_tokens = request.add_special_tokens is not False
        return plan

    def chat(self, body: bytes, request_id: str | None = None) -> RequestPlan:
        """Plan of a body of /v1/chat/completions. ``request_id``: of a header. Raises ApiError."""
        request = self._chats.decode(body)
        self._gate_chat.check(request)
        choice = parse_tool_choice(request, known_format=self._format.tools is not None)
        self._check_model(request.model)
        logprobs = self._chat_logprobs(request)
        max_tokens, field = request.max_completion_tokens, "max_completion_tokens"
        if max_tokens is None:
            max_tokens, field = request.max_tokens, "max_tokens"
        if max_tokens is not None:
            sampling_params.check_max_tokens(max_tokens, self._model_info.max_model_len, field)
        opens_turn = generation_prompt(request.add_generation_prompt, request.continue_final_message)
        text = self._render(
            request.messages,
            opens_turn,
            bool(request.continue_final_message),
            request.tools,
            request.documents,
            _template_variables(request),
        )
        plan = self._plan(request, request_id, [text], max_tokens, logprobs)
        plan.chat = True
        plan.add_special_tokens = bool(request.add_special_tokens)
        if not opens_turn:
            plan.role = request.messages[-1].role
        if request.echo:
            plan.echo_text = _text_to_echo(request.messages[-1], plan.role)
        if choice.constraint is not None:
            _constrain(plan, choice.constraint)
        plan.format = self._message_format(request, choice, text, constrained=plan.constraint is not None)
        if plan.format is not None and self._special_markers:
            plan.skip_special_tokens = False
        return plan

    def _message_format(
        self, request: ChatCompletionRequest, choice: ToolChoice, prompt: str, *, constrained: bool
    ) -> MessageFormat | None:
        """None where the output is all content. A constraint holds from the first token on: it leaves no room
        for reasoning."""
        tools = self._format.tools if choice.may_call else choice.parser
        reasoning = None if constrained else self._format.reasoning
        if tools is None and reasoning is None:
            return None
        return MessageFormat(
            reasoning=partial(reasoning, prompt) if reasoning else None,
            tools=tools,
            show_reasoning=request.include_reasoning is not False,
            one_call=request.parallel_tool_calls is False,
            named=choice.named,
        )

    def _plan(
        self,
        request: GenerateRequest,
        request_id: str | None,
        prompts: Sequence[str | list[int]],
        max_tokens: int | None,
        logprobs: int,
    ) -> RequestPlan:
        """What both endpoints' plans have in common."""
        most = self._most_tokens if max_tokens is None else min(max_tokens or 1, self._most_tokens)
        base = sampling_params.parse_sampling_params(
            request,
            self._model_info,
            self._tokenizer,
            max_tokens=most,
            seed=self._draw(63),
            logprobs=logprobs,
        )
        plan = RequestPlan(False, self._model, prompts, True, base, self._model_info.max_model_len)
        if request.response_format is not None or request.structured_outputs is not None:
            constraint = parse_constraint(request)
            if constraint is not None:
                _constrain(plan, constraint)
        plan.stream = bool(request.stream)
        plan.max_tokens = max_tokens
        plan.logprobs = logprobs
        plan.request_id = request_id or request.request_id
        if request_id is not None and len(request_id) > MAX_REQUEST_ID:
            raise ApiError(
                400, f"X-Request-Id is longer than {MAX_REQUEST_ID} characters.", param="X-Request-Id"
            )
        if request.n is not None:
            plan.n = request.n
        if request.best_of is not None:
            self._set_best_of(plan, request.best_of)
        sampling_params.check_streams(len(prompts), plan.n)
        self._set_reply(plan, request)
        if request.priority is not None:
            plan.priority = request.priority
        plan.cache_salt = request.cache_salt
        if request.model in self._adapters:
            plan.model = plan.adapter = request.model
        if request.kv_transfer_params:
            plan.kv_transfer_params = msgspec.json.encode(request.kv_transfer_params)
        if request.truncate_prompt_tokens is not None or request.truncation_side is not None:
            plan.truncate_prompt_tokens, plan.truncate_left = truncation(
                request, self._model_info.max_model_len, max_tokens
            )
        return plan

    def _set_reply(self, plan: RequestPlan, request: GenerateRequest) -> None:
        """What is sent, and when; ``plan.stream`` is set."""
        options = request.stream_options
        if options is not None and not plan.stream:
            raise refused("Stream options can only be defined when `stream=True`.", "stream_options")
        if request.prompt_logprobs is not None:
            sampling_params.check_prompt_logprobs(
                request.prompt_logprobs, self._most_logprobs, stream=plan.stream
            )
            plan.prompt_logprobs = request.prompt_logprobs
            plan.base = msgspec.structs.replace(plan.base, prompt_logprobs=request.prompt_logprobs)
        plan.include_usage = plan.stream and self._force_usage
        if options is not None:
            plan.include_usage |= bool(options.include_usage)
            plan.continuous_usage = plan.include_usage and bool(options.continuous_usage_stats)
        if request.stop is not None:
            plan.stop = sampling_params.stop_strings(request.stop)
        if request.include_stop_str_in_output:
            plan.include_stop_str = True
        plan.interval = self._interval_policy.interval(request, streamed=plan.stream or bool(plan.stop))
        if request.skip_special_tokens is False:
            plan.skip_special_tokens = False
        if request.return_token_ids:
            plan.return_token_ids = True

    def _set_best_of(self, plan: RequestPlan, best_of: int) -> None:
        sampling_params.check_best_of(best_of, plan.n, stream=plan.stream)
        if best_of > plan.n and plan.base.temperature > 0:  # greedy choices are all the same
            plan.kept, plan.n = plan.n, best_of
            plan.base = msgspec.structs.replace(plan.base, logprobs=max(0, plan.base.logprobs))

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise unknown_model(name, self._model_info.all_names)

    def _chat_logprobs(self, request: ChatCompletionRequest) -> int:
        alternatives = request.top_logprobs or 0
        if alternatives:
            if not request.logprobs:
                raise refused("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
            sampling_params.check_logprobs(alternatives, self._most_logprobs, "top_logprobs")
        return alternatives if request.logprobs else -1

    def _render(
        self,
        messages: list[Message],
        opens_turn: bool,
        continues: bool,
        tools: list[Tool] | None = None,
        documents: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> str:
        template = self._template
        if template is None:
            raise ApiError(
                400,
                "The model has no chat template: start the server with --chat-template FILE, or use "
                "/v1/completions.",
                param="messages",
            )
        if not messages:
            raise ApiError(
                400, "Cannot apply chat template to an empty conversation. Provide at least one message."
            )
        if variables and not RESERVED.isdisjoint(variables):
            name = next(name for name in variables if name in RESERVED)
            raise ApiError(
                400,
                f"chat_template_kwargs cannot set {name!r}, which is a field of requests.",
                param="chat_template_kwargs",
            )
        return template.render(
            conversation(messages, parts=template.wants_parts(tools=bool(tools))),
            add_generation_prompt=opens_turn,
            continue_final_message=continues,
            tools=msgspec.to_builtins(tools) if tools else None,
            documents=documents,
            variables=variables,
        )

    # -- tokens

    def tokenize(self, body: bytes) -> TokenizePlan:
        """Plan of a body of /tokenize. Raises ApiError."""
        request = self._tokenizes.decode(body)
        self._gate_tokenize.check(request)
        self._check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "Exactly one of prompt and messages is needed.", param="prompt")
        special = request.add_special_tokens
        if request.messages is None:
            text = request.prompt or ""
            return TokenizePlan(text, special is not False, bool(request.return_token_strs))
        text = self._render(
            request.messages,
            generation_prompt(request.add_generation_prompt, request.continue_final_message),
            bool(request.continue_final_message),
            request.tools,
            variables=request.chat_template_kwargs,
        )
        return TokenizePlan(text, bool(special), bool(request.return_token_strs))

    def detokenize(self, body: bytes) -> list[int]:
        """Token ids of a body of /detokenize. Raises ApiError."""
        request = self._detokenizes.decode(body)
        self._check_model(request.model)
        if request.tokens:
            check_vocabulary(max(request.tokens), self._model_info.vocab_size)
        return request.tokens


def _constrain(plan: RequestPlan, constraint: Constraint) -> None:
    plan.constraint = constraint
    plan.base = msgspec.structs.replace(plan.base, grammar=constraint.grammar)


# -- conversations


def generation_prompt(wanted: bool | None, continues: bool | None) -> bool:
    """Whether the prompt opens the assistant's turn. Raises ApiError when it would end one as well."""
    if wanted and continues:
        raise refused(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            "continue_final_message",
        )
    return not continues if wanted is None else wanted


def _template_variables(request: ChatCompletionRequest) -> dict[str, Any] | None:
    variables = request.chat_template_kwargs
    if request.reasoning_effort is not None:
        return {"reasoning_effort": request.reasoning_effort, **(variables or {})}
    return variables


def _text_to_echo(message: Message, role: str) -> str:
    """A reply of ``role`` goes on with ``message`` only where that has the same role."""
    if message.role != role or message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part if isinstance(part, str) else part.text or "" for part in message.content)
