"""Translates an entry of Envoy's access log into the gateway's terms for how a request ended."""

from __future__ import annotations

from penstock.gateway.extproc.messages import AccessLogEntry
from penstock.gateway.responses.outcome import TransportResult

_TIMEOUTS = frozenset(
    {
        "upstream_request_timeout",
        "stream_idle_timeout",
        "upstream_max_stream_duration_reached",
        "duration_timeout",
    }
)
NO_CONNECTION = "upstream_connection_failure"
_BROKEN = frozenset(
    {
        NO_CONNECTION,
        "no_healthy_upstream",
        "local_reset",
        "upstream_remote_reset",
        "upstream_connection_termination",
        "upstream_overflow",
        "upstream_protocol_error",
    }
)
_CLIENT_GONE = (
    "downstream_remote_disconnect",
    "http1.remote_reset",
    "http2.remote_reset",
    "http3.remote_reset",
)
"""Prefixes of ``response_code_details``; resets of an HTTP/2 stream set no flag in the log."""


def transport_result_of(entry: AccessLogEntry) -> tuple[TransportResult, str]:
    """How the exchange ended, and the reason if it is incomplete.

    When a client disconnects, Envoy also resets the upstream, so the client's flag takes precedence.
    """
    if "downstream_connection_termination" in entry.flags or entry.details.startswith(_CLIENT_GONE):
        return TransportResult.CLIENT_GONE, ""
    if entry.flags & _TIMEOUTS:
        return TransportResult.TIMEOUT, entry.details
    if entry.flags & _BROKEN or entry.details.startswith("upstream_reset"):
        return TransportResult.BROKEN, entry.details
    return TransportResult.COMPLETE, ""


def is_local_reply(entry: AccessLogEntry) -> bool:
    """Whether Envoy answered by itself, without sending the request to a model server."""
    return not entry.attempts and not entry.upstream and not entry.flags & (_BROKEN | _TIMEOUTS)
