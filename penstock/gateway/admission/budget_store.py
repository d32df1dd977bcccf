"""Where the state of budgets is kept: the interface, and the store in this process.

A budget is a bucket that refills continuously. Its state is one number, the time at which it will be full
again (the generic cell rate algorithm): each unit moves that time by period / amount. What a request needs at
most is the whole bucket, and what it is charged may be more, as the charge is an estimate: the bucket is in
debt then, and refills before it grants anything. The debt is one period at most, so that neither one wrong
count of tokens nor a clock that is set back shuts a client out for longer.

What a calendar month's budget keeps is the sum of what is charged to that month, a whole number. A request is
charged to the month in which it was admitted.

Answers tell the debt of a budget: seconds until it is full, or what is used of a month's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.gateway.requests.caller import Budget

MAX_DEBT = 2
"""Periods until a budget is full again, at most: one of debt, and one to refill."""
MONTHS = 2
"""Calendar months of which is known what is used: requests that were admitted in the last one still end."""
LOOKS = 20
"""Times that an answer is looked for before its time is over."""


BudgetKey = tuple[str, str]
"""Owner and name of a budget."""


class Charge(NamedTuple):
    """An amount of a budget that a request takes; negative: gives back."""

    budget: Budget
    amount: int
    month: str = ""
    """For a month's budget: which one, as ``2026-12``."""

    def owner(self, client: str) -> str:
        """Under whose name the state is kept."""
        return self.budget.owner or client

    def added_to(self, debt: float) -> float:
        """The debt after this charge."""
        if self.month:
            return max(0, debt + self.amount)
        return self.bounded(debt + self.amount * self.budget.period_s / self.budget.amount)

    def bounded(self, debt: float) -> float:
        """The debt, at least 0, and of a bucket at most :data:`MAX_DEBT` periods."""
        return max(debt, 0) if self.month else min(max(debt, 0.0), MAX_DEBT * self.budget.period_s)

    def missing_s(self, debt: float) -> float:
        """Time until the budget has the amount; 0 or less: it has. Of a month's nobody here knows when it
        ends: infinity."""
        need = min(self.amount, self.budget.amount)
        if self.month:
            return math.inf if debt + need > self.budget.amount else 0.0
        return debt + need * self.budget.period_s / self.budget.amount - self.budget.period_s


@dataclass(frozen=True, slots=True)
class Reservation:
    """The answer of a store."""

    debts: Sequence[float] = ()
    """For each charge the debt of its budget."""
    exceeded: int | None = None
    """Index of the charge that its budget does not allow; None: all do."""
    too_many: bool = False
    """The client has as many requests at a time as it may."""
    wait_s: float = 0.0
    """Time until the charge that is exceeded would be allowed."""

    @property
    def granted(self) -> bool:
        return self.exceeded is None and not self.too_many


class BudgetStoreError(Exception):
    """The store does not answer."""


class BudgetStore(Protocol):
    """Keeps the state of budgets by the client's name."""

    async def reserve(
        self, client: str, request: str, charges: Sequence[Charge], most_concurrent: int | None
    ) -> Reservation:
        """Charge all ``charges``, or none of them. With a limit of concurrent requests ``request`` counts as
        one until :meth:`settle`. Raises BudgetStoreError."""

    def settle(self, client: str, request: str, charges: Sequence[Charge], *, counted: bool) -> None:
        """The request has ended: charge what differs from the estimates. ``counted``: as a concurrent one."""

    async def close(self) -> None:
        """Store what has not been stored yet."""


class SavedBudgets(msgspec.Struct):
    """The state of budgets in a file."""

    full_at: list[tuple[str, str, float]]
    """Owner and name of a budget, and the Unix time at which it is full."""
    used: list[tuple[str, str, str, int]]
    """Owner and name of a month's budget, the month, and what is used of it."""


