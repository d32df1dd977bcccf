"""How a server's connection ends: drained with GOAWAY, or at once by a fault; and how long its client has to
close."""

from __future__ import annotations

import enum

from penstock.http.http2 import frames
from penstock.http.http2.faults import ErrorCode
from penstock.http.server_state import LINGER_S, MAX_LINGER_BYTES

PING = b"penstock"
"""Payload of the PING behind the first GOAWAY: when it is answered, no request is on its way."""


class EndingPhase(enum.IntEnum):
    """How far the end has come. A connection may skip phases, and never goes back."""

    SERVING = 0
    WARNED = 1
    """The first GOAWAY is sent: requests on their way are served."""
    LAST = 2
    """The second GOAWAY has said which request is the last one that is served."""
    LINGERING = 3
    """Nothing is left to do but to discard what comes, until the client has closed."""
    LOST = 4


class Ending:
    """The end of one connection, without its socket: methods return the frames that are due."""

    __slots__ = ("_discarded", "_last_served", "_lingers_since", "phase")

    def __init__(self) -> None:
        self.phase = EndingPhase.SERVING
        self._last_served = 0
        """The last stream id that is served, from :attr:`Phase.LAST` on."""
        self._lingers_since = 0.0
        self._discarded = 0

    def warn(self) -> bytes:
        """Announce the end to a client whose requests may be on their way."""
        self._enter(EndingPhase.WARNED)
        return frames.goaway(frames.STREAM_BITS, ErrorCode.NO_ERROR) + frames.ping(PING)

    def is_understood(self, ping_ack: bytes) -> bool:
        """Whether this is the answer to the PING of the warning."""
        return self.phase is EndingPhase.WARNED and ping_ack == PING

    def say_last(self, last_id: int) -> bytes:
        """Announce that nothing is served after the stream ``last_id``."""
        self._enter(EndingPhase.LAST)
        self._last_served = last_id
        return frames.goaway(last_id, ErrorCode.NO_ERROR)

    def is_unserved(self, stream_id: int) -> bool:
        """Whether the client was told that the stream is not served."""
        return self.phase >= EndingPhase.LAST and stream_id > self._last_served

    def linger(self, now: float) -> None:
        self._enter(EndingPhase.LINGERING)
        self._lingers_since = now

    def discard(self, size: int) -> bool:
        """More has come from a client that has not closed. Return whether it is too much."""
        self._discarded += size
        return self._discarded > MAX_LINGER_BYTES

    def is_late(self, now: float) -> bool:
        """Return whether the client should have closed."""
        return self.phase is EndingPhase.LINGERING and now - self._lingers_since > LINGER_S

    def lose(self) -> None:
        """The connection is lost: nothing is sent any more."""
        self.phase = EndingPhase.LOST

    def _enter(self, phase: EndingPhase) -> None:
        assert self.phase < phase, f"{phase.name} after {self.phase.name}"
        self.phase = phase
