"""Whether a request that failed at one endpoint is sent again.

What an endpoint may have begun is not sent to a second one, unless the request only reads. A completion
costs what it has generated, a file or a batch would exist twice, and a prompt that has broken one server
would break the next. Requests for vectors keep nothing and get the same once more: they are sent to a second
one, but to no third.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from penstock.gateway.relay.retry_budget import RetryBudget
from penstock.gateway.requests.apis import VECTOR_APIS
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.routing.pick_request import PickRequest
from penstock.gateway.routing.router import Router
from penstock.gateway.upstream.exchange import Headers
from penstock.http.admission import BEGUN

REFUSALS = frozenset({429, 503, 508, 529})
"""Statuses of endpoints that take no request now, but may later; 529 is Anthropic's. 508 is that of a gateway
that has relayed the request before: nothing was done, and an endpoint that leads elsewhere may do it."""
BAD_GATEWAY = 502
"""After it another endpoint may do better, if the request only reads; 500 is the model server's own
failure, which a retry repeats."""
NOT_FOUND = 404
"""After it another endpoint does better if that is known to serve the model."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Requests that only read (RFC 9110 §9.2.1). DELETE is idempotent at one server, but a second one has other
files."""
_KEPT = ("/v1/files", "/v1/uploads", "/v1/batches", "/v1/vector_stores", "/v1/conversations", "/v1/videos")
"""Routes by which a server makes or changes what it keeps; a refusal in between may have left something."""
KEY_REFUSALS = frozenset({401, 403})
"""Statuses of endpoints that refuse a key. To the gateway's own one they are no answer to the client, who
cannot mend it, and nothing was done."""
MAX_REFUSALS = 8
"""Endpoints that may refuse a request until its client is refused, or another model or pool stands in."""


class AttemptProgress(enum.Enum):
    """How far an endpoint got with a request that failed there."""

    NOT_BEGUN = enum.auto()
    """The endpoint did not get the request, or is known not to have processed it."""
    REFUSED = enum.auto()
    """The endpoint has said that it takes no request now."""
    BEGUN = enum.auto()
    """The endpoint may have worked on the request."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries at other endpoints, for all requests of a gateway. Times are seconds of the budget's clock."""

    router: Router
    budget: RetryBudget = field(default_factory=RetryBudget)

    def claim(
        self, progress: AttemptProgress, incoming: IncomingRequest, request: PickRequest, now: float
    ) -> bool:
        """Decide whether the request is sent to another endpoint, or another model or pool takes its place.

        What no endpoint has begun is done once, so it takes nothing from the budget. Otherwise decision and
        spending are one step, so that all replies that arrive in one turn of the event loop share the budget.
        """
        if progress is AttemptProgress.REFUSED and not _infers(incoming):
            return False
        more = self._has_more(progress, request, now)
        if not more and self.router.next_step(request, now) is None:
            return False
        if progress is AttemptProgress.BEGUN and not self.claim_resend(incoming, request, now):
            return False
        if not more:
            self.router.fall_back(request, now)
        elif progress is AttemptProgress.REFUSED:
            request.refusals += 1
        return True

    def _has_more(self, progress: AttemptProgress, request: PickRequest, now: float) -> bool:
        """Whether the request may go to another endpoint for the same model."""
        if progress is AttemptProgress.REFUSED:
            allowed = request.refusals < MAX_REFUSALS
        else:
            most = min((each.upstream.max_attempts for each in request.tried), default=1)
            allowed = len(request.tried) - request.refusals < most
        return allowed and self.router.has_candidate(request, now)

    def claim_resend(self, incoming: IncomingRequest, request: PickRequest, now: float) -> bool:
        """Take one retry from the budget if the request only reads, or is for vectors and was not begun
        before, so that it may be sent again although an endpoint may have begun it."""
        again = incoming.path in VECTOR_APIS and incoming.method == "POST" and not request.begun
        if not ((again or is_safe(incoming)) and self.budget.allows(now)):
            return False
        request.begun = True
        self.budget.spend(now)
        return True


def is_safe(incoming: IncomingRequest) -> bool:
    return incoming.method in SAFE_METHODS


def _infers(incoming: IncomingRequest) -> bool:
    """Whether a server that refuses the request has certainly kept nothing of it."""
    return is_safe(incoming) or (incoming.method == "POST" and not incoming.path.startswith(_KEPT))


def progress_of(status: int, headers: Headers) -> AttemptProgress | None:
    """How far the endpoint got with a request that it has answered so; None: the answer is the client's."""
    if status in REFUSALS:
        return AttemptProgress.BEGUN if BEGUN in headers else AttemptProgress.REFUSED
    return AttemptProgress.BEGUN if status == BAD_GATEWAY else None


# -- once more to the same endpoint


def refused_with_usage(status: int | None, *, with_usage: bool, relayed: bool) -> bool:
    """Whether to send the request without ``include_usage``: the 400 may be due to that addition of ours."""
    return with_usage and status == 400 and not relayed
