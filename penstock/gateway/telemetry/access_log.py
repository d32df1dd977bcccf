"""The access log: one line of JSON for each request."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler

from penstock.config.errors import ConfigError
from penstock.gateway.billing.prices import NANO
from penstock.gateway.requests.bounded_name import bounded_name
from penstock.gateway.responses.request_record import FailedAttempt, RequestRecord
from penstock.logging_setup import log_event

access_logger = logging.getLogger("penstock.gateway.access")
access_logger.setLevel(logging.INFO)  # independent of --log-level: only --access-log decides


def log_to_file(path: str) -> None:
    """Write the access log to a file instead of the process log: one JSON object on each line. A file that is
    moved away is reopened. Raises ConfigError."""
    try:
        handler = WatchedFileHandler(path)
    except OSError as error:
        raise ConfigError(f"--access-log-file {path}: {error.strerror}") from None
    access_logger.addHandler(handler)
    access_logger.propagate = False


def log_request(record: RequestRecord, *, with_content: bool) -> None:
    """Write the line of a request that has ended. Empty fields are omitted. ``with_content``: also the begin
    of an error, or of content that cannot be read."""
    seen, usage = record.seen, record.seen.usage
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request_id": bounded_name(record.request_id) or None,
        "trace_id": record.trace and record.trace.trace_id_hex,
        "method": bounded_name(record.method) or None,
        "path": bounded_name(record.path) or None,
        "key": record.caller.name or None,
        "team": record.caller.team or None,
        "model": record.model or None,
        "target_model": None if record.target_model == record.model else record.target_model,
        "streamed": record.streamed or None,
        "priority": record.priority or None,
        "outcome": record.outcome,
        "reason": bounded_name(record.reason) or None,
        "unread": seen.unread or None,
        "content": seen.excerpt.decode(errors="replace") or None if with_content else None,
        "status": record.status,
        "endpoint": bounded_name(record.endpoint) or None,
        "pool": record.pool or None,
        "fallback": record.fell_back or None,
        "prefilled_by": record.prefilled_by or None,
        "attempts": record.attempts,
        "failures": [_failure_fields(failure) for failure in record.failures] or None,
        "seconds": round(record.ended_at - record.began_at, 4),
        "queued": round(record.queued_s, 4) or None,
        "ttft": _difference(seen.first_token_at, record.began_at),
        "input_tokens": usage and usage.input_tokens,
        "output_tokens": seen.reported_output,
        "cached_tokens": usage and usage.cached_tokens,
        "reasoning_tokens": usage and usage.reasoning_tokens,
        "cost": None if record.cost is None else record.cost / NANO,
        "currency": record.currency or None,
        "token_events": seen.token_events or None,
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
    }
    fields = {key: value for key, value in line.items() if value is not None}
    log_event(access_logger, "request", fields, json.dumps(fields))


def _failure_fields(failure: FailedAttempt) -> dict[str, str]:
    return {
        "endpoint": failure.endpoint,
        "outcome": failure.outcome,
        "reason": bounded_name(failure.reason),
    }


def _difference(later: float | None, earlier: float) -> float | None:
    return None if later is None else round(later - earlier, 4)
