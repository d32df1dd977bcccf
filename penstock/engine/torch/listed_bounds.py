"""Upper bounds, on the host, of numbers that only the device knows exactly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.torch.transfer import HostCopy

Slots = NDArray[np.intp]

REFRESHED_FROM = 64
"""Bounds below twice this are not refreshed: reading so many columns takes no longer than reading few."""


class ListedBounds:
    """At most how many distinct tokens each slot's history has.

    A bound grows with every token. Whenever it has doubled, the exact number is copied from the device; the
    copy is read in a later step, once it has arrived, so that no step waits for the device.
    """

    def __init__(self, slots: int, most_useful: int) -> None:
        """Exact numbers above ``most_useful`` are not refreshed any more."""
        self.most = np.zeros(slots, np.int64)
        self._exact = np.zeros(slots, np.int64)
        """As of the last refresh."""
        self._grown = np.zeros(slots, np.int64)
        """Since the copy that is under way was made."""
        self._is_asked = np.zeros(slots, np.bool_)
        self._most_useful = most_useful
        self._copy: tuple[Slots, HostCopy] | None = None

    def restart(self, slot: int, exact: int) -> None:
        """The slot has been counted anew."""
        self.most[slot] = self._exact[slot] = exact
        self._is_asked[slot] = False

    def grow(self, slots: Slots, tokens: NDArray[np.int32]) -> None:
        self.most[slots] += tokens
        self._grown[slots] += tokens

    def refresh(self, slots: Slots, read: Callable[[Slots], Tensor]) -> None:
        """Have the numbers of ``slots`` copied whose bounds have doubled; ``read`` gives them, int64[n], on
        the device."""
        self._take()
        exact = self._exact[slots]
        due = self.most[slots] >= 2 * np.maximum(exact, REFRESHED_FROM)
        due &= exact <= self._most_useful
        if self._copy is None and np.count_nonzero(due):
            asked = slots[due]
            self._copy = asked, HostCopy(read(asked))
            self._is_asked[asked] = True
            self._grown[asked] = 0
            self._take()

    def _take(self) -> None:
        """Read the copy, if it has arrived."""
        if self._copy is None or not self._copy[1].has_arrived():
            return
        slots, copy = self._copy
        self._copy = None
        current = self._is_asked[slots]
        slots, exact = slots[current], copy.read()[current]
        self._is_asked[slots] = False
        self._exact[slots] = exact
        self.most[slots] = exact + self._grown[slots]
