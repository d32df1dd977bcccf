"""When a slow client is cut: one that sends its request too slowly, is idle for too long, or does not read.

The server's sweep asks every connection once per interval. The head of a request has --header-timeout to
arrive. Its body may take longer, as over a slow link: it may pause for that time, and after that time must
have come with :data:`MIN_BODY_RATE` on average, so that no client holds a connection forever. A streamed
reply is exempt: it limits what waits for its client by --max-stream-backlog
(:mod:`penstock.generation.replies.streamed`).
"""

from __future__ import annotations

import enum

MIN_BODY_RATE = 1024
"""Bytes per second: 64 MiB take 18 hours at most. A phone with a bad connection has about 4,000."""


class Verdict(enum.Enum):
    """What to do with a connection."""

    KEEP = enum.auto()
    LATE_HEAD = enum.auto()
    """The head of its request did not arrive in time: reply 408 and close."""
    STALLED_BODY = enum.auto()
    """Nothing came of the body for too long: the same."""
    SLOW_BODY = enum.auto()
    """The body comes too slowly: the same."""
    IDLE = enum.auto()
    """Close without a reply."""
    NOT_READING = enum.auto()
    """The client does not read the end of a reply: abort."""


class SlowClientTimer:
    """Times the client of one connection. All times are monotonic seconds."""

    __slots__ = (
        "_body_bytes",
        "_in_body",
        "_progress_at",
        "_unread",
        "_unread_since",
        "idle_since",
        "waiting_since",
    )

    def __init__(self, now: float) -> None:
        self.waiting_since: float | None = None
        """When the incomplete head or body began to arrive; None if there is none."""
        self.idle_since: float | None = now
        """Since when there has been no request."""
        self._in_body = False
        """Whether it is a body."""
        self._body_bytes = 0
        """What has come of it."""
        self._progress_at = 0.0
        """When its last bytes came."""
        self._unread = 0
        """Unsent reply bytes at the last check."""
        self._unread_since = 0.0
        """When that number last changed."""

    def on_request_begin(self, now: float) -> None:
        self.waiting_since, self.idle_since, self._in_body = now, None, False

    def on_body_begin(self, now: float) -> None:
        """The head of the request is complete, but not its body."""
        self.waiting_since, self.idle_since, self._in_body = now, None, True
        self._body_bytes = 0
        self._progress_at = now

    def on_body(self, now: float, size: int) -> None:
        """``size`` more bytes of the body have come."""
        if size:
            self._body_bytes += size
            self._progress_at = now

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
        if self.waiting_since is not None:
            if not reading:  # the server itself does not read the request
                self.waiting_since = self._progress_at = now
                self._body_bytes = 0
            verdict = self._check_request(now, self.waiting_since, request_timeout_s)
            if verdict is not Verdict.KEEP:
                self.waiting_since = None
            return verdict
        if unread != self._unread:  # the client reads
            self._unread, self._unread_since = unread, now
        if replying or now - max(self._unread_since, self.idle_since or 0.0) <= keep_alive_s:
            return Verdict.KEEP
        return Verdict.NOT_READING if unread else Verdict.IDLE

    def _check_request(self, now: float, since: float, timeout_s: float) -> Verdict:
        if not self._in_body:
            return Verdict.KEEP if now - since <= timeout_s else Verdict.LATE_HEAD
        if now - self._progress_at > timeout_s:
            return Verdict.STALLED_BODY
        slow = now - since > timeout_s + self._body_bytes / MIN_BODY_RATE
        return Verdict.SLOW_BODY if slow else Verdict.KEEP
