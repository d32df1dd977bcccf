"""What picking knows of a request, and how it refuses one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from penstock.gateway.admission.admission import Permit
from penstock.gateway.requests.apis import VECTOR_APIS, gateway_error
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.requests.request_body import TOKEN_BYTES
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.routing.cached_prompts import CachedPrompt
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.model_steps import FallbackStep
from penstock.gateway.routing.prefix_affinity import prefix_blocks
from penstock.http.admission import retry_headers
from penstock.http.errors import ApiError

OWNER_UNAVAILABLE = "owner_unavailable"
"""Reason of a refusal: the endpoints that have the response which the request names are not ready."""


@dataclass(slots=True)
class PickRequest:
    """The properties of a request that picking uses."""

    model: str = ""
    blocks: Sequence[int] = ()
    """Hashes from :func:`penstock.gateway.routing.prefix_affinity.prefix_blocks`."""
    prompt: CachedPrompt | None = None
    """Where the prompt is cached, if that is known exactly."""
    session: str | None = None
    tokens: int = 0
    """Estimated prompt tokens."""
    priority: int = 0
    """Negative: the request is rejected when all endpoints are saturated."""
    ttft_slo_s: float | None = None
    subset: frozenset[str] | None = None
    """URLs of the endpoints that Envoy allows; None: all."""
    owners: Sequence[Endpoint] | None = None
    """Endpoints that have the stored response that the request names, the best one first; None: it names
    none."""
    client: str = ""
    """Who sends it; empty: unknown."""
    tried: set[Endpoint] = field(default_factory=set)
    """Endpoints that this request was sent to before, of those of its step."""
    refusals: int = 0
    """How many of them have refused it, and so have not begun it."""
    begun: bool = False
    """Whether it is sent again although an endpoint may have begun it."""
    permit: Permit | None = None
    """What it holds until it has ended: budgets, a place; None: nothing."""
    transfer: bytes | None = None
    """JSON by which an endpoint that decodes gets the prompt's KV cache from the one that has computed it. It
    holds for one attempt."""
    steps: Sequence[FallbackStep] = ()
    """Models and endpoints that it may go to; the first is the one that holds, the others take its place."""
    incoming: IncomingRequest | None = None
    """The request itself, for the model of its step; None: it is not known."""
    record: RequestRecord | None = None
    """What becomes of it."""

    @property
    def generates(self) -> bool:
        """Whether it makes a reply, and does not ask for one that was made before."""
        return self.incoming is None or self.incoming.body is not None

    def incoming_for(self, endpoint: Endpoint) -> IncomingRequest:
        """The request that the endpoint gets."""
        assert self.incoming is not None, "it has been prepared"
        if self.transfer is None or endpoint.role != "decode" or self.tried - {endpoint}:
            return self.incoming
        return self.incoming.with_transfer(self.transfer)

    def take_step(self, index: int) -> None:
        """Another model, or other endpoints, hold from here on."""
        self.steps = self.steps[index:]
        self.tried, self.refusals = set(), 0
        self.prompt = self.transfer = None
        assert self.incoming is not None, "requests with steps are known"
        self.incoming = self.incoming.for_model(self.steps[0].model)
        if (body := self.incoming.body) is not None:
            self.model = body.model
            self.blocks = prefix_blocks(body.model, body.prompt)


def pick_request(
    incoming: IncomingRequest, session: str | None, steps: Sequence[FallbackStep], ttft_slo_s: float | None
) -> PickRequest:
    """The properties of a request for picking, as it is for the first of ``steps``."""
    request = PickRequest(session=session, ttft_slo_s=ttft_slo_s, steps=steps, incoming=incoming)
    if incoming.body is not None:
        request.priority, request.tokens = incoming.body.priority, incoming.body.tokens
    elif incoming.path in VECTOR_APIS:
        request.tokens = incoming.size // TOKEN_BYTES
    request.take_step(0)
    return request


class NoEndpointError(Exception):
    """No endpoint may be sent the request. ``status`` is 429 or 503, ``reason`` a value of the label,
    ``retry_after_s`` when one may be; None: that is unknown."""

    def __init__(self, status: int, reason: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s

    def as_error(self) -> ApiError:
        """The reply to the client."""
        error = gateway_error(self.status, self.reason, str(self))
        if self.retry_after_s is not None:
            error.headers = retry_headers(ceil(1000 * self.retry_after_s))
        return error
