"""Fair shares of tokens: how much each flow has been served, by weight.

This is weighted start-time fair queueing with tokens as the unit, as the virtual token counter of Sheng et
al., "Fairness in Serving Large Language Models" (OSDI 2024): a request is charged with an estimate when it is
sent, and with the difference to its real tokens when it has ended. A flow that was idle starts where the
others are, so that nobody saves up a share.
"""

from __future__ import annotations

from collections import OrderedDict

MOST_FLOWS = 1 << 14
"""Flows remembered; the least recently used one is forgotten, and starts like one that was idle."""


class FairShares:
    """Virtual time of flows: tokens served, divided by the flow's weight."""

    def __init__(self, most_flows: int = MOST_FLOWS) -> None:
        self._most_flows = most_flows
        self._served: OrderedDict[str, float] = OrderedDict()
        self._now = 0.0
        """Virtual time at which the latest request began."""

    def start_of(self, flow: str) -> float:
        """Virtual time at which the next request of ``flow`` may begin: the smallest is served first."""
        return max(self._now, self._served.get(flow, 0.0))

    def begin(self, flow: str, tokens: float, weight: float) -> None:
        """A request of ``flow`` is sent, whose tokens are estimated."""
        start = self.start_of(flow)
        self._now = max(self._now, start)
        self._served[flow] = start + tokens / weight
        self._served.move_to_end(flow)
        if len(self._served) > self._most_flows:
            self._served.popitem(last=False)

    def correct(self, flow: str, tokens: float, weight: float) -> None:
        """A request had so many tokens more than estimated; negative: fewer."""
        if (served := self._served.get(flow)) is not None:
            self._served[flow] = served + tokens / weight
