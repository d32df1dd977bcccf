"""The record of one request: what metrics, spans and the access log are made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.gateway.requests.apis import (
    APIS,
    OTHER_API,
    VECTOR_APIS,
    error_body,
    error_event,
    gateway_error,
)
from penstock.gateway.requests.bounded_name import bounded_name
from penstock.gateway.requests.caller import ANYONE, Caller
from penstock.gateway.requests.request_body import RequestBody
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.response_observer import NOTHING_SEEN, Observation
from penstock.gateway.upstream.exchange import Headers
from penstock.http.errors import ApiError
from penstock.telemetry.trace_context import TraceContext


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt after which the request was retried, or answered by the gateway itself."""

    at: float
    endpoint: str
    outcome: Outcome
    reason: str


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Facts about one request, complete when it has ended. Times are seconds of the relay's clock.
    Compared by identity."""

    path: str
    """Empty: unknown, for a request that was refused before it was complete."""
    request_id: str = ""
    """The client's id, or one that the gateway generated."""
    method: str = ""
    """Empty: unknown, for a request that another gateway process routed for the same Envoy."""
    trace: TraceContext | None = None
    caller: Caller = ANYONE
    """Who sends it."""
    model: str = ""
    """The model that the client named, see :func:`~penstock.gateway.requests.bounded_name.bounded_name`."""
    target_model: str = ""
    """The model that the endpoint was sent."""
    priority: int = 0
    streamed: bool = False
    """Whether the client requested a stream."""
    began_at: float = 0.0
    ended_at: float = 0.0
    sent_at: float | None = None
    """When the request was sent to the endpoint that answered."""
    fell_back: bool = False
    """Whether another model or pool took the place of what the client's name stands for."""
    pool: str = ""
    """Pool of the endpoint; empty: it is in none."""
    outcome: Outcome = Outcome.REJECTED
    reason: str = ""
    endpoint: str = ""
    attempts: int = 0
    prefilled_by: str = ""
    """The endpoint that computed the prompt for the one that answered; empty: the same."""
    failures: list[FailedAttempt] = field(default_factory=list)
    """In order of time. Empty for requests that Envoy sends: only Envoy knows its failed attempts."""
    status: int = 0
    """Status that the client got; 0: none."""
    seen: Observation = field(default_factory=lambda: NOTHING_SEEN)
    cost: int | None = None
    """Billionths of ``currency``; None: no tokens, or no prices, are known."""
    currency: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    messages_errors: bool = False
    """Whether the client expects errors of Anthropic's shape."""
    waits: bool = False
    """Whether it waits for a place at an endpoint."""
    queued_s: float = 0.0
    """Seconds for which it waited."""
    pick_s: float = 0.0
    """Seconds spent on picking endpoints."""
    reply_headers: Headers = field(default_factory=list)
    """Headers that the reply gets, in the place of the endpoint's own."""

    @property
    def client(self) -> str:
        """See :attr:`Caller.id`."""
        return self.caller.id

    @property
    def api(self) -> str:
        """The API of a request for text or vectors, or :data:`OTHER_API`."""
        if self.is_replay:
            return OTHER_API
        return APIS.get(self.path) or VECTOR_APIS.get(self.path, OTHER_API)

    @property
    def is_replay(self) -> bool:
        """Whether it reads: what it gets was generated for another request."""
        return self.method == "GET"

    def error_body(self, error: ApiError) -> bytes:
        """The body of an error reply."""
        return error_body(error, self.request_id, messages=self.messages_errors, path=self.path)

    def error_event(self, code: str, message: str) -> bytes:
        """The event that ends a stream after an error."""
        error = gateway_error(502, code, message)
        return error_event(error, self.request_id, messages=self.messages_errors, path=self.path)

    def set_body(self, body: RequestBody) -> None:
        """Take model, priority and streaming from the body of a generation request."""
        self.model = self.target_model = bounded_name(body.model)
        self.priority, self.streamed = body.priority, body.stream


def failure_reason(record: RequestRecord) -> str:
    """Why a reply counts as failed; empty for a good one."""
    seen = record.seen
    if record.outcome is Outcome.CONTENT_ERROR:
        return seen.content_problem or ""
    if record.outcome is Outcome.NETWORK_ERROR:
        return "the stream ended without its terminator"
    if record.outcome in (Outcome.MODEL_SERVER_ERROR, Outcome.CLIENT_ERROR) and seen.error is not None:
        return f"the model server sent an error {seen.error}".rstrip()
    return ""
