"""What has failed at an endpoint lately, for who looks after it."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.config.hidden import hide_credentials
from penstock.gateway.requests.bounded_name import bounded_name

MAX_FAILURES = 5
"""The latest ones of an endpoint that are remembered."""
SCRAPE = "scrape"
"""The outcome of a failed reading of its metrics, which is no request."""


class EndpointFailure(msgspec.Struct, array_like=True, frozen=True):
    """One failure. It has nothing of a request or a reply but its id, and type and code of an error."""

    at: float
    """Unix time, in seconds."""
    outcome: str
    reason: str
    status: int
    """The endpoint's; 0: it sent none."""
    request_id: str

    def row(self) -> dict[str, Any]:
        """For JSON."""
        at = datetime.fromtimestamp(self.at, UTC).isoformat(timespec="milliseconds")
        fields = msgspec.structs.asdict(self) | {"at": at, "status": self.status or None}
        return {name: value for name, value in fields.items() if value not in ("", None)}


def endpoint_failure(outcome: str, reason: str, status: int, request_id: str) -> EndpointFailure:
    """A failure of this moment."""
    told = bounded_name(hide_credentials(reason)) or f"status {status}"
    return EndpointFailure(time.time(), str(outcome), told, status, bounded_name(request_id))


def latest(known: tuple[EndpointFailure, ...], more: EndpointFailure) -> tuple[EndpointFailure, ...]:
    """The latest ones of all, in order of time; one that is told twice counts once."""
    return tuple(sorted({*known, more}, key=lambda each: each.at))[-MAX_FAILURES:]
