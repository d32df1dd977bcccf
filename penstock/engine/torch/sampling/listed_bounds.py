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
        self._refreshed_at = np.zeros(slots, np.int64)
        """Bounds from which on the exact number is asked for."""
        self._is_asked = np.zeros(slots, np.bool_)
        self._most_useful = most_useful
        self._copy: tuple[Slots, NDArray[np.int64], HostCopy] | None = None
        """Slots, their bounds when the copy was made, and the copy."""

    def restart(self, slot: int, exact: int) -> None:
        """The slot has been counted anew."""
        self.most[slot] = exact
        self._is_asked[slot] = False
        self._set_refresh(np.array([slot]), np.array([exact]))

    def grow(self, slots: Slots, tokens: NDArray[np.int32]) -> None:
        self.most[slots] += tokens

    def refresh(self, slots: Slots, read: Callable[[Slots], Tensor]) -> None:
        """Have the numbers of ``slots`` copied whose bounds have doubled; ``read`` gives them, int64[n], on
        the device."""
        if self._copy is not None:
            self._take()
        due = self.most[slots] >= self._refreshed_at[slots]
        if self._copy is None and np.count_nonzero(due):
            asked = slots[due]
            self._copy = asked, self.most[asked], HostCopy(read(asked))
            self._is_asked[asked] = True
            self._take()

    def _take(self) -> None:
        """Read the copy, if it has arrived."""
        assert self._copy is not None
        slots, bounds, copy = self._copy
        if not copy.has_arrived():
            return
        self._copy = None
        current = self._is_asked[slots]
        slots, exact = slots[current], copy.read()[current]
        self._is_asked[slots] = False
        self.most[slots] -= bounds[current] - exact
        self._set_refresh(slots, exact)

    def _set_refresh(self, slots: Slots, exact: NDArray[np.int64]) -> None:
        doubled = 2 * np.maximum(exact, REFRESHED_FROM)
        self._refreshed_at[slots] = np.where(exact <= self._most_useful, doubled, np.iinfo(np.int64).max)
