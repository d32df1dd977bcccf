"""Checks the fields that all dialects share and turns a decoded request into a plan.

Planning is pure: it reads the request, the model's properties and its chat template, and raises ApiError for
values that cannot be served. The caller tokenizes prompts, long ones in a thread.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from penstock.config.serve import ServeConfig
from penstock.dispatch.adapter_registry import AdapterRegistry
from penstock.generation.grammars.call_grammar import TokenIds, channel_grammar, reasoning_grammar
from penstock.generation.media.placeholders import Respell, count_pictures, with_pictures
from penstock.generation.model_aliases import ModelAliases
from penstock.generation.model_info import ModelInfo
from penstock.generation.parsers.registry import OutputFormat, output_format
from penstock.generation.plan import RequestPlan, constrain
from penstock.generation.prompt.chat_template import RESERVED, ChatTemplate, parse_variables
from penstock.generation.prompt.conversation import message_text, reasoning_of
from penstock.generation.prompt.prompts import truncation
from penstock.generation.prompt.renderer import ConversationRenderer
from penstock.generation.prompt.sampled_turns import SampledPrompt, SampledTurns, latest_sampled
from penstock.generation.prompt.template_rules import TemplateRules
from penstock.generation.prompt.tokenizer import ESTIMATED_ABOVE, Tokenizer
from penstock.generation.prompt.turn_memory import NextTurn
from penstock.generation.replies.stream_interval import EVERY_TOKEN, IntervalPolicy
from penstock.generation.request import validation
from penstock.generation.request.body_decoder import MAX_COMMAS, BodyDecoder
from penstock.generation.request.cache_hints import hints_of
from penstock.generation.request.schemas import GenerateRequest, Message, Tool
from penstock.generation.request.structured_output import parse_constraint
from penstock.generation.request.thinking_budget import ThinkingPolicy
from penstock.generation.request.tool_choice import CallSyntax, ToolChoice, message_format
from penstock.generation.request.unsupported import UnsupportedField, UnsupportedFieldCheck
from penstock.generation.request.unsupported_content import UnsupportedContent
from penstock.http.errors import ApiError, refused, unknown_model
from penstock.http.request import MAX_REQUEST_ID
from penstock.wire.messages import Adapter

Request = TypeVar("Request", bound=msgspec.Struct)


class InputProcessor:
    """Plans requests for one served model."""

    def __init__(
        self,
        config: ServeConfig,
        info: ModelInfo,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        adapters: AdapterRegistry,
    ) -> None:
        """``template``: None refuses conversations. ``adapters`` changes while the server runs."""
        self.model_info = info
        self.output_format = output_format(
            config.tool_call_parser,
            config.reasoning_parser,
            template.source if template else "",
            info.model_type,
        )
        """How the model writes tool calls and reasoning."""
        self.has_special_markers = tokenizer.has_special(self.output_format.markers)
        """Whether a marker that parsers search for is a special token, which outputs must then keep."""
        self._token_ids = _token_ids(self.output_format, tokenizer, info)
        self.thinking = ThinkingPolicy(config, self.output_format, tokenizer)
        tools = self.output_format.tools
        self.call_syntax = None if tools is None else CallSyntax(tools, self._token_ids)
        """How grammars spell the model's calls; None: the format is unknown, or has no grammar."""
        self.json_whitespace = config.json_whitespace
        self._config = config
        self._decoders: list[BodyDecoder[Any]] = []
        self.aliases = ModelAliases(config.model_alias or ())
        self.adapters = adapters
        self.max_logprobs = validation.logprobs_limit(config.max_logprobs, info.vocab_size)
        """Maximum alternatives per token that requests may ask for."""
        self._interval_policy = IntervalPolicy(config)
        self.max_total = info.max_model_len
        """Most tokens of prompt and output together that context and KV caches hold."""
        self._max_tokens = min(info.max_model_len, info.defaults.max_new_tokens or info.max_model_len)
        self.tokenizer = tokenizer
        image_text = "" if info.media is None else info.media.placeholder
        self._renderer = None if template is None else ConversationRenderer(template, tools, image_text)
        self._sampled_turns = (
            None
            if self._renderer is None
            else SampledTurns(self._renderer, tokenizer, info.eos_token_ids, info.vocab_size)
        )
        self._variables = parse_variables(config.default_chat_template_kwargs or "{}")
        self._draw = random.Random().getrandbits

    def limit_total(self, kv_cache_tokens: int) -> None:
        """An engine's KV cache holds only this many tokens; 0: it has none. Requests without max_tokens end
        where they do not fit any engine's."""
        if kv_cache_tokens:  # the last token of an output is not in the cache
            self.max_total = min(self.max_total, kv_cache_tokens + 1)

    # -- parts of a dialect

    def decoder(
        self,
        type: type[Request],
        *,
        id_field: str | None = None,
        flat_ids: bool = False,
        messages: str | None = None,
    ) -> BodyDecoder[Request]:
        """A decoder for bodies of one type; its unknown fields are counted by :meth:`unknown_fields`.
        The others: see :class:`BodyDecoder`."""
        most = max(MAX_COMMAS, 2 * self.model_info.max_model_len)
        decoder = BodyDecoder(
            type,
            strict=self._config.strict_requests,
            max_commas=most,
            id_field=id_field,
            flat_ids=flat_ids,
            messages=messages,
        )
        self._decoders.append(decoder)
        return decoder

    def unsupported(self, fields: tuple[UnsupportedField, ...]) -> UnsupportedFieldCheck:
        """The check for known fields that this server does not support."""
        served = {"kv_transfer_params"} if self.model_info.transfers_kv else set()
        return UnsupportedFieldCheck(fields, served)

    def unsupported_content(self) -> UnsupportedContent:
        """What a conversation has that the model cannot see: a strict server refuses it."""
        config, sees = self._config, self.model_info.media is not None
        most = config.max_images if sees else 0
        return UnsupportedContent(refused=config.strict_requests, sees_images=sees, most=most)

    def unknown_fields(self) -> dict[str, int]:
        """Number of requests by unknown field, since the start."""
        counts: dict[str, int] = {}
        for decoder in self._decoders:
            for name, count in decoder.unknown.items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special ones included."""
        return self.tokenizer.decode(ids)

    def count_tokens(self, prompt: str, *, most: int) -> int:
        """Number of tokens of a prompt whose pictures are not prepared yet, or a greater one than ``most`` if
        it has more; one up to ``most`` may be too high."""
        media, more = self.model_info.media, 0
        if media is not None:
            more = prompt.count(media.placeholder) * self.model_info.picture_tokens()
        bytes = len(prompt.encode())
        if bytes + more <= most:  # no token is shorter than a byte
            return bytes + more
        return more + self._count_text(prompt, most - more)

    def _count_text(self, prompt: str, most: int) -> int:
        if self.tokenizer.is_longer(prompt, most):
            return max(most + 1, len(prompt) // ESTIMATED_ABOVE)
        return self.tokenizer.encode_bytes(prompt, False)[1]

    # -- a request

    def require_model(self, name: str | None) -> None:
        """Of an API whose schema requires the name: raises ApiError also for none, on a strict server."""
        if name is None and self._config.strict_schema:
            raise ApiError(
                400,
                f"model is missing (--strict-schema). The server has {', '.join(self.model_info.names)}.",
                param="model",
            )
        self.check_model(name)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served; None is the first one."""
        if name is not None and name not in self.model_info.names:
            self._adapter_of(name)

    def served_name(self, name: str) -> str:
        """The served name that ``name`` is, or that it is an alias of. Raises ApiError."""
        adapter = self._adapter_of(name)
        if adapter is not None:
            return adapter.name
        return self.aliases.model_of(name) or name

    def _adapter_of(self, name: str) -> Adapter | None:
        """The adapter that ``name`` stands for; None: it is the model itself. Raises ApiError."""
        if name in self.model_info.names:
            return None
        adapter = self.adapters.get(name)
        if adapter is not None:
            return adapter
        served = self.aliases.model_of(name)
        if served in self.model_info.names:
            return None
        adapter = None if served is None else self.adapters.get(served)
        if adapter is None:
            raise self.unknown_model(name)
        return adapter

    def unknown_model(self, name: str) -> ApiError:
        """The error for a model that is not served."""
        adapters = [adapter.name for adapter in self.adapters.served()]
        served = [*self.model_info.names, *adapters]
        aliases = [alias for alias, model in self.aliases.exact.items() if model in served]
        return unknown_model(name, [*served, *aliases])

    def plan(
        self,
        request: GenerateRequest,
        request_id: str | None,
        prompts: Sequence[str | bytes],
        max_tokens: int | None,
        logprobs: int,
    ) -> RequestPlan:
        """A plan from the fields that dialects share. ``max_tokens``: None for what context and KV cache
        allow; ``logprobs``: alternatives per token, -1 for none, unless the request lists them. Raises
        ApiError."""
        most = self._max_tokens if max_tokens is None else min(max_tokens or 1, self._max_tokens)
        base = validation.parse_sampling_params(
            request,
            self.model_info,
            self.tokenizer,
            max_tokens=most,
            seed=self._draw(63),
            logprobs=logprobs,
        )
        plan = RequestPlan(
            model=self.model_info.names[0],
            prompts=prompts,
            add_special_tokens=True,
            base=base,
            max_model_len=self.max_total if max_tokens is None else self.model_info.max_model_len,
        )
        self._limit_output(plan, request)
        plan.stream = bool(request.stream)
        plan.max_tokens = max_tokens
        plan.logprobs = base.logprobs
        plan.request_id = request_id or request.request_id
        if request_id is not None and len(request_id) > MAX_REQUEST_ID:
            raise ApiError(
                400, f"X-Request-Id is longer than {MAX_REQUEST_ID} characters.", param="X-Request-Id"
            )
        if request.n is not None:
            plan.n = request.n
        if request.best_of is not None:
            self._set_best_of(plan, request.best_of)
        if len(prompts) > 1 or plan.n > 1:
            validation.check_streams(len(prompts), plan.n)
        self._set_reply(plan, request)
        if request.priority is not None:
            plan.priority = request.priority
        plan.cache_salt = request.cache_salt
        plan.session = request.session_id or request.prompt_cache_key
        plan.keep_s, plan.kv_hints = hints_of(request)
        adapter = None if request.model is None else self._adapter_of(request.model)
        if adapter is not None:
            plan.model, plan.adapter = adapter.name, adapter.key
        if request.kv_transfer_params:
            plan.kv_transfer_params = msgspec.json.encode(request.kv_transfer_params)
        if request.truncate_prompt_tokens is not None or request.truncation_side is not None:
            plan.truncate_prompt_tokens, plan.truncate_left = truncation(
                request, self.model_info.max_model_len, max_tokens, self.max_total
            )
        return plan

    def _limit_output(self, plan: RequestPlan, request: GenerateRequest) -> None:
        """Set the limit of reasoning, and the constraint."""
        if request.thinking_token_budget is not None:
            thinking = self.thinking.limit(request.thinking_token_budget)
            plan.base = msgspec.structs.replace(plan.base, thinking=thinking)
        if request.response_format is not None or request.structured_outputs is not None:
            constraint = parse_constraint(request, self.json_whitespace)
            if constraint is not None:
                constrain(plan, constraint)

    def _set_reply(self, plan: RequestPlan, request: GenerateRequest) -> None:
        """Set what is sent and when. ``plan.stream`` must be set."""
        options = request.stream_options
        if options is not None and not plan.stream:
            raise refused("Stream options can only be defined when `stream=True`.", "stream_options")
        if request.prompt_logprobs is not None:
            plan.prompt_logprobs = validation.resolve_prompt_logprobs(
                request.prompt_logprobs, self.max_logprobs, self.model_info.vocab_size, stream=plan.stream
            )
            plan.base = msgspec.structs.replace(plan.base, prompt_logprobs=plan.prompt_logprobs)
        if self._config.enable_force_include_usage:
            plan.include_usage = plan.continuous_usage = plan.stream
        elif options is not None:
            plan.include_usage = bool(options.include_usage)
            plan.continuous_usage = plan.include_usage and bool(options.continuous_usage_stats)
        if request.stop is not None:
            plan.stop = validation.stop_strings(request.stop)
        if request.include_stop_str_in_output:
            plan.include_stop_str = True
        plan.interval = self._interval_policy.interval(request, streamed=plan.stream or bool(plan.stop))
        if plan.logprobs >= 0:
            plan.logprob_bytes = validation.wide_logprob_bytes(
                plan.logprobs, plan.base.max_tokens, len(plan.prompts) * plan.n, stream=plan.stream
            )
            if plan.logprob_bytes:
                plan.interval = EVERY_TOKEN  # so that engines hold none back
        if request.skip_special_tokens is False:
            plan.skip_special_tokens = False
        if request.return_token_ids:
            plan.return_token_ids = True
        if request.return_weight_versions:
            plan.return_weight_versions = True
        if request.return_routed_experts:
            validation.check_routed_experts(stream=plan.stream, stop=plan.stop)
            plan.base = msgspec.structs.replace(plan.base, routed_experts=True)
        if request.return_tokens_as_token_ids:
            plan.tokens_as_ids = True

    def _set_best_of(self, plan: RequestPlan, best_of: int) -> None:
        validation.check_best_of(best_of, plan.n, stream=plan.stream)
        if best_of > plan.n and plan.base.temperature > 0:  # greedy choices are equal
            plan.kept, plan.n = plan.n, best_of
            plan.base = msgspec.structs.replace(plan.base, logprobs=max(0, plan.base.logprobs))

    def set_output_format(
        self,
        plan: RequestPlan,
        choice: ToolChoice,
        prompt: str,
        *,
        continued: Message | None = None,
        show_reasoning: bool = True,
        one_call: bool = False,
    ) -> None:
        """Set the parsers of a conversation's outputs, and add tool choice and reasoning to the plan's
        constraint. ``prompt``: the text before the output; ``continued``: the message that it ends with, if
        the output continues that. The others: see MessageFormat."""
        if continued is not None:
            text, thought = message_text(continued), reasoning_of(continued) or ""
            prompt = self.output_format.before_continued(prompt, text, thought)
        if plan.base.thinking is not None:
            thinking = self.thinking.after(plan.base.thinking, prompt, calls=choice.may_call)
            plan.base = msgspec.structs.replace(plan.base, thinking=thinking)
        self.constrain_after_reasoning(plan, choice, prompt)
        plan.format = message_format(
            choice,
            self.output_format,
            prompt,
            show_reasoning=show_reasoning,
            one_call=one_call,
        )
        if plan.format is not None and self.has_special_markers:
            plan.skip_special_tokens = False

    def constrain_after_reasoning(self, plan: RequestPlan, choice: ToolChoice, prompt: str) -> None:
        """Add tool choice to the plan's constraint, and the reasoning that may precede. ``prompt``: the text
        before the output, or its end."""
        constraint = plan.constraint
        calls = choice.may_call and constraint is None  # the grammar leaves other text free
        if choice.constraint is not None and (calls or not choice.may_call):
            constraint = choice.constraint
        forced = constraint is not None and not calls
        if constraint is not None:
            reasoning = self.output_format.reasoning
            if forced and self.output_format.harmony:
                of_calls = choice.constraint is constraint
                thought = channel_grammar(prompt, self._token_ids, calls=of_calls)
                constraint = constraint._replace(reasoning=thought)
            elif forced and reasoning is not None:
                thought = reasoning_grammar(reasoning, prompt, self._token_ids)
                constraint = constraint._replace(reasoning=thought)
            constrain(plan, constraint)

    def continue_sampled(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[Tool] | None = None,
        documents: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        turn: NextTurn | None = None,
    ) -> SampledPrompt:
        """The prompt of a conversation: of one that has an answer with token ids, these and what follows.
        Raises ApiError. The arguments: see :meth:`render`."""
        at = latest_sampled(messages)
        pictures = self.model_info.media is not None and count_pictures(messages) > 0
        if at is None or pictures or self._sampled_turns is None:
            text = self.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                variables=variables,
                turn=turn,
            )
            return SampledPrompt(b"", text)
        field = f"messages[{at}].token_ids"
        if continue_final_message:
            message = f"{field} cannot be sent with continue_final_message: use /inference/v1/generate."
            raise ApiError(400, message, param=field)
        variables = self._template_variables(variables)
        return self._sampled_turns.prompt(
            messages,
            at,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            variables=variables,
        )

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[Tool] | None = None,
        documents: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        stable: bool = False,
        turn: NextTurn | None = None,
    ) -> str:
        """The prompt of a conversation. ``stable``: system text may not change what precedes it, so that the
        prompt's beginning is the same from turn to turn. ``turn``: see :meth:`ConversationRenderer.render`.
        Raises ApiError."""
        renderer = self._renderer
        if renderer is None:
            raise ApiError(
                400,
                "The model has no chat template: start the server with --chat-template FILE, or use "
                "/v1/completions.",
                param="messages",
            )
        if not messages:
            raise ApiError(
                400,
                "Cannot apply chat template to an empty conversation. Provide at least one message.",
                param="messages",
            )
        variables = self._template_variables(variables)
        if continue_final_message:
            messages = [*messages[:-1], self._continued(messages[-1], renderer.rules(tools=bool(tools)))]
        fixed = partial(
            renderer.render,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            stable=stable,
        )
        text = fixed(messages, tools=tools, documents=documents, turn=turn)
        media = self.model_info.media
        if media is None:
            return text

        def render(respell: Respell) -> str:
            return fixed(
                respell(messages, list[Message]),
                tools=respell(tools, list[Tool] | None),
                documents=respell(documents, list[dict[str, Any]] | None),
            )

        return with_pictures(text, messages, media.placeholder, render)

    def _template_variables(self, given: dict[str, Any] | None) -> dict[str, Any] | None:
        """The request's variables, and the server's that it does not set. Raises ApiError."""
        if not given:
            return self._variables
        _check_variables(given)
        return self._variables | given if self._variables else given

    def _continued(self, message: Message, rules: TemplateRules) -> Message:
        """The message with its reasoning as text, where the template does not show reasoning. Raises
        ApiError."""
        if message.tool_calls:
            raise ApiError(
                400,
                "continue_final_message: the final message has tool_calls, after which nothing can follow.",
                param="continue_final_message",
            )
        format, thought = self.output_format.reasoning, reasoning_of(message)
        if format is None or not thought or rules.shows_reasoning or message_text(message):
            return message
        return msgspec.structs.replace(message, content=f"{format.opens[0]}\n{thought}")


def _token_ids(format: OutputFormat, tokenizer: Tokenizer, info: ModelInfo) -> TokenIds:
    added = tokenizer.raw.get_added_tokens_decoder()
    known = {token.content: id for id, token in added.items()}
    markers = {text: known[text] for text in format.markers if text in known}
    special = tuple(sorted(added.keys() - set(info.eos_token_ids)))
    return TokenIds(markers, special, info.eos_token_ids)


def _check_variables(variables: dict[str, Any]) -> None:
    if not RESERVED.isdisjoint(variables):
        name = next(name for name in variables if name in RESERVED)
        raise ApiError(
            400,
            f"chat_template_kwargs cannot set {name!r}, which is a field of requests.",
            param="chat_template_kwargs",
        )


def opens_turn(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Whether the prompt ends with the start of the assistant's turn. Raises ApiError if the request asks
    to continue the last message too."""
    if add_generation_prompt and continue_final_message:
        raise refused(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            "continue_final_message",
        )
    return not continue_final_message if add_generation_prompt is None else add_generation_prompt
