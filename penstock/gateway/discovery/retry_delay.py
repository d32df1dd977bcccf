"""Delays between tries that fail: they double, at random, so that many clients do not return together."""

from __future__ import annotations

import random

FIRST_S = 0.5
MAX_S = 30.0


class RetryDelay:
    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._failures = 0

    def next(self) -> float:
        """Seconds until the next try, after another failure."""
        delay = min(MAX_S, FIRST_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return delay * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """A try succeeded."""
        self._failures = 0