class MemoryBudgetStore:
    """The state in this process. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.changes = 0
        """Counts the changes of debts."""
        self._clock = clock
        self._full_at: dict[BudgetKey, float] = {}
        """When budgets are full again."""
        self._used: dict[BudgetKey, dict[str, int]] = {}
        """What is used of a month's budget, by month, of the latest :data:`MONTHS`."""
        self._running: dict[str, set[str]] = {}
        """Requests by client, of those that have any."""

    async def reserve(
        self, client: str, request: str, charges: Sequence[Charge], most_concurrent: int | None
    ) -> Reservation:
        return self.reserve_now(client, request, charges, most_concurrent)

    def reserve_now(
        self, client: str, request: str, charges: Sequence[Charge], most_concurrent: int | None
    ) -> Reservation:
        """See :meth:`BudgetStore.reserve`."""
        now = self._clock()
        if most_concurrent is not None and len(self._running.get(client, ())) >= most_concurrent:
            return Reservation(too_many=True)
        debts = [self._debt(client, charge, now) for charge in charges]
        missing = [charge.missing_s(debt) for charge, debt in zip(charges, debts, strict=True)]
        if missing and max(missing) > 0:
            worst = missing.index(max(missing))
            return Reservation(debts, worst, wait_s=missing[worst])
        for row, charge in enumerate(charges):
            debts[row] = charge.added_to(debts[row])
            self._set_debt(client, charge, debts[row], now)
        if most_concurrent is not None:
            self._running.setdefault(client, set()).add(request)
        return Reservation(debts)

    def settle(self, client: str, request: str, charges: Sequence[Charge], *, counted: bool) -> None:
        now = self._clock()
        if counted and (running := self._running.get(client)) is not None:
            running.discard(request)
            if not running:
                del self._running[client]
        for charge in charges:
            self._set_debt(client, charge, charge.added_to(self._debt(client, charge, now)), now)

    def begin(self, client: str, charges: Sequence[Charge], share: float) -> None:
        """Of budgets of which nothing is known only ``share`` is left."""
        now = self._clock()
        for charge in charges:
            budget, key = charge.budget, (charge.owner(client), charge.budget.name)
            if charge.month:
                used = self._used.setdefault(key, {})
                used.setdefault(charge.month, int((1.0 - share) * budget.amount))
            else:
                self._full_at.setdefault(key, now + (1.0 - share) * budget.period_s)

    def granted_elsewhere(
        self,
        client: str,
        request: str,
        charges: Sequence[Charge],
        debts: Sequence[float],
        *,
        counted: bool,
    ) -> None:
        """Another store has granted a request; ``debts`` are those that it told."""
        now = self._clock()
        for charge, told in zip(charges, debts, strict=True):
            debt = max(charge.added_to(self._debt(client, charge, now)), charge.bounded(told))
            self._set_debt(client, charge, debt, now)
        if counted:
            self._running.setdefault(client, set()).add(request)

    async def close(self) -> None:
        """Nothing outlives the process."""

    def _debt(self, client: str, charge: Charge, now: float) -> float:
        key = charge.owner(client), charge.budget.name
        if charge.month:
            return self._used.get(key, {}).get(charge.month, 0)
        return charge.bounded(self._full_at.get(key, now) - now)

    def _set_debt(self, client: str, charge: Charge, debt: float, now: float) -> None:
        self.changes += 1
        key = charge.owner(client), charge.budget.name
        if not charge.month:
            self._full_at[key] = now + debt
            return
        used = self._used.setdefault(key, {})
        used[charge.month] = int(debt)
        if len(used) > MONTHS:
            del used[min(used)]

    def saved(self, wall: float) -> SavedBudgets:
        """The state at the Unix time ``wall``, but for requests that run."""
        ahead, now = wall - self._clock(), self._clock()
        return SavedBudgets(
            [(*key, full_at + ahead) for key, full_at in self._full_at.items() if full_at > now],
            [(*key, month, used) for key, months in self._used.items() for month, used in months.items()],
        )

    def restore(self, saved: SavedBudgets, wall: float) -> None:
        """Go on from there at the Unix time ``wall``."""
        ahead = wall - self._clock()
        for owner, name, full_at in saved.full_at:
            self._full_at[owner, name] = full_at - ahead
        for owner, name, month, used in saved.used:
            self._used.setdefault((owner, name), {})[month] = used

    def end_requests(self, prefix: str) -> None:
        """Requests whose names begin so do not run any more."""
        for client, running in list(self._running.items()):
            for request in [each for each in running if each.startswith(prefix)]:
                self.settle(client, request, (), counted=True)


async def is_answered(answer: asyncio.Future[Any], timeout_s: float) -> bool:
    """Whether ``answer`` comes within ``timeout_s``, of which this event loop has been there for
    :data:`LOOKS` parts: while a loop is late it sees no answer, though it may have arrived."""
    for _ in range(LOOKS):
        await asyncio.wait((answer,), timeout=timeout_s / LOOKS)
        if answer.done():
            return True
    return False
