"""Fair shares of tokens: how much each flow has been served, by weight.

This is weighted fair queueing with tokens as the unit, as the virtual token counter of Sheng et al.,
"Fairness in Serving Large Language Models" (OSDI 2024): a request is charged with an estimate when it is
sent, and with its real tokens instead when it has ended. A flow that has not waited starts where the others
are, so that nobody saves up a share.

Estimates may be many times too high: then whoever has a request that runs would always be the last, whatever
its weight. So they are corrected by what those of the flow were wrong before, and what flows start from is
what has been settled.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

MAX_FLOWS = 1 << 14
"""Flows remembered; the least recently used one that does not wait is forgotten, and starts like one that was
idle."""


DECAY = 0.8
"""Weight of what was before, with each request that ends."""
MIN_RATIO = 0.01
"""Minimum ratio of real tokens to estimated ones."""


@dataclass(slots=True)
class _Ratio:
    """Real tokens per estimated one, of the latest requests."""

    real: float = 0.0
    estimated: float = 0.0

    def learn(self, real: float, estimated: float) -> None:
        self.real = DECAY * self.real + real
        self.estimated = DECAY * self.estimated + estimated

    @property
    def value(self) -> float | None:
        """None: nothing has ended."""
        return max(self.real / self.estimated, MIN_RATIO) if self.estimated else None


@dataclass(slots=True)
class _Flow:
    """Tokens are divided by the weight."""

    served: float = 0.0
    """Tokens of its requests, what is expected of those that run."""
    expected: float = 0.0
    """Tokens that are expected of the requests that run, which are part of ``served``."""
    ratio: _Ratio = field(default_factory=_Ratio)
    waiting: int = 0
    """Requests of the flow that wait."""

    @property
    def settled(self) -> float:
        return self.served - self.expected


class FairShares:
    """Virtual time of flows: tokens served, divided by the flow's weight."""

    def __init__(self, most_flows: int = MAX_FLOWS) -> None:
        self._most_flows = most_flows
        self._flows: OrderedDict[str, _Flow] = OrderedDict()
        self._waiting: dict[str, _Flow] = {}
        self._now = 0.0
        """Where flows start when nobody waits."""
        self._ratio = _Ratio()
        """Ratio of all flows."""
        self.untold: dict[str, float] | None = None
        """Tokens served, divided by weight, of which other gateways were not told; below 0 if they were told
        of too many. None: there are no others."""

    def start_of(self, flow: str) -> float:
        """Virtual time at which the next request of a flow that waits may begin: the smallest is first."""
        return self._flows[flow].served

    def wait(self, flow: str) -> None:
        """A request of ``flow`` waits from now on."""
        found = self._enter(flow)
        found.waiting += 1
        self._waiting[flow] = found

    def wait_no_more(self, flow: str) -> None:
        """Count a request less that waits, whether it has its turn or has gone."""
        found = self._flows[flow]
        found.waiting -= 1
        if not found.waiting:
            del self._waiting[flow]
            self._now = found.settled

    def begin(self, flow: str, tokens: float, weight: float) -> float:
        """A request of ``flow`` is sent, whose tokens are estimated. Returns what is expected instead."""
        found = self._enter(flow)
        if not self._waiting:
            self._now = found.settled
        expected = tokens * (found.ratio.value or self._ratio.value or 1.0)
        found.served += expected / weight
        found.expected += expected / weight
        self._count(flow, expected / weight)
        return expected

    def end(self, flow: str, expected: float, tokens: float, weight: float, estimated: float = 0.0) -> None:
        """A request of which so many tokens were expected has ended with ``tokens``; ``estimated``: what
        :meth:`begin` got, 0 if nothing is to be learned of it."""
        if estimated:
            self._ratio.learn(tokens, estimated)
        self._count(flow, (tokens - expected) / weight)
        if (found := self._flows.get(flow)) is not None:
            found.served += (tokens - expected) / weight
            found.expected = max(0.0, found.expected - expected / weight)
            if estimated:
                found.ratio.learn(tokens, estimated)

    # -- other gateways

    def _count(self, flow: str, served: float) -> None:
        if self.untold is not None and (flow in self.untold or len(self.untold) < self._most_flows):
            self.untold[flow] = self.untold.get(flow, 0.0) + served

    def take_untold(self, most: int) -> dict[str, float]:
        """What others are to be told, of at most so many flows, those with the most; the rest waits."""
        if not self.untold:
            return {}
        told = {flow: served for flow, served in self.untold.items() if served > 0.0}
        if len(told) > most:
            told = dict(sorted(told.items(), key=lambda each: -each[1])[:most])
        self.untold = {
            flow: served
            for flow, served in self.untold.items()
            if served and flow not in told and flow in self._flows
        }
        return told

    def waiting_flows(self, most: int) -> list[str]:
        """Flows that wait, at most so many."""
        return list(islice(self._waiting, most))

    def add_elsewhere(self, flow: str, served: float) -> None:
        """Other gateways have served a flow, which may wait here, so many tokens, divided by its weight."""
        if (found := self._waiting.get(flow)) is not None:
            found.served += served

    def _enter(self, flow: str) -> _Flow:
        """The flow; one that does not wait starts where those are that do."""
        found = self._flows.get(flow)
        if found is None:
            found = self._flows[flow] = _Flow()
        self._flows.move_to_end(flow)
        if not found.waiting:
            now = min((each.settled for each in self._waiting.values()), default=self._now)
            found.served = max(found.served, now + found.expected)
        if len(self._flows) > self._most_flows:
            oldest = next((name for name, each in self._flows.items() if not each.waiting), flow)
            if oldest != flow:
                del self._flows[oldest]
        return found
