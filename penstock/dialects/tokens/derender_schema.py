"""The request bodies of the derender routes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.dialects.chat.request_schema import ChatCompletionRequest
from penstock.dialects.completions.request_schema import CompletionRequest
from penstock.generation.request.schemas import JsonObject, PromptToken, about

_UNUSED = about("Not used.")


class GeneratedCandidate(msgspec.Struct, gc=False):
    """A token with its logprob."""

    token_id: PromptToken
    logprob: float
    rank: int | None = None
    token: Annotated[Any, _UNUSED] = None
    top_logprobs: Annotated[
        list[GeneratedAlternative], about("The token itself, then its alternatives in order.")
    ] = []


class GeneratedAlternative(msgspec.Struct, gc=False):
    token_id: PromptToken
    logprob: float
    rank: int | None = None


class GeneratedLogprobs(msgspec.Struct, gc=False):
    content: list[GeneratedCandidate] | None = None


class GeneratedChoice(msgspec.Struct, kw_only=True):
    """A choice of ``/inference/v1/generate``."""

    index: int
    token_ids: list[PromptToken] | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    logprobs: GeneratedLogprobs | None = None
    routed_experts: Annotated[Any, _UNUSED] = None
    sampling_mask: Annotated[Any, _UNUSED] = None
    weight_versions: Annotated[Any, _UNUSED] = None


class GeneratedUsage(msgspec.Struct):
    """Not used, but for what cannot be."""

    prompt_tokens: Annotated[int, Meta(ge=0)] | None = None
    completion_tokens: Annotated[int, Meta(ge=0)] | None = None
    total_tokens: Annotated[int, Meta(ge=0)] | None = None
    prompt_tokens_details: Annotated[Any, _UNUSED] = None
    completion_tokens_details: Annotated[Any, _UNUSED] = None


class GeneratedReply(msgspec.Struct, kw_only=True):
    """A whole reply of ``/inference/v1/generate``."""

    choices: list[GeneratedChoice]
    request_id: str | None = None
    prompt_token_ids: list[PromptToken] | None = None
    kv_transfer_params: JsonObject | None = None
    output_mode: Annotated[str | None, about("tokens.")] = None
    prompt_logprobs: Any = None
    model: Annotated[Any, _UNUSED] = None
    created: Annotated[Any, _UNUSED] = None
    usage: Annotated[GeneratedUsage | None, _UNUSED] = None
    prompt_token_id_logprobs: Annotated[Any, _UNUSED] = None
    mm_placeholders: Annotated[Any, _UNUSED] = None
    metrics: Annotated[Any, _UNUSED] = None
    ec_transfer_params: Annotated[Any, _UNUSED] = None


class DerenderChatRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/chat/completions/derender."""

    generate_response: Annotated[GeneratedReply, about("The reply for the rendered request.")]
    chat_request: Annotated[ChatCompletionRequest, about("The request that was rendered.")]
    prompt_token_ids: Annotated[list[PromptToken] | None, about("Of the rendered request.")] = None
    prompt_tokens: Annotated[int | None, about("Their number, if they are not sent.")] = None
    model: str | None = None
    stream: bool | None = None


class DerenderCompletionRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/completions/derender."""

    generate_responses: Annotated[list[GeneratedReply], about("One reply per prompt.")]
    completion_request: Annotated[CompletionRequest, about("The request that was rendered.")]
    prompt_token_ids: Annotated[list[list[PromptToken] | None] | None, about("Of each prompt.")] = None
    prompt_tokens: Annotated[list[int] | None, about("Their numbers, if they are not sent.")] = None
    model: str | None = None
    stream: bool | None = None
