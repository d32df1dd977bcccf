"""How a request ended, in one word: every request has exactly one outcome."""

from __future__ import annotations

import enum

from penstock.gateway.requests.request_body import GENERATION_PATHS
from penstock.gateway.responses.response_observer import Observation


class Outcome(enum.StrEnum):
    """Values of the label ``outcome``."""

    OK = "ok"
    OK_WITHOUT_USAGE = "ok_without_usage"
    """A whole reply that does not say how many tokens it took."""
    CLIENT_ERROR = "client_error"
    """The model server answered 4xx."""
    CLIENT_DISCONNECT = "client_disconnect"
    """The client left before its reply was whole."""
    MODEL_SERVER_ERROR = "model_server_error"
    """5xx, or an error within a reply that began with 200."""
    NETWORK_ERROR = "network_error"
    """No connection, a broken one, a time-out, or a reply that ends before its terminator."""
    CONTENT_ERROR = "content_error"
    """A reply that is not what its content type or protocol says."""
    REJECTED = "rejected"
    """The gateway answered itself: no endpoint, overload, a bad request, a missing key."""


SUCCESSFUL = frozenset({Outcome.OK, Outcome.OK_WITHOUT_USAGE})

ENDPOINT_FAULTS = frozenset({Outcome.NETWORK_ERROR, Outcome.MODEL_SERVER_ERROR, Outcome.CONTENT_ERROR})
"""Outcomes that count as failures of the endpoint."""


class TransportResult(enum.Enum):
    """How the exchange with the model server stopped, as the transport saw it."""

    COMPLETE = enum.auto()
    """The HTTP reply is whole."""
    BROKEN = enum.auto()
    """No connection, or it broke before the reply was whole."""
    TIMEOUT = enum.auto()
    CLIENT_GONE = enum.auto()


def classify_outcome(ending: TransportResult, status: int | None, seen: Observation, path: str) -> Outcome:
    """The outcome of a request for ``path`` that was sent to an endpoint.

    ``status`` is the model server's, None when it sent none. Only requests for tokens have usage to tell. A
    stream whose terminator was relayed is whole, whatever happens to the connections afterwards.
    """
    whole = ending is TransportResult.COMPLETE or (seen.stream and seen.ended)
    if not whole:
        return Outcome.CLIENT_DISCONNECT if ending is TransportResult.CLIENT_GONE else _unfinished(seen)
    if status is None or status >= 500:
        return Outcome.MODEL_SERVER_ERROR
    if status >= 400:
        return Outcome.CLIENT_ERROR
    if seen.error is not None:
        return Outcome.MODEL_SERVER_ERROR
    if seen.content_problem is not None:
        return Outcome.CONTENT_ERROR
    if not seen.ended:
        return Outcome.NETWORK_ERROR
    tells = seen.usage is not None or path not in GENERATION_PATHS
    return Outcome.OK if tells else Outcome.OK_WITHOUT_USAGE


def _unfinished(seen: Observation) -> Outcome:
    """The connection failed; a server that said why has failed itself."""
    return Outcome.NETWORK_ERROR if seen.error is None else Outcome.MODEL_SERVER_ERROR
