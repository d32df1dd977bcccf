"""The record of one request: what metrics, spans and the access log are made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.gateway.requests.request_body import RequestBody
from penstock.gateway.requests.trace_context import TraceContext
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.response_observer import Observation


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """Of an attempt that was followed by another one, or by the gateway's own answer."""

    at: float
    endpoint: str
    outcome: Outcome
    reason: str


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What is known about one request when it has ended. Times are seconds of the relay's clock. Compared by
    identity."""

    path: str
    request_id: str = ""
    """The client's, or one the gateway made."""
    method: str = ""
    """Empty: unknown, as the request of another process behind the same Envoy."""
    trace: TraceContext | None = None
    model: str = ""
    """What the client asked for."""
    target_model: str = ""
    """What the endpoint was asked for."""
    priority: int = 0
    streamed: bool = False
    """Whether the client asked for a stream."""
    began_at: float = 0.0
    ended_at: float = 0.0
    sent_at: float | None = None
    """When the endpoint that answered was sent the request."""
    outcome: Outcome = Outcome.REJECTED
    reason: str = ""
    endpoint: str = ""
    attempts: int = 0
    failures: list[FailedAttempt] = field(default_factory=list)
    """In their order; of requests that Envoy sends, it alone knows them."""
    status: int = 0
    """What the client got; 0: nothing."""
    seen: Observation = field(default_factory=Observation)
    bytes_in: int = 0
    bytes_out: int = 0
    pick_s: float = 0.0
    """What picking endpoints for it has taken."""

    def set_body(self, body: RequestBody) -> None:
        """It is a request for generation."""
        self.model, self.target_model = body.asked_model, body.model
        self.priority, self.streamed = body.priority, body.stream


def failure_reason(record: RequestRecord) -> str:
    """Why a reply that arrived is not a good one; nothing for one that is."""
    seen = record.seen
    if record.outcome is Outcome.CONTENT_ERROR:
        return seen.content_problem or ""
    if record.outcome is Outcome.NETWORK_ERROR:
        return "the stream ended without its terminator"
    if record.outcome is Outcome.MODEL_SERVER_ERROR and seen.error is not None:
        return seen.error.decode(errors="replace")[:500]
    return ""
