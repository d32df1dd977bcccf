"""Fair shares over several gateways, and all their workers: each tells a store what its flows were served,
and adds what others have served to those that wait.

What is told only grows, so a count in the store that is smaller than before began anew. Nothing waits for the
store; while it does not answer, shares are those of this process alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from penstock.gateway.admission.budget_store import BudgetStoreError
from penstock.gateway.admission.fair_shares import FairShares
from penstock.logging_setup import RateLimitedLog

log = logging.getLogger(__name__)
_log_outage = RateLimitedLog(log)

INTERVAL_S = 0.5
MAX_FLOWS_TOLD = 1024
"""Flows that are told of at once, those with the most tokens, and that are asked for."""
FORGET_S = 60.0
"""Time after which the store forgets a flow that nobody has served."""


@runtime_checkable
class ShareStore(Protocol):
    """Keeps how many tokens each flow was served by all processes, divided by its weight."""

    async def count_served(
        self, served: Mapping[str, float], asked: Iterable[str], forget_s: float
    ) -> Sequence[float]:
        """Add what was ``served``; returns the sums of the flows that are ``asked`` for, 0 for those that
        nobody was served of for ``forget_s``. Raises BudgetStoreError."""
        ...


class SharedShares:
    """One process's part."""

    def __init__(self, shares: FairShares, store: ShareStore) -> None:
        shares.untold = {}
        self._shares = shares
        self._store = store
        self._seen: dict[str, float] = {}
        """The sums of the flows that waited at the last exchange."""

    async def run(self) -> None:
        """Exchange from time to time, as long as anything is to be told or asked."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.exchange()

    async def exchange(self) -> None:
        served = self._shares.take_untold(MAX_FLOWS_TOLD)
        asked = self._shares.waiting_flows(MAX_FLOWS_TOLD)
        if not (served or asked):
            self._seen.clear()
            return
        try:
            sums = await self._store.count_served(served, asked, FORGET_S)
        except BudgetStoreError as error:
            _log_outage("outage", "fair shares are those of this worker alone: --budget-store: %s", error)
            self._seen.clear()
            return
        seen, self._seen = self._seen, dict(zip(asked, sums, strict=True))
        for flow, total in self._seen.items():
            if (before := seen.get(flow)) is not None:
                before = before if before <= total else 0.0
                self._shares.add_elsewhere(flow, max(0.0, total - before - served.get(flow, 0.0)))
