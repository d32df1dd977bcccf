"""Where the state of budgets is kept: the interface, and the store in this process.

A budget is a bucket that refills continuously. Its state is one number, the time at which it will be full
again (the generic cell rate algorithm): each unit moves that time by period / amount. What a request needs at
most is the whole bucket, and what it is charged may be more, as the charge is an estimate: the bucket is in
debt then, and refills before it grants anything. The debt is one period at most, so that neither one wrong
count of tokens nor a clock that is set back shuts a client out for longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from penstock.gateway.requests.caller import Budget

MAX_DEBT = 2
"""Periods until a budget is full again, at most: one of debt, and one to refill."""
LOOKS = 20
"""Times that an answer is looked for before its time is over."""


class Charge(NamedTuple):
    """An amount of a budget that a request takes; negative: gives back."""

    budget: Budget
    amount: int

    @property
    def seconds(self) -> float:
        """Time in which the budget refills by this amount."""
        return self.amount * self.budget.period_s / self.budget.amount

    def bounded(self, debt_s: float) -> float:
        """The time until the budget is full, at least 0 and at most :data:`MAX_DEBT` periods."""
        return min(max(debt_s, 0.0), MAX_DEBT * self.budget.period_s)

    def missing_s(self, debt_s: float) -> float:
        """Time until the budget, which is full in ``debt_s``, has the amount; 0 or less: it has."""
        need = min(self.amount, self.budget.amount) * self.budget.period_s / self.budget.amount
        return debt_s + need - self.budget.period_s


@dataclass(frozen=True, slots=True)
class Reservation:
    """The answer of a store."""

    debts_s: Sequence[float] = ()
    """For each charge the time until its budget is full again."""
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


class MemoryBudgetStore:
    """The state in this process. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._full_at: dict[tuple[str, str], float] = {}
        """When budgets are full again, by client and name of the budget."""
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
        debts = [self._debt_s(client, charge, now) for charge in charges]
        missing = [charge.missing_s(debt) for charge, debt in zip(charges, debts, strict=True)]
        if missing and max(missing) > 0:
            worst = missing.index(max(missing))
            return Reservation(debts, worst, wait_s=missing[worst])
        for row, charge in enumerate(charges):
            debts[row] = charge.bounded(debts[row] + charge.seconds)
            self._full_at[client, charge.budget.name] = now + debts[row]
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
            debt_s = charge.bounded(self._debt_s(client, charge, now) + charge.seconds)
            self._full_at[client, charge.budget.name] = now + debt_s

    def begin(self, client: str, charges: Sequence[Charge], share: float) -> None:
        """Of budgets of which nothing is known only ``share`` is left."""
        now = self._clock()
        for budget, _ in charges:
            self._full_at.setdefault((client, budget.name), now + (1.0 - share) * budget.period_s)

    def granted_elsewhere(
        self,
        client: str,
        request: str,
        charges: Sequence[Charge],
        debts_s: Sequence[float],
        *,
        counted: bool,
    ) -> None:
        """Another store has granted a request; ``debts_s`` are those that it told."""
        now = self._clock()
        for charge, told_s in zip(charges, debts_s, strict=True):
            debt_s = max(self._debt_s(client, charge, now) + charge.seconds, told_s)
            self._full_at[client, charge.budget.name] = now + charge.bounded(debt_s)
        if counted:
            self._running.setdefault(client, set()).add(request)

    async def close(self) -> None:
        """Nothing outlives the process."""

    def _debt_s(self, client: str, charge: Charge, now: float) -> float:
        return charge.bounded(self._full_at.get((client, charge.budget.name), now) - now)

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
