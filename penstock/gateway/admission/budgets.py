"""The budgets of clients: reserved when a request is admitted, settled when it has ended."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import count
from typing import Any, Literal

from penstock.gateway.admission.budget_store import (
    BudgetStore,
    BudgetStoreError,
    Charge,
    MemoryBudgetStore,
    Reservation,
)
from penstock.gateway.admission.budget_terms import owner_in_words
from penstock.gateway.billing.prices import as_decimal
from penstock.gateway.requests.caller import Budget, Caller
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
    debts: Sequence[float]
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
    wall: Callable[[], float] = time.time
    """Gives Unix times."""
    _local: MemoryBudgetStore = field(init=False)
    _absent_until: float = -math.inf
    _own: str = field(default_factory=lambda: secrets.token_hex(8))
    """With which the names of this process's requests begin."""
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self._local = MemoryBudgetStore(self.clock)

    async def reserve(
        self,
        caller: Caller,
        *,
        input_tokens: int,
        output_tokens: int,
        cost: int = 0,
        models: Sequence[str] = (),
    ) -> Reserved:
        """Reserve what a request for one of ``models`` is estimated to need. Raises ApiError."""
        request, month = f"{self._own}-{next(self._numbers)}", ""
        amounts = _amounts(1, input_tokens, output_tokens, cost)
        charges = []
        for budget in caller.budgets:
            if budget.holds_for(models):
                if budget.is_monthly:
                    month = month or month_of(self.wall())
                charges.append(Charge(budget, amounts[budget.unit], month if budget.is_monthly else ""))
        store, reservation = await self._reserve(caller, request, charges)
        if not reservation.granted:
            raise _exceeded(caller, charges, reservation, self.wall())
        return Reserved(caller, request, charges, reservation.debts, store)

    def settle(
        self, reserved: Reserved, *, requests: int, input_tokens: int, output_tokens: int, cost: int = 0
    ) -> None:
        """A request has ended and has used this, which is ``requests=0`` if nothing was sent. Once."""
        if reserved.settled:
            return
        reserved.settled = True
        used = _amounts(requests, input_tokens, output_tokens, cost)
        rest = [
            Charge(budget, used[budget.unit] - amount, month)
            for budget, amount, month in reserved.charges
            if used[budget.unit] != amount
        ]
        counted = reserved.caller.most_concurrent is not None
        if rest or counted:
            reserved.store.settle(reserved.caller.id, reserved.request, rest, counted=counted)
            if reserved.store is not self._local:
                self._local.settle(reserved.caller.id, reserved.request, rest, counted=counted)

    async def left(self, caller: Caller) -> list[dict[str, Any]] | None:
        """What is left of each budget of a client; nothing is taken. None: the store does not say."""
        now = month_of(self.wall())
        charges = [Charge(each, 0, now if each.is_monthly else "") for each in caller.budgets]
        if not charges:
            return []
        try:
            found = await self.store.reserve(caller.id, "", charges, None)
        except BudgetStoreError:
            return None
        return [
            {
                "budget": budget.name,
                "whose": owner_in_words(budget, caller.name),
                "amount": _written(budget, budget.amount),
                "left": _written(budget, budget.remaining(debt)),
            }
            for budget, debt in zip(caller.budgets, found.debts, strict=False)
        ]

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
            charges, request = [each._replace(amount=0) for each in charges], ""
        counted = found.granted and caller.most_concurrent is not None
        self._local.granted_elsewhere(caller.id, request, charges, found.debts, counted=counted)


def month_of(at: float) -> str:
    """The month of a Unix time, in UTC: ``2026-12``."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m")


def month_left_s(at: float) -> float:
    """Seconds from a Unix time to the end of its month, in UTC."""
    now = datetime.fromtimestamp(at, UTC)
    following = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
    return following.timestamp() - at


def _amounts(requests: int, input_tokens: int, output_tokens: int, cost: int) -> dict[str, int]:
    return {
        "requests": requests,
        "tokens": input_tokens + output_tokens,
        "input-tokens": input_tokens,
        "output-tokens": output_tokens,
        "cost": cost,
    }


def _exceeded(caller: Caller, charges: Sequence[Charge], reservation: Reservation, wall: float) -> ApiError:
    whose, wait_s = f"the key {caller.name!r}", CONCURRENCY_RETRY_S
    if reservation.exceeded is None:
        what = f"{caller.most_concurrent} concurrent-requests"
    else:
        budget = charges[reservation.exceeded].budget
        wait_s = month_left_s(wall) if budget.is_monthly else reservation.wait_s
        whose, what = owner_in_words(budget, caller.name), f"{_written(budget, budget.amount)} {budget.name}"
    return ApiError(
        429,
        f"Rate limit reached for {whose}: {what}. Try again in {duration(wait_s)}.",
        code="rate_limit_exceeded",
        headers=[
            *retry_headers(max(1, math.ceil(1000 * wait_s))),
            *rate_limit_headers(charges, reservation.debts, wall),
        ],
    )


def _written(budget: Budget, amount: int) -> str:
    return as_decimal(amount) if budget.unit == "cost" else str(amount)


def rate_limit_headers(
    charges: Sequence[Charge], debts: Sequence[float], wall: float
) -> list[tuple[bytes, bytes]]:
    """``x-ratelimit-*`` as OpenAI sends them: of each unit the budget of which least is left."""
    left: dict[str, tuple[int, Budget, float]] = {}
    for charge, debt in zip(charges, debts, strict=False):
        budget, remaining = charge.budget, charge.budget.remaining(debt)
        if budget.unit not in left or remaining < left[budget.unit][0]:
            left[budget.unit] = remaining, budget, debt
    headers = []
    for unit, (remaining, budget, debt) in left.items():
        limit, rest, reset = _header_names(unit)
        reset_s = month_left_s(wall) if budget.is_monthly else debt
        headers += [
            (limit, _written(budget, budget.amount).encode()),
            (rest, _written(budget, remaining).encode()),
            (reset, duration(reset_s).encode()),
        ]
    return headers


@lru_cache(maxsize=64)
def _header_names(unit: str) -> tuple[bytes, bytes, bytes]:
    """Of the limit, what remains and the reset."""
    limit, rest, reset = (f"x-ratelimit-{name}-{unit}".encode() for name in ("limit", "remaining", "reset"))
    return limit, rest, reset


def duration(seconds: float) -> str:
    """As OpenAI writes it, and Go: ``12ms``, ``1.5s``, ``6m0s``, ``1h0m5s``."""
    if seconds < 1:
        return f"{math.ceil(1000 * max(seconds, 0.0))}ms"
    if seconds < 60:
        return f"{math.ceil(1000 * seconds) / 1000:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
