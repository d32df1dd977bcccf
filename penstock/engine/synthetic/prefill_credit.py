"""How many prompt tokens the synthetic engine may prefill by now."""

from __future__ import annotations


class PrefillCredit:
    """Earns tokens with time, at a rate, and spends them on prompts."""

    def __init__(self, rate: float, most: int) -> None:
        """``rate``: tokens per second; 0: prompts cost nothing. ``most``: tokens that a step may earn."""
        self._rate, self._most = rate, most
        self._credit = 0.0
        self._earned_at = 0.0

    def begin(self, now: float) -> None:
        """Earn from now on only."""
        self._earned_at = now

    def earn(self, now: float, *, keep: bool) -> None:
        """Earn for the time since the last call. ``keep``: a prompt waits; otherwise it is lost."""
        earned = min((now - self._earned_at) * self._rate, self._most)
        self._earned_at = now
        self._credit += earned if keep else 0.0

    def pay(self, tokens: int) -> bool:
        """Whether a prompt can be prefilled: then it is paid for."""
        if not self._rate:
            return True
        if self._credit < tokens:
            return False
        self._credit -= tokens
        return True

    def clear(self) -> None:
        """No prompt waits."""
        self._credit = 0.0

    def seconds_until(self, tokens: int) -> float:
        """Until a prompt can be paid for; the rate is not 0."""
        return (tokens - self._credit) / self._rate
