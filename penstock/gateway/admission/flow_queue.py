"""The order of waiting requests: by priority, then by fair shares, then by arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.gateway.admission.fair_shares import FairShares
from penstock.http.request import ClientGone


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits for a place. Compared by identity."""

    flow: str
    """Who shares fairly: the name of a key, or the value of a header."""
    weight: float
    priority: int
    """Priority band of the request; higher ones go first."""
    tokens: float
    """Estimated tokens, prompt and reply."""
    size: int
    """Bytes that are held for it."""
    arrived_at: float
    deadline: float
    granted: asyncio.Future[None]
    """Done when it may be sent; an exception when it may not."""
    expected: float = 0.0
    """Tokens with which its flow was charged."""

    def leave(self, gone: asyncio.Future[None]) -> None:
        """Its client has gone."""
        if not self.granted.done():
            self.granted.set_exception(ClientGone())


@dataclass(slots=True, eq=False)
class FlowQueue:
    """The waiters for one set of endpoints. Every dict is in order of arrival."""

    _shares: FairShares
    _bands: dict[int, dict[str, dict[Waiter, None]]] = field(default_factory=dict)
    """Waiters by priority and flow; none of them is empty."""
    _all: dict[Waiter, None] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Waiter]:
        """All, the oldest first."""
        return iter(self._all)

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self._all

    @property
    def bottom(self) -> int:
        """The lowest priority; there are waiters."""
        return min(self._bands)

    def waiting_before(self, priority: int) -> int:
        """Waiters that go before a further one of this priority."""
        return sum(
            len(flow) for band, flows in self._bands.items() if band >= priority for flow in flows.values()
        )

    def add(self, waiter: Waiter) -> None:
        self._all[waiter] = None
        self._shares.wait(waiter.flow)
        self._bands.setdefault(waiter.priority, {}).setdefault(waiter.flow, {})[waiter] = None

    def remove(self, waiter: Waiter) -> None:
        del self._all[waiter]
        self._shares.wait_no_more(waiter.flow)
        flows = self._bands[waiter.priority]
        del flows[waiter.flow][waiter]
        if not flows[waiter.flow]:
            del flows[waiter.flow]
        if not flows:
            del self._bands[waiter.priority]

    def restore(self, waiter: Waiter) -> None:
        """Undo the removal of the newest of a flow."""
        self.add(waiter)
        self._all = dict.fromkeys(sorted(self._all, key=lambda each: each.arrived_at))

    def next(self) -> Waiter:
        """The first one of its order; there are waiters."""
        flows = self._bands[max(self._bands)]
        return next(iter(flows[min(flows, key=self._shares.start_of)]))

    def rank(self, waiter: Waiter) -> tuple[int, float, float]:
        """The smallest goes first, among the first ones of several queues."""
        return -waiter.priority, self._shares.start_of(waiter.flow), waiter.arrived_at

    @property
    def oldest(self) -> Waiter:
        """The one that has waited longest; there are waiters."""
        return next(iter(self._all))

    def longest_flow(self, priority: int) -> tuple[int, Waiter]:
        """How many wait of the flow with the most waiters of this priority, which there is, and the newest of
        them."""
        flow = max(self._bands[priority].values(), key=len)
        return len(flow), next(reversed(flow))

    def waiting_of(self, priority: int, flow: str) -> int:
        return len(self._bands.get(priority, {}).get(flow, ()))

    def late(self, now: float) -> list[Waiter]:
        """Waiters whose deadline has passed."""
        return [waiter for waiter in self._all if waiter.deadline <= now]
