"""The span of a request through the gateway."""

from __future__ import annotations

from urllib.parse import urlsplit

from penstock.gateway.billing.prices import NANO
from penstock.gateway.requests.bounded_name import bounded_name
from penstock.gateway.responses.outcome import SUCCESSFUL
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.responses.token_usage import ReportedUsage
from penstock.telemetry.spans import OPERATIONS, PROVIDERS, Attribute, SpanData, present


def span_data(record: RequestRecord) -> SpanData:
    """The contents of the span of a request that has ended."""
    seen, usage = record.seen, record.seen.usage or ReportedUsage()
    operation = OPERATIONS.get(record.path)
    reason, address = bounded_name(record.reason), bounded_name(record.endpoint)
    endpoint = urlsplit(address if "//" in address else f"//{address}")
    good = record.outcome in SUCCESSFUL
    ttft = None if seen.first_token_at is None else seen.first_token_at - record.began_at
    attributes: dict[str, Attribute | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": operation and PROVIDERS.get(record.path, "openai"),
        "gen_ai.request.model": record.model or None,
        "gen_ai.response.model": record.target_model or None,
        "gen_ai.request.stream": True if record.streamed else None,
        "gen_ai.usage.input_tokens": usage.input_tokens,
        "gen_ai.usage.output_tokens": seen.reported_output,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        "gen_ai.response.time_to_first_chunk": ttft,
        "http.request.method": bounded_name(record.method) or None,
        "url.path": bounded_name(record.path),
        "http.request.body.size": record.bytes_in,
        "http.response.body.size": record.bytes_out,
        "http.response.status_code": record.status or None,
        "server.address": endpoint.hostname,
        "server.port": endpoint.port,
        "error.type": None if good else record.outcome.value,
        "penstock.outcome": record.outcome.value,
        "penstock.reason": reason or None,
        "penstock.request_id": bounded_name(record.request_id) or None,
        "penstock.attempts": record.attempts,
        "penstock.key": record.caller.name or None,
        "penstock.team": record.caller.team or None,
        "penstock.cost": None if record.cost is None else record.cost / NANO,
        "penstock.currency": record.currency or None,
        "penstock.priority": record.priority or None,
        "penstock.queued_seconds": round(record.queued_s, 4) or None,
    }
    events: list[tuple[str, float, dict[str, Attribute]]] = []
    for failure in record.failures:
        about: dict[str, Attribute] = {
            "endpoint": failure.endpoint,
            "error.type": failure.outcome.value,
            "reason": bounded_name(failure.reason),
        }
        events.append(("retry", failure.at, about))
    if seen.first_token_at is not None:
        events.append(("first_token", seen.first_token_at, {}))
    name = f"{operation} {record.model}".rstrip() if operation else bounded_name(record.method) or "HTTP"
    return SpanData(name, present(attributes), events, None if good else reason or record.outcome.value)
