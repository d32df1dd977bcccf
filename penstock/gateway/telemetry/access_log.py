"""The access log: one line of JSON for each request."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler

from penstock.config.errors import ConfigError
from penstock.gateway.relay.request_record import FailedAttempt, RequestRecord
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


def log_request(record: RequestRecord) -> None:
    """Write the line of a request that has ended. Empty fields are omitted."""
    usage = record.seen.usage
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "request_id": record.request_id or None,
        "trace_id": record.trace and record.trace.trace_id_hex,
        "method": record.method or None,
        "path": record.path or None,
        "model": record.model or None,
        "target_model": None if record.target_model == record.model else record.target_model,
        "streamed": record.streamed or None,
        "priority": record.priority or None,
        "outcome": record.outcome,
        "reason": record.reason or None,
        "status": record.status,
        "endpoint": record.endpoint or None,
        "attempts": record.attempts,
        "failures": [_failure_fields(failure) for failure in record.failures] or None,
        "seconds": round(record.ended_at - record.began_at, 4),
        "ttft": _difference(record.seen.first_token_at, record.began_at),
        "input_tokens": usage and usage.input_tokens,
        "output_tokens": record.seen.reported_output,
        "cached_tokens": usage and usage.cached_tokens,
        "token_events": record.seen.token_events or None,
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
    }
    fields = {key: value for key, value in line.items() if value is not None}
    log_event(access_logger, "request", fields, json.dumps(fields))


def _failure_fields(failure: FailedAttempt) -> dict[str, str]:
    return {"endpoint": failure.endpoint, "outcome": failure.outcome, "reason": failure.reason}


def _difference(later: float | None, earlier: float) -> float | None:
    return None if later is None else round(later - earlier, 4)
