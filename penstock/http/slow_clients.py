"""When a slow client is cut: one that sends its request too slowly, is idle for too long, or does not read.

The server's sweep asks every connection once per interval. A streamed reply is exempt: it limits what waits
for its client by --max-stream-backlog (:mod:`penstock.generation.streamed`).
"""

from __future__ import annotations

import enum


class Verdict(enum.Enum):
    """What to do with a connection."""

    KEEP = enum.auto()
    REQUEST_TIMEOUT = enum.auto()
    """Its request did not arrive in time: reply 408 and close."""
    IDLE = enum.auto()
    """Close without a reply."""
    NOT_READING = enum.auto()
    """Its client does not read the end of a reply: abort."""


class SlowClientTimer:
    """Times the client of one connection. All times are monotonic seconds."""

    __slots__ = ("_unread", "_unread_since", "idle_since", "waiting_since")

    def __init__(self, now: float) -> None:
        self.waiting_since: float | None = None
        """When the incomplete request began to arrive; None if there is none."""
        self.idle_since: float | None = now
        """Since when there has been no request."""
        self._unread = 0
        """Unsent reply bytes at the last check."""
        self._unread_since = 0.0
        """When that number last changed."""

    def on_request_begin(self, now: float) -> None:
        self.waiting_since, self.idle_since = now, None

    def on_request_complete(self) -> None:
        self.waiting_since = self.idle_since = None

    def on_last_reply(self, now: float) -> None:
        """No request is left to answer."""
        self.idle_since = now

    def on_close(self) -> None:
        self.waiting_since = self.idle_since = None

    def check(
        self,
        now: float,
        request_timeout_s: float,
        keep_alive_s: float,
        *,
        reading: bool,
        replying: bool,
        unread: int,
    ) -> Verdict:
        """``reading``: the server reads from the connection. ``replying``: a reply is in progress that may be
        silent or limits its own backlog. ``unread``: reply bytes that the client has not taken."""
        if self.waiting_since is not None and not reading:
            self.waiting_since = now  # the server itself does not read the request
        if self.waiting_since is not None:
            if now - self.waiting_since <= request_timeout_s:
                return Verdict.KEEP
            self.waiting_since = None
            return Verdict.REQUEST_TIMEOUT
        if unread != self._unread:  # the client reads
            self._unread, self._unread_since = unread, now
        if replying or now - max(self._unread_since, self.idle_since or 0.0) <= keep_alive_s:
            return Verdict.KEEP
        return Verdict.NOT_READING if unread else Verdict.IDLE
