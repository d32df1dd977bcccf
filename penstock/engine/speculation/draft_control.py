"""How many draft tokens a step verifies for each stream, from acceptance and load.

A draft token costs the step the time of one more token, and yields a token if it and those before it are
accepted. So it is worth verifying while the chance of that is higher than what its time yields otherwise:

    acceptance ** k  >  seconds per token of a step  x  tokens per second of the engine

Beside that, a step with drafts takes a fixed time more, which all its drafts together must be worth.

The right side rises with the load: near 0 for one stream whose steps have a fixed cost, near 1 when the
processor is busy with tokens alone. Acceptance is estimated for each stream, the two times for the engine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I32

Slots = NDArray[np.intp]

MAX_AUTO = 16
"""Draft tokens of a stream and step with ``--speculative-tokens auto``."""
PRIOR_ACCEPTED, PRIOR_REJECTED = 1.0, 1.0
"""Accepted and rejected draft tokens that the first stream is taken to have seen. A later one is taken to
have seen as many in all, in the ratio of the streams before it."""
_PRIOR = np.array((PRIOR_ACCEPTED, PRIOR_REJECTED))
MEMORY = 0.85
"""Factor of what is remembered of a stream, for each draft that is verified."""
ENGINE_MEMORY = 0.95
"""Factor of what is remembered of all streams together, for each step with drafts."""
RECOVERY = 1 / 256
"""Part by which a stream returns to the prior at each step: one without drafts tries again some time."""
STEP_MEMORY = 0.99
"""Factor of what is remembered of the mean step, for each decode step."""
PRIOR_COSTS = np.array((0.5, 0.5, 0.1))
"""Parts of a mean step: what it always takes, what is proportional to its tokens, and what it takes more if
it has drafts at all. So it is expected until steps show it, and as long as all steps have one size."""
PRIOR_WEIGHT = 1.0
"""Steps that they weigh as much as, before and beside what is seen."""
KIND_MEMORY = 0.95
"""Factor of what is remembered of steps with drafts and of those without, for each step of the same kind."""
MAX_WEIGHT = 100.0
"""Maximum weight of a step that takes less than is expected: its weight is the square of how many
times less. What comes from outside only delays: the choice of a kernel, another process."""
MIN_CHANCE = 0.1
"""Draft tokens that are accepted less often are not verified, however little they seem to cost."""
NOISE = 0.02
"""Variance of a step's duration, as a part of the mean squared."""
TRY_SOON, TRY_LATE = 8, 64
"""Steps in a row that all have drafts, or have none, after which the other is tried, whatever it seems to
cost: neither shows what the other costs. The first number doubles with every try, up to the second."""
TRIED, TRIED_PART = 4, 8
"""What is verified to try drafts: so many tokens of one stream in so many."""
MAX_SLOWER = 2.0
"""A step counts as at most this multiple of what is expected: what takes longer comes from outside."""


