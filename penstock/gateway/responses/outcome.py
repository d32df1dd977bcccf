"""The outcome of a request: every request has exactly one."""

from __future__ import annotations

import enum

from penstock.gateway.requests.apis import VECTOR_APIS
from penstock.gateway.requests.named_response import response_in_path
from penstock.gateway.requests.request_body import GENERATION_PATHS
from penstock.gateway.responses.response_observer import Observation


class Outcome(enum.StrEnum):
    """Values of the label ``outcome``."""

    OK = "ok"
    OK_WITHOUT_USAGE = "ok_without_usage"
    """A complete reply without token usage."""
    CLIENT_ERROR = "client_error"
    """The model server answered 4xx, but not to the gateway's own key."""
    CLIENT_DISCONNECT = "client_disconnect"
    """The client disconnected before its reply was complete."""
    MODEL_SERVER_ERROR = "model_server_error"
    """The model server answered 5xx, refused the gateway's own key, or sent an error in a reply with status
    200."""
    NETWORK_ERROR = "network_error"
    """No connection, a broken connection, a time-out, or a stream without its terminator."""
    CONTENT_ERROR = "content_error"
    """The reply violates its content type or protocol."""
    REJECTED = "rejected"
    """The gateway answered itself: no endpoint, overload, a bad request, a missing key, its own end."""


SUCCESSFUL = frozenset({Outcome.OK, Outcome.OK_WITHOUT_USAGE})

ENDPOINT_FAULTS = frozenset({Outcome.NETWORK_ERROR, Outcome.MODEL_SERVER_ERROR, Outcome.CONTENT_ERROR})
"""Outcomes that count as failures of the endpoint."""


class TransportResult(enum.Enum):
    """How the exchange with the model server ended at the transport level."""

    COMPLETE = enum.auto()
    """The HTTP reply is complete."""
    BROKEN = enum.auto()
    """No connection, or it broke before the reply was complete."""
    SERVER_FAILED = enum.auto()
    """The server has ended the reply with an error of its own, on a connection that goes on."""
    IDLE_CLOSED = enum.auto()
    """A connection that was idle broke when it got the request."""
    UNPROCESSED = enum.auto()
    """The server has not processed the request."""
    DENIED = enum.auto()
    """The server refuses the gateway's own key."""
    TIMEOUT = enum.auto()
    CLIENT_GONE = enum.auto()
    STOPPED = enum.auto()
    """The gateway ended before the reply was complete."""


_INCOMPLETE = {
    TransportResult.CLIENT_GONE: Outcome.CLIENT_DISCONNECT,
    TransportResult.STOPPED: Outcome.REJECTED,
    TransportResult.SERVER_FAILED: Outcome.MODEL_SERVER_ERROR,
    TransportResult.DENIED: Outcome.MODEL_SERVER_ERROR,
}


def classify_outcome(ending: TransportResult, status: int | None, seen: Observation, path: str) -> Outcome:
    """The outcome of a request for ``path`` that was sent to an endpoint.

    ``status`` is the model server's, None when it sent none. Only replies with text or vectors have usage.
    A stream whose terminator was relayed is complete, whatever happens to the connections afterwards. That a
    stored response has failed is no failure of the request for it.
    """
    complete = ending is TransportResult.COMPLETE or (seen.stream and seen.ended)
    if not complete:
        return _INCOMPLETE.get(ending) or _unfinished(seen)
    if status is None or status >= 500:
        return Outcome.MODEL_SERVER_ERROR
    if status >= 400:
        return Outcome.CLIENT_ERROR
    if seen.error is not None and not (seen.ended and response_in_path(path) is not None):
        return Outcome.MODEL_SERVER_ERROR
    if seen.content_problem is not None:
        return Outcome.CONTENT_ERROR
    if not seen.ended and not seen.may_stop:
        return Outcome.NETWORK_ERROR
    if seen.usage is None and not seen.deferred and (path in GENERATION_PATHS or path in VECTOR_APIS):
        return Outcome.OK_WITHOUT_USAGE
    return Outcome.OK


def _unfinished(seen: Observation) -> Outcome:
    """The connection failed; if the server had sent an error event before, the server failed. A whole
    reply may be an error that Envoy made of the failure."""
    return Outcome.MODEL_SERVER_ERROR if seen.stream and seen.error is not None else Outcome.NETWORK_ERROR
