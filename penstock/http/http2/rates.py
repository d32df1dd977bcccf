"""How often a peer may send frames that cost work and carry nothing, and abandon requests.

Both are leaky buckets per connection: a burst, a rate per second, and more in proportion to what the peer
has been served, which it may keep for a while. So floods end the connection (the attacks of 2019,
CVE-2019-9511 to -9518, and the rapid resets of 2023 and 2025, CVE-2023-44487 and CVE-2025-8671), and busy
gateways never come near.
"""

from __future__ import annotations

from penstock.http.http2.faults import ConnectionFault, ErrorCode

CONTROL_BURST = 10_000
CONTROL_PER_S = 1_000
BYTES_PER_CONTROL = 32
"""Bytes of DATA sent that allow another control frame: some clients send two WINDOW_UPDATE per event."""
MAX_CONTROL = 300_000
"""Control frames that are allowed at once at most: those for the 9 MB that the sockets of a client that lags
behind may hold."""
SETTINGS_BYTES_PER_CONTROL = 256
"""Bytes of SETTINGS that count as a control frame."""
WINDOWS_PER_CONTROL = 16
"""Windows of streams that SETTINGS change that count as a control frame."""
RESET_BURST = 2_048
"""As many as a gateway may have streams, all of which it may cancel at once."""
RESETS_PER_S = 100


class RateLimit:
    """Counts events of one kind."""

    __slots__ = ("_at", "_burst", "_level", "_most", "_per_s", "_served", "_what")

    def __init__(self, what: str, burst: int, per_s: int, now: float, *, most: int = 0) -> None:
        """``what``: of which the peer sends too many, for GOAWAY. ``most``: events that it may keep of those
        that it earned by what it was served; of those by time it may keep ``burst``."""
        self._what = what
        self._burst = burst
        self._most = max(most, burst)
        self._per_s = per_s
        self._level = float(burst)
        """Events that are allowed at the time ``_at``."""
        self._at = now
        self._served = 0
        """What the peer had been served then."""

    def spend(self, now: float, served: int, count: int = 1) -> None:
        """``count`` events. ``served``: further events that the peer has earned, ever. Raises ConnectionFault
        if there are too many."""
        self._level -= count
        if self._level < 0.0:
            by_time = min(self._level + (now - self._at) * self._per_s, self._burst)
            self._level = min(by_time + served - self._served, self._most)
            self._at, self._served = now, served
            if self._level < 0.0:
                raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._what}")


def control_limit(now: float, burst: int = CONTROL_BURST) -> RateLimit:
    return RateLimit("control frames and empty frames", burst, CONTROL_PER_S, now, most=MAX_CONTROL)


def window_change_limit(now: float, burst: int) -> RateLimit:
    return RateLimit("changes of windows by SETTINGS", burst, burst // 10, now)


def reset_limit(now: float) -> RateLimit:
    return RateLimit("streams that are reset before their end", RESET_BURST, RESETS_PER_S, now)
