"""Limits chunked prefill beside decodes (``--max-prefill-delay``), by step costs learned from durations."""

from __future__ import annotations

import math

FALL, RISE = 0.3, 0.1
"""Weights of a duration below and above the estimate. Delays come from outside (other processes, clock
rates), so short durations are more informative."""
MAX_RISE = 2.0
"""A duration counts as at most this multiple of the estimate."""
AIM = 0.75
"""Fraction of the allowed time that is planned for: durations miss their estimates by a quarter or more."""
MIXED_IN_A_ROW = 31
"""Mixed steps after which one step only decodes, to update the cost of decodes; costs 3 % of the prefill."""
ALIKE = 1.5
"""Decode counts that differ by less than this factor are taken to cost the same."""


class StepCost:
    """Estimates the duration of a decode-only step, and the additional time per prompt token.

    The cost of a prompt token is the time a step took beyond its decodes, per token. It includes a share of
    each chunk's fixed cost, so the estimate converges to the chunk size that takes the allowed time.
    """

    def __init__(self, max_delay: float, least: int, longest_s: float = math.inf) -> None:
        """``max_delay``: maximum duration of a mixed prefill/decode step, as a multiple of a decode-only
        step; 0: no limit. ``least``: prompt tokens that are always allowed, so that prompts advance.
        ``longest_s``: seconds that prompt tokens may take at most, unless there is no limit."""
        self._longest_s = longest_s
        self._max_delay = max_delay
        self._least = least
        self._decode_s = 0.0
        self._decodes = 0
        """Decodes of the latest decode-only step; 0: there was none."""
        self._token_s: float | None = None
        self._mixed = 0
        """Consecutive mixed steps."""

    def observe(self, seconds: float, tokens: int, decodes: int) -> None:
        """Record that a step with ``tokens`` prompt tokens and ``decodes`` decodes took ``seconds``."""
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
        if not self._max_delay or not self._token_s:  # no limit, or no estimate yet
            return most
        if not self._is_known(decodes) or self._mixed >= MIXED_IN_A_ROW:
            return 0  # a decode-only step updates the estimate
        seconds = min((self._max_delay - 1) * self._decode_s, self._longest_s)
        tokens = AIM * seconds / self._token_s
        return min(most, max(self._least, int(tokens)))

    def _is_known(self, decodes: int) -> bool:
        """Whether there is an estimate for about this many decodes."""
        return self._decodes <= ALIKE * decodes and decodes <= ALIKE * self._decodes


def _moved(estimate: float | None, value: float) -> float:
    if estimate is None:
        return value
    change = min(value, MAX_RISE * estimate) - estimate
    return estimate + (RISE if change > 0 else FALL) * change
