"""The span of a generating request in an API server. What is asked and answered is never part of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from penstock.api.api_request import ApiRequest
from penstock.generation.plan import RequestPlan
from penstock.generation.replies.reply import RequestReply
from penstock.generation.replies.token_usage import TokenUsage
from penstock.metrics.ended_requests import GOOD
from penstock.telemetry.spans import OPERATIONS, PROVIDERS, Attribute, SpanData, present
from penstock.telemetry.trace_context import TraceContext


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """The facts about a request that has ended. Times are seconds of the monotonic clock."""

    trace: TraceContext | None
    began_at: float
    ended_at: float
    method: str
    path: str
    request_id: str
    status: int
    error_type: str | None
    """None: it succeeded. Messages are left out: they may quote the request."""
    # -- None or empty if the request ended before it was planned
    model: str | None = None
    plan: RequestPlan | None = None
    """Of a request for text."""
    reply_id: str | None = None
    usage: TokenUsage | None = None
    finish_reasons: list[str] = field(default_factory=list)
    outcome: str | None = None
    first_token_at: float | None = None
    engine: int | None = None
    """Rank of the engine that the first choice was submitted to."""
    resumptions: Sequence[tuple[float, int, int]] = ()
    """For each time that a stream lost its engine: time, rank of the next engine, tokens until then."""


def describe(request: EndedRequest) -> SpanData:
    """The contents of the request's span."""
    operation = OPERATIONS.get(request.path)
    plan, usage, first = request.plan, request.usage, request.first_token_at
    model = request.model
    attributes: dict[str, Attribute | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": operation and PROVIDERS.get(request.path, "openai"),
        "gen_ai.request.id": request.reply_id,
        "gen_ai.response.id": request.reply_id,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": request.finish_reasons or None,
        "gen_ai.response.time_to_first_chunk": None if first is None else first - request.began_at,
        "http.request.method": request.method,
        "http.response.status_code": request.status,
        "url.path": request.path,
        "error.type": request.error_type,
        "penstock.outcome": request.outcome,
        "penstock.request_id": request.request_id,
        "penstock.engine": request.engine,
    }
    if plan is not None:
        attributes |= {
            "gen_ai.request.stream": plan.stream or None,
            "gen_ai.request.choice.count": plan.n,
            "gen_ai.request.max_tokens": plan.max_tokens,
            "gen_ai.request.temperature": plan.base.temperature,
            "gen_ai.request.top_p": plan.base.top_p,
        }
    if usage is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
    events: list[tuple[str, float, dict[str, Attribute]]] = [
        ("resumed", at, {"penstock.engine": rank, "penstock.position": position})
        for at, rank, position in request.resumptions
    ]
    if first is not None:
        events.append(("first_token", first, {}))
    name = f"{operation} {model}" if operation and model else operation or request.method
    events.sort(key=lambda event: event[1])
    return SpanData(name, present(attributes), events, request.error_type)


def record_of(request: ApiRequest) -> EndedRequest:
    """What its span is made of, of a request that has ended."""
    reply, error = request.reply, request.error
    ended = EndedRequest(
        trace=request.trace,
        began_at=request.arrival,
        ended_at=time.monotonic(),
        method=request.http.method,
        path=request.http.path,
        request_id=request.request_id,
        status=request.status,
        error_type=None if error is None else str(error.code or error.status),
    )
    if reply is None:
        return ended
    outcome = reply.outcome or None
    failure = None if outcome in GOOD else outcome or "refused"
    return replace(
        ended,
        error_type=ended.error_type or failure,
        model=reply.plan.model,
        plan=reply.plan if isinstance(reply.plan, RequestPlan) else None,
        reply_id=reply.format.id,
        usage=reply.usage(),
        finish_reasons=[choice.finish_reason.decode() for choice in reply.choices if choice.finish_reason],
        outcome=outcome,
        first_token_at=reply.first_token_at,
        engine=None if isinstance(reply, RequestReply) and not reply.choices else reply.first_rank,
        resumptions=reply.resumptions,
    )
