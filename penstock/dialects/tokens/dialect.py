"""``/inference/v1/generate``: vLLM's route for token ids in and token ids out."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.config.serve import ServeConfig
from penstock.dialects.tokens.reply import TextReply, TokensReply
from penstock.dialects.tokens.request_schema import (
    UNSUPPORTED,
    UNSUPPORTED_SAMPLING,
    TokenSampling,
    TokensRequest,
)
from penstock.generation.dialect import NO_INFO, Dialect, RequestInfo
from penstock.generation.input_processor import InputProcessor
from penstock.generation.plan import RequestPlan
from penstock.generation.prompt.prompts import parse_prompts
from penstock.generation.request import validation
from penstock.generation.request.schemas import GenerateRequest
from penstock.generation.request.tool_choice import ToolChoice
from penstock.http.errors import ApiError, refused, shown

SAMPLING = "sampling_params"
OUTPUT_MODES = ("tokens", "text")
MARKER_TOKENS = 64
"""Tokens at a prompt's end that may be a marker of reasoning."""
_SAMPLING_FIELDS = frozenset(TokenSampling.__struct_fields__)
_SHARED = _SAMPLING_FIELDS & frozenset(GenerateRequest.__struct_fields__)
_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""vLLM's, which hold here in place of those of the model's files."""


class TokensInOut(Dialect):
    """Token ids in and out: nothing is rendered or tokenized, and without stop strings nothing is made into
    text."""

    path = "/inference/v1/generate"
    columns = True

    def __init__(self, config: ServeConfig, processor: InputProcessor) -> None:
        self._processor = processor
        self._decoder = processor.decoder(TokensRequest, id_field="token_ids", flat_ids=True)
        self._unsupported = processor.unsupported(UNSUPPORTED)
        self._unsupported_sampling = processor.unsupported(UNSUPPORTED_SAMPLING)

    def plan(self, body: bytes, info: RequestInfo = NO_INFO, found: Any = None) -> RequestPlan:
        request = self._decoder.decode(body)
        self._unsupported.check_fields(request)
        if request.sampling_params is None:
            raise ApiError(400, f"{SAMPLING} is missing: an object, which may be empty.", param=SAMPLING)
        mode = _output_mode(request)
        self._processor.check_model(request.model)
        try:
            plan = self._plan(request, request.sampling_params, info)
        except ApiError as error:
            if error.param and error.param.partition(".")[0] in _SAMPLING_FIELDS:
                error.param = f"{SAMPLING}.{error.param}"
            raise
        if plan.constraint is not None:
            plan.constraint = plan.constraint.within(SAMPLING)
        plan.return_token_ids = bool(request.return_token_ids)
        plan.return_weight_versions = True
        plan.dialect_fields = mode
        return plan

    def _plan(self, request: TokensRequest, sampling: TokenSampling, info: RequestInfo) -> RequestPlan:
        processor = self._processor
        model_info = processor.model_info
        self._unsupported_sampling.check_fields(sampling)
        if sampling.stop and sampling.detokenize is False:
            raise ApiError(400, "detokenize must not be false with stop, which is text.", param="detokenize")
        logprobs, listed = -1, sampling.logprob_token_ids
        if listed and sampling.logprobs not in (None, len(listed)):
            raise refused(
                f"logprobs must be absent, or the number of logprob_token_ids ({len(listed)}).",
                "logprobs",
                sampling.logprobs,
            )
        if sampling.logprobs is not None and not listed:
            logprobs = validation.resolve_logprobs(
                sampling.logprobs, processor.max_logprobs, model_info.vocab_size
            )
        max_tokens = sampling.max_tokens
        if max_tokens is not None:  # what exceeds the context is no error in vLLM's engines
            max_tokens = min(max_tokens, model_info.max_model_len)
            validation.check_max_tokens(max_tokens, model_info.max_model_len)
        prompts = parse_prompts(request.token_ids, model_info.vocab_size, "token_ids")
        plan = processor.plan(
            _shared_fields(request, sampling), info.request_id, prompts, max_tokens, logprobs
        )
        if plan.constraint is not None and not request.reasoning_ended:
            assert isinstance(prompts[0], bytes)
            end = np.frombuffer(prompts[0], "<i4")[-MARKER_TOKENS:].tolist()
            processor.constrain_after_reasoning(plan, ToolChoice(), processor.decode(end))
        return plan

    def reply_format(self, plan: RequestPlan, request_id: str) -> TokensReply:
        id = f"generate-tokens-{plan.request_id or request_id}"
        make = TextReply if plan.dialect_fields == "text" else TokensReply
        return make(id, plan)


def _output_mode(request: TokensRequest) -> str:
    mode = request.output_mode or "tokens"
    if mode not in OUTPUT_MODES:
        raise refused(f"output_mode must be {' or '.join(OUTPUT_MODES)}, got {shown(mode)!r}.", "output_mode")
    if mode == "text" and request.sampling_params and request.sampling_params.detokenize is False:
        field = f"{SAMPLING}.detokenize"
        raise ApiError(400, f"{field} must not be false with output_mode text.", param=field)
    return mode


def _shared_fields(request: TokensRequest, sampling: TokenSampling) -> GenerateRequest:
    """The request in the fields that APIs share."""
    fields = {name: value for name in _SHARED if (value := getattr(sampling, name)) is not None}
    fields.pop("max_tokens", None)
    fields.pop("logprobs", None)
    return GenerateRequest(
        **(_DEFAULTS | fields),
        model=request.model,
        stream=request.stream,
        stream_options=request.stream_options,
        request_id=request.request_id,
        priority=request.priority,
        cache_salt=request.cache_salt,
        kv_transfer_params=request.kv_transfer_params,
        return_routed_experts=request.return_routed_experts,
    )