class DraftControl:
    """The most draft tokens per slot. ``tokens`` None: chosen as above; otherwise always that many."""

    def __init__(self, slots: int, tokens: int | None) -> None:
        self.most = MAX_AUTO if tokens is None else tokens
        self._fixed = tokens is not None
        self._accepted = np.full(slots, PRIOR_ACCEPTED)
        self._rejected = np.full(slots, PRIOR_REJECTED)
        self._seen = _PRIOR.copy()
        """Accepted and rejected draft tokens of a mean stream."""
        self._costs = _StepTimes()
        self._had_drafts = False
        """Whether the latest step had drafts."""
        self._run_length = 0
        """Steps in a row that had drafts, or had none, as the latest one."""
        self._is_profitable = False
        """Whether drafts were worth their time when that was clear the last time."""
        self._try_after = TRY_SOON

    def begin(self, slot: int) -> None:
        self._accepted[slot], self._rejected[slot] = self._seen * (_PRIOR.sum() / self._seen.sum())

    def limits(self, slots: Slots) -> I32:
        """int32[n]: the most draft tokens that the next step should verify for each slot."""
        if self._fixed:
            return np.full(len(slots), self.most, np.int32)
        self._accepted[slots] += RECOVERY * (PRIOR_ACCEPTED - self._accepted[slots])
        self._rejected[slots] += RECOVERY * (PRIOR_REJECTED - self._rejected[slots])
        self._seen += RECOVERY * (_PRIOR - self._seen)
        threshold = max(self._costs.threshold(len(slots)), MIN_CHANCE)
        limits = np.zeros(len(slots), np.int32)
        if threshold < 1:
            worth = np.log(threshold) / np.log(self._chances(slots))
            limits[:] = np.minimum(worth, self.most)
        is_due = not self._had_drafts and self._run_length >= self._try_after
        return np.maximum(limits, TRIED) if is_due else limits

    def on_scheduled(self, *, drafts: bool) -> None:
        """A step has been scheduled, with or without drafts."""
        self._run_length = self._run_length + 1 if drafts == self._had_drafts else 1
        self._had_drafts = drafts

    def worthwhile(self, slots: Slots, counts: I32) -> I32:
        """The drafts of ``counts`` int32[n] tokens that the step should verify: all, none, or few.

        All, if together they yield more tokens than the time does that the step takes more for having any.
        Where the estimate leaves it open: every other time.
        """
        if self._fixed or not np.count_nonzero(counts):
            return counts
        chance = self._chances(slots)
        if self._run_length >= self._try_after:
            self._try_after = min(2 * self._try_after, TRY_LATE)
            few = 0 if self._had_drafts else max(1, len(slots) // TRIED_PART)
            counts[np.argsort(-chance * (counts > 0), kind="stable")[few:]] = 0
            return counts
        gain = float((chance * (1 - chance**counts) / (1 - chance)).sum())
        cost, uncertain = self._costs.of_drafts(len(slots), int(counts.sum()))
        is_profitable = gain > cost
        if abs(gain - cost) < uncertain:
            is_profitable = not self._had_drafts
        elif is_profitable != self._is_profitable:
            self._is_profitable, self._try_after = is_profitable, TRY_SOON
        return counts if is_profitable else np.zeros_like(counts)

    def _chances(self, slots: Slots) -> NDArray[np.float64]:
        """float64[n]: that the next token of a draft is accepted."""
        accepted = self._accepted[slots]
        chances: NDArray[np.float64] = np.clip(accepted / (accepted + self._rejected[slots]), 1e-3, 0.999)
        return chances

    def on_verified(self, slots: Slots, drafted: I32, accepted: I32) -> None:
        """A step has verified ``drafted`` tokens of each slot, 0 of some, and accepted the first ``accepted``
        of them."""
        if self._fixed:
            return
        tried = drafted > 0
        if not np.count_nonzero(tried):
            return
        some, right, wrong = slots[tried], accepted[tried], (accepted < drafted)[tried]
        self._accepted[some] = MEMORY * self._accepted[some] + right
        self._rejected[some] = MEMORY * self._rejected[some] + wrong
        self._seen = ENGINE_MEMORY * self._seen + (right.mean(), wrong.mean())

    def observe(self, seconds: float, tokens: int, generated: int, *, drafts: bool) -> None:
        """A step without prompts took ``seconds`` for ``tokens`` tokens, and ``generated`` of them were
        sampled and kept. ``drafts``: it had some."""
        if not self._fixed:
            self._costs.observe(seconds, tokens, generated, drafts)


class _StepTimes:
    """What steps cost, by least squares. Steps with drafts and those without are remembered apart: those that
    are rare now are not forgotten."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = self._seconds = self._generated = 0.0
        """Weighted means."""
        self._squares, self._products = np.zeros((2, 3, 3)), np.zeros((2, 3))
        """Sums over steps without drafts and over those with drafts: of the outer products of what a step has
        (itself, its tokens, whether drafts), and of that times its seconds."""
        self._costs = np.zeros(3)
        """Seconds of a step, of each of its tokens, and of having drafts."""
        self._covariance = np.zeros((3, 3))

    def observe(self, seconds: float, tokens: int, generated: int, drafts: bool) -> None:
        seen, weight = np.array((1.0, tokens, float(drafts))), 1.0
        if self._seconds:
            expected = float(seen @ self._costs)
            seconds = min(seconds, MAX_SLOWER * max(expected, 0.1 * self._seconds))
            weight = min((expected / seconds) ** 2, MAX_WEIGHT) if seconds else 1.0
        kind = int(drafts)
        self._squares[kind] = KIND_MEMORY * self._squares[kind] + weight * np.outer(seen, seen)
        self._products[kind] = KIND_MEMORY * self._products[kind] + weight * seconds * seen
        self._weight = STEP_MEMORY * self._weight + 1
        share = 1 / self._weight
        self._tokens += share * (tokens - self._tokens)
        self._seconds += share * (seconds - self._seconds)
        self._generated += share * (generated - self._generated)
        self._solve()

    def _solve(self) -> None:
        """Set the costs, none of which is below 0."""
        unit = np.array((1.0, 1 / self._tokens, 1.0))  # of the mean step
        squares = self._squares.sum(0) * np.outer(unit, unit) + PRIOR_WEIGHT * np.eye(3)
        wanted = self._products.sum(0) * unit + PRIOR_WEIGHT * self._seconds * PRIOR_COSTS
        inverse = np.linalg.inv(squares)
        costs = inverse @ wanted
        least = int(costs.argmin())
        if costs[least] < 0:
            others = np.delete(np.arange(3), least)
            costs = np.zeros(3)
            costs[others] = np.linalg.solve(squares[np.ix_(others, others)], wanted[others]).clip(0)
        self._costs = costs * unit
        self._covariance = inverse * np.outer(unit, unit) * (NOISE * self._seconds**2)

    def threshold(self, streams: int) -> float:
        """Tokens that are generated in the time that one token of a step costs, at the least."""
        if not self._weight:
            return float(PRIOR_COSTS[1])
        cost, uncertain = self._of(np.array((0.0, 1.0, 0.0)))
        return max(0.0, cost - uncertain) * self._rate(streams)

    def of_drafts(self, streams: int, tokens: int) -> tuple[float, float]:
        """Tokens that are generated in the time that ``tokens`` draft tokens cost a step, and how uncertain
        that is."""
        if not self._weight:
            return 0.0, 0.0
        cost, uncertain = self._of(np.array((0.0, tokens, 1.0)))
        rate = self._rate(streams)
        return cost * rate, uncertain * rate

    def _rate(self, streams: int) -> float:
        """Tokens per second: those of recent steps, or of steps without drafts if they would be more."""
        plain = float(np.array((1.0, streams, 0.0)) @ self._costs)
        rate = self._generated / self._seconds if self._seconds else 0.0
        return max(rate, streams / plain if plain else 0.0)

    def _of(self, parts: NDArray[np.float64]) -> tuple[float, float]:
        """The cost of so many steps, tokens and steps with drafts, float64[3], and its standard deviation."""
        return float(parts @ self._costs), float(np.sqrt(max(0.0, float(parts @ self._covariance @ parts))))
