"""Whether a request that failed at one endpoint is sent again."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.gateway.relay.retry_budget import RetryBudget
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.picker import Picker, PickRequest

RETRIABLE_STATUSES = frozenset({429, 502, 503})
"""Another endpoint may do better; 500 is the model server's own failure, which a retry repeats."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries at other endpoints, for all requests of a gateway. Times are seconds of the budget's clock."""

    pool: EndpointPool
    picker: Picker
    max_attempts: int = 3
    """Endpoints that one request is sent to."""
    budget: RetryBudget = field(default_factory=RetryBudget)

    def allows(self, request: PickRequest, now: float) -> bool:
        """Whether the request may be sent to another endpoint: attempts, budget and an endpoint are left."""
        return (
            len(request.tried) < self.max_attempts
            and self.budget.allows(now)
            and self.picker.has_candidate(request, self.pool.endpoints, now)
        )

    def claim(self, request: PickRequest, now: float) -> bool:
        """Take one retry from the budget if the request may have it. Decision and spending are one step,
        so that all replies that arrive in one turn of the event loop share the budget."""
        if not self.allows(request, now):
            return False
        self.budget.spend(now)
        return True

    def claim_resend(self, now: float) -> bool:
        """Take one retry from the budget for a request that its endpoint did not process. It is no attempt
        of its own: only the connection failed."""
        if not self.budget.allows(now):
            return False
        self.budget.spend(now)
        return True


# -- once more to the same endpoint


def refused_with_usage(status: int | None, *, with_usage: bool, relayed: bool) -> bool:
    """Whether to send the request without ``include_usage``: the 400 may be due to that addition of ours."""
    return with_usage and status == 400 and not relayed
