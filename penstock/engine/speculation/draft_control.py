"""How many draft tokens a step verifies for each stream, from acceptance and load.

A draft token costs the step the time of one more token, and yields a token if it and those before it are
accepted. So it is worth verifying while the chance of that is higher than what its time yields otherwise:

    acceptance ** k  >  seconds per token of a step  x  tokens per second of the engine

The right side rises with the load: near 0 for one stream whose steps have a fixed cost, near 1 when the
processor is busy with tokens alone. Acceptance is estimated for each stream, the two times for the engine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I32

Slots = NDArray[np.intp]

MOST_AUTO = 16
"""Draft tokens of a stream and step with ``--speculative-tokens auto``."""
PRIOR_ACCEPTED, PRIOR_REJECTED = 1.0, 1.0
"""What a new stream is taken to have seen: accepted and rejected draft tokens."""
MEMORY = 0.85
"""Factor of what is remembered, for each draft that is verified."""
RECOVERY = 1 / 256
"""Part by which a stream returns to the prior at each step: one without drafts tries again some time."""
STEP_MEMORY = 0.99
"""Factor of what is remembered of steps, for each decode step."""
PRIOR_SHARE = 0.5
"""Part of a step's time that is taken to be proportional to its tokens, before steps of different sizes show
what it is."""
PRIOR_WEIGHT = 0.002
"""Weight of what earlier steps have shown, against the squared relative differences between the sizes of
steps: with steps of one size it stays."""
FORGETTING = 1 / 4096
"""Part by which that returns to PRIOR_SHARE at each step: contexts grow, and other streams come."""
MOST_SLOWER = 2.0
"""A step counts as at most this multiple of what is expected: what takes longer comes from outside."""


class DraftControl:
    """The most draft tokens per slot. ``tokens`` None: chosen as above; otherwise always that many."""

    def __init__(self, slots: int, tokens: int | None) -> None:
        self.most = MOST_AUTO if tokens is None else tokens
        self._fixed = tokens is not None
        self._accepted = np.full(slots, PRIOR_ACCEPTED)
        self._rejected = np.full(slots, PRIOR_REJECTED)
        self._costs = _StepTimes()

    def begin(self, slot: int) -> None:
        self._accepted[slot], self._rejected[slot] = PRIOR_ACCEPTED, PRIOR_REJECTED

    def limits(self, slots: Slots) -> I32:
        """int32[n]: the most draft tokens that the next step should verify for each slot."""
        if self._fixed:
            return np.full(len(slots), self.most, np.int32)
        self._accepted[slots] += RECOVERY * (PRIOR_ACCEPTED - self._accepted[slots])
        self._rejected[slots] += RECOVERY * (PRIOR_REJECTED - self._rejected[slots])
        threshold = self._costs.threshold()
        if threshold >= 1:
            return np.zeros(len(slots), np.int32)
        accepted = self._accepted[slots]
        chance = np.clip(accepted / (accepted + self._rejected[slots]), 1e-3, 0.999)
        worth = np.log(max(threshold, 1e-6)) / np.log(chance)
        limits: I32 = np.minimum(worth, self.most).astype(np.int32)
        return limits

    def on_verified(self, slots: Slots, drafted: I32, accepted: I32) -> None:
        """A step has verified ``drafted`` tokens of each slot, 0 of some, and accepted the first ``accepted``
        of them."""
        if self._fixed:
            return
        tried = drafted > 0
        some = slots[tried]
        self._accepted[some] = MEMORY * self._accepted[some] + accepted[tried]
        self._rejected[some] = MEMORY * self._rejected[some] + (accepted < drafted)[tried]

    def observe(self, seconds: float, tokens: int, generated: int) -> None:
        """A step without prompts took ``seconds`` for ``tokens`` tokens, and ``generated`` of them were
        sampled and kept."""
        if not self._fixed:
            self._costs.observe(seconds, tokens, generated)


class _StepTimes:
    """A line through the durations of steps over their tokens, by least squares; older steps count less."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = self._seconds = self._generated = 0.0
        """Weighted means."""
        self._variance = self._covariance = 0.0
        self._share = PRIOR_SHARE
        """Part of a step's time that is proportional to its tokens."""

    def observe(self, seconds: float, tokens: int, generated: int) -> None:
        if self._weight:
            slope = self._share * self._seconds / self._tokens
            seconds = min(seconds, MOST_SLOWER * (self._seconds + slope * (tokens - self._tokens)))
        self._weight = STEP_MEMORY * self._weight + 1
        share = 1 / self._weight
        off_tokens, off_seconds = tokens - self._tokens, seconds - self._seconds
        self._tokens += share * off_tokens
        self._seconds += share * off_seconds
        self._generated += share * (generated - self._generated)
        kept = 1 - share
        self._variance = kept * (self._variance + share * off_tokens * off_tokens)
        self._covariance = kept * (self._covariance + share * off_tokens * off_seconds)
        self._update_share()

    def _update_share(self) -> None:
        if not self._seconds:
            return
        self._share += FORGETTING * (PRIOR_SHARE - self._share)
        prior = PRIOR_WEIGHT * self._tokens * self._tokens
        known = self._covariance * self._tokens / self._seconds  # the share, times the variance
        self._share = min(max((known + prior * self._share) / (self._variance + prior), 0.0), 1.0)

    def threshold(self) -> float:
        """Seconds per token of a step, times tokens that are generated per second."""
        return self._share * self._generated / self._tokens if self._tokens else PRIOR_SHARE
