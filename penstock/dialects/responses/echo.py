"""The fields of the response object that repeat the request."""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import structs

from penstock.dialects.responses.request_schema import ResponseRequest, ResponseTool
from penstock.dialects.responses.tools import HOSTED
from penstock.http.errors import ApiError

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
"""OpenAI's limits."""


class EchoedSampling(Protocol):
    """How tokens are sampled."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...


def summary_of(request: ResponseRequest) -> str | None:
    """How reasoning is summarized, if at all."""
    reasoning = request.reasoning
    return None if reasoning is None else reasoning.summary or reasoning.generate_summary


def echoed_fields(
    request: ResponseRequest, model: str, sampling: EchoedSampling, *, stored: bool
) -> dict[str, Any]:
    """``model``: its name in the reply. Raises ApiError."""
    metadata = request.metadata or {}
    if len(metadata) > MAX_METADATA or any(
        len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE for key, value in metadata.items()
    ):
        raise ApiError(
            400,
            f"metadata may have {MAX_METADATA} keys of {MAX_METADATA_KEY} characters, with values of "
            f"{MAX_METADATA_VALUE}.",
            param="metadata",
        )
    reasoning, options = request.reasoning, request.prompt_cache_options
    return {
        "model": model,
        "previous_response_id": request.previous_response_id,
        "instructions": request.instructions,
        "tools": [_tool(tool) for tool in _shown_tools(request.tools)],
        "tool_choice": request.tool_choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": _text(request),
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": summary_of(request),
        },
        "truncation": request.truncation or "disabled",
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "top_logprobs": request.top_logprobs or 0,
        "store": stored,
        "background": bool(request.background),
        "service_tier": "default",
        "metadata": metadata,
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "prompt_cache_options": None if options is None else structs.replace(options, prewarm=None),
    }


def _text(request: ResponseRequest) -> dict[str, Any]:
    options = request.text
    format = None if options is None else options.format
    if format is None or format.type != "json_schema":
        shown_format: dict[str, Any] = {"type": "text" if format is None else format.type}
    else:
        shown_format = {
            "type": format.type,
            "name": format.name or "",
            "description": format.description,
            "schema": format.schema,
            "strict": format.strict is not False,
        }
    text: dict[str, Any] = {"format": shown_format}
    if options is not None and options.verbosity is not None:
        text["verbosity"] = options.verbosity
    return text


def _shown_tools(tools: list[ResponseTool] | None) -> list[ResponseTool]:
    """The tools that the model sees, as the request has them."""
    return [tool for tool in tools or () if tool.type not in HOSTED]


def _tool(tool: ResponseTool) -> Any:
    if tool.type != "function":
        return tool
    return {
        "type": tool.type,
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
