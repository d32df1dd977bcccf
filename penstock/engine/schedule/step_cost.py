"""What steps cost, learned from their durations, and how much prefill a step may carry beside decodes."""

from __future__ import annotations

FALL, RISE = 0.3, 0.1
"""Weights of a duration below and above the estimate. What delays a step comes from outside (other processes,
a clock rate): short durations say more."""
MAX_RISE = 2.0
"""A duration counts as so many times the estimate at most."""
AIM = 0.75
"""Part of the allowed time that is planned for: durations miss their estimates by a quarter or more."""
MIXED_IN_A_ROW = 31
"""Steps with decodes and prompts, after which one only decodes: the cost of decodes stays known, for 3 % of
the prefill."""
ALIKE = 1.5
"""Numbers of decodes that differ by less than this factor are taken to cost the same."""


class StepCost:
    """Estimates of a step that only decodes, and of a prompt token.

    The cost of a prompt token is what a step took longer than its decodes would have, by token; it includes
    a share of what every chunk costs, so the estimate settles where chunks of the size it allows take the
    time that is allowed.
    """

    def __init__(self, max_delay: float, least: int) -> None:
        """``max_delay``: how many times as long as a step that only decodes a step with prompts may take;
        0: no limit. ``least``: tokens that are always allowed, so that prompts advance."""
        self._max_delay = max_delay
        self._least = least
        self._decode_s = 0.0
        self._decodes = 0
        """How many the latest step that only decodes had; 0: there was none."""
        self._token_s: float | None = None
        self._mixed = 0
        """Steps in a row that had both."""

    def observe(self, seconds: float, tokens: int, decodes: int) -> None:
        """A step with ``tokens`` prompt tokens and ``decodes`` decodes took ``seconds``."""
        if not tokens:
            self._mixed = 0
            if decodes:
                known = self._decode_s if self._is_known(decodes) else None
                self._decode_s, self._decodes = _moved(known, seconds), decodes
        elif not decodes:
            self._token_s = _moved(self._token_s, seconds / tokens)
        else:
            self._mixed += 1
            if self._is_known(decodes):
                self._token_s = _moved(self._token_s, max(seconds - self._decode_s, 0.0) / tokens)

    def allowed(self, most: int, decodes: int) -> int:
        """Prompt tokens that a step with ``decodes`` decodes may compute, at most ``most``."""
        if not self._max_delay or not self._token_s:  # nothing is known yet
            return most
        if not self._is_known(decodes) or self._mixed >= MIXED_IN_A_ROW:
            return 0  # a step that only decodes tells
        tokens = AIM * (self._max_delay - 1) * self._decode_s / self._token_s
        return min(most, max(self._least, int(tokens)))

    def _is_known(self, decodes: int) -> bool:
        """Whether the cost of so many decodes is."""
        return self._decodes <= ALIKE * decodes and decodes <= ALIKE * self._decodes


def _moved(estimate: float | None, value: float) -> float:
    if estimate is None:
        return value
    change = min(value, MAX_RISE * estimate) - estimate
    return estimate + (RISE if change > 0 else FALL) * change
