"""``/v1/completions``: checks a request body and makes its plan and reply format."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.config.serve import ServeConfig
from penstock.dialects.completions.reply import CompletionReply
from penstock.dialects.completions.request_schema import UNSUPPORTED, CompletionRequest
from penstock.generation.dialect import NO_INFO, Dialect, RequestInfo
from penstock.generation.input_processor import InputProcessor
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.prompts import parse_prompts
from penstock.generation.request import validation

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""


class Completions(Dialect):
    """OpenAI's completions."""

    path = "/v1/completions"
    columns = True

    def __init__(self, config: ServeConfig, processor: InputProcessor) -> None:
        self._processor = processor
        self._strict = config.strict_schema
        self._decoder = processor.decoder(CompletionRequest, id_field="prompt")
        self._unsupported = processor.unsupported(UNSUPPORTED)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        request = self.decode(body)
        self._processor.require_model(request.model)
        return self.plan_request(request, info)

    def decode(self, body: bytes) -> CompletionRequest:
        """The request in a body. Raises ApiError."""
        return self._decoder.decode(body)

    def plan_request(self, request: CompletionRequest, info: RequestInfo = NO_INFO) -> RequestPlan:
        """Check a request and make its plan. Raises ApiError."""
        processor = self._processor
        self._unsupported.check_fields(request)
        processor.check_model(request.model)
        logprobs = -1
        if request.logprobs is not None:
            logprobs = validation.resolve_logprobs(
                request.logprobs, processor.max_logprobs, processor.model_info.vocab_size
            )
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        model_info = processor.model_info
        if max_tokens or not request.echo:
            validation.check_max_tokens(max_tokens, model_info.max_model_len)
        prompts = parse_prompts(request.prompt, model_info.vocab_size)
        plan = processor.plan(request, info.request_id, prompts, max_tokens=max_tokens, logprobs=logprobs)
        plan.dialect_fields = request.service_tier
        plan.echo = bool(request.echo)
        echoed = 0 if request.logprob_token_ids else logprobs  # lists are for the output alone
        if plan.echo and echoed > plan.prompt_logprobs:
            plan.prompt_logprobs = validation.resolve_prompt_logprobs(
                echoed, processor.max_logprobs, model_info.vocab_size, stream=False
            )
            plan.base = msgspec.structs.replace(plan.base, prompt_logprobs=echoed)
        plan.add_special_tokens = request.add_special_tokens is not False
        return plan

    def reply_format(self, plan: RequestPlan, request_id: str) -> CompletionReply:
        id = f"cmpl-{plan.request_id or request_id}"
        tier = plan.dialect_fields is not None
        return CompletionReply(id, plan.model, plan.role, show_tier=tier, strict=self._strict)
