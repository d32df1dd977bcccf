"""The budgets of clients: reserved when a request is admitted, settled when it has ended."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.gateway.admission.budget_store import (
    BudgetStore,
    BudgetStoreError,
    Charge,
    MemoryBudgetStore,
    Reservation,
)
from penstock.gateway.requests.caller import Caller
from penstock.http.admission import retry_headers, unavailable
from penstock.http.errors import ApiError
from penstock.logging_setup import RateLimitedLog

log = logging.getLogger(__name__)
_log_outage = RateLimitedLog(log)

OUTAGE_S = 1.0
"""Time for which a store that did not answer is not asked again, so that requests do not wait for it."""
CONCURRENCY_RETRY_S = 1.0
"""Retry-After of a client with too many requests at a time: when one of them ends is unknown."""


@dataclass(slots=True)
class Reserved:
    """What a request has reserved."""

    caller: Caller
    request: str
    charges: Sequence[Charge]
    debts_s: Sequence[float]
    store: BudgetStore
    """Where it is reserved."""
    settled: bool = False


@dataclass(slots=True)
class Budgets:
    """The budgets of all clients. ``outage``: when the store does not answer, this process counts by itself
    (``local``), or requests get 503 (``refuse``). By itself it starts from what the store told last, and from
    its own requests, which it counts at all times; for a client of which it was told nothing, from ``share``
    of each budget: others may have granted the rest. ``clock`` gives seconds."""

    store: BudgetStore
    clock: Callable[[], float]
    outage: Literal["local", "refuse"] = "local"
    share: float = 1.0
    """This process's share among those of a gateway."""
    _local: MemoryBudgetStore = field(init=False)
    _absent_until: float = -math.inf

    def __post_init__(self) -> None:
        self._local = MemoryBudgetStore(self.clock)

    async def reserve(self, caller: Caller, *, input_tokens: int, output_tokens: int) -> Reserved:
        """Reserve what a request is estimated to need. Raises ApiError."""
        request = secrets.token_hex(8)
        charges = _charges(caller, 1, input_tokens, output_tokens)
        store, reservation = await self._reserve(caller, request, charges)
        if not reservation.granted:
            raise _exceeded(caller, charges, reservation)
        return Reserved(caller, request, charges, reservation.debts_s, store)

    def settle(self, reserved: Reserved, *, requests: int, input_tokens: int, output_tokens: int) -> None:
        """A request has ended and has used this, which is ``requests=0`` if nothing was sent. Once."""
        if reserved.settled:
            return
        reserved.settled = True
        used = _charges(reserved.caller, requests, input_tokens, output_tokens)
        rest = [
            Charge(now.budget, now.amount - before.amount)
            for now, before in zip(used, reserved.charges, strict=True)
            if now.amount != before.amount
        ]
        counted = reserved.caller.most_concurrent is not None
        if rest or counted:
            reserved.store.settle(reserved.caller.id, reserved.request, rest, counted=counted)
            if reserved.store is not self._local:
                self._local.settle(reserved.caller.id, reserved.request, rest, counted=counted)

    async def close(self) -> None:
        await self.store.close()

    async def _reserve(
        self, caller: Caller, request: str, charges: Sequence[Charge]
    ) -> tuple[BudgetStore, Reservation]:
        """Reserve in the store, or while it does not answer as ``outage`` says. Raises ApiError."""
        if self.clock() >= self._absent_until:
            try:
                found = await self.store.reserve(caller.id, request, charges, caller.most_concurrent)
                self._note(caller, request, charges, found)
                return self.store, found
            except BudgetStoreError as error:
                self._absent_until = self.clock() + OUTAGE_S
                _log_outage("outage", "the budget store does not answer: %s", error)
        if self.outage == "refuse":
            raise unavailable("The gateway cannot check the budgets of its clients.", "budget_store")
        self._local.begin(caller.id, charges, self.share)
        found = self._local.reserve_now(caller.id, request, charges, caller.most_concurrent)
        return self._local, found

    def _note(self, caller: Caller, request: str, charges: Sequence[Charge], found: Reservation) -> None:
        """What this process would go on with if the store did not answer any more."""
        if found.too_many:
            return
        if not found.granted:
            charges, request = [Charge(each.budget, 0) for each in charges], ""
        counted = found.granted and caller.most_concurrent is not None
        self._local.granted_elsewhere(caller.id, request, charges, found.debts_s, counted=counted)


def _charges(caller: Caller, requests: int, input_tokens: int, output_tokens: int) -> list[Charge]:
    amounts = {
        "requests": requests,
        "tokens": input_tokens + output_tokens,
        "input-tokens": input_tokens,
        "output-tokens": output_tokens,
    }
    return [Charge(budget, amounts[budget.unit]) for budget in caller.budgets]


def _exceeded(caller: Caller, charges: Sequence[Charge], reservation: Reservation) -> ApiError:
    wait_s = CONCURRENCY_RETRY_S
    if reservation.exceeded is None:
        what = f"{caller.most_concurrent} concurrent-requests"
    else:
        budget = charges[reservation.exceeded].budget
        what, wait_s = f"{budget.amount} {budget.name}", reservation.wait_s
    return ApiError(
        429,
        f"Rate limit reached for the key {caller.name!r}: {what}. Try again in {duration(wait_s)}.",
        code="rate_limit_exceeded",
        headers=[
            *retry_headers(max(1, math.ceil(1000 * wait_s))),
            *rate_limit_headers(charges, reservation.debts_s),
        ],
    )


def rate_limit_headers(charges: Sequence[Charge], debts_s: Sequence[float]) -> list[tuple[bytes, bytes]]:
    """``x-ratelimit-*`` as OpenAI sends them: of each unit the budget of which least is left."""
    left: dict[str, tuple[int, Charge, float]] = {}
    for charge, debt_s in zip(charges, debts_s, strict=False):
        budget = charge.budget
        remaining = max(0, int(budget.amount * (1.0 - debt_s / budget.period_s)))
        if budget.unit not in left or remaining < left[budget.unit][0]:
            left[budget.unit] = remaining, charge, debt_s
    headers = []
    for unit, (remaining, charge, debt_s) in left.items():
        for name, value in (
            ("limit", str(charge.budget.amount)),
            ("remaining", str(remaining)),
            ("reset", duration(debt_s)),
        ):
            headers.append((f"x-ratelimit-{name}-{unit}".encode(), value.encode()))
    return headers


def duration(seconds: float) -> str:
    """As OpenAI writes it, and Go: ``12ms``, ``1.5s``, ``6m0s``, ``1h0m5s``."""
    if seconds < 1:
        return f"{math.ceil(1000 * max(seconds, 0.0))}ms"
    if seconds < 60:
        return f"{math.ceil(1000 * seconds) / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
