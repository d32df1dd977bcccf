"""Hung engines: those whose heartbeats stop for longer than ``--engine-hang-timeout`` are killed."""

from __future__ import annotations

from penstock.supervisor.children.child_state import Child, ChildState, ChildTable, join_names
from penstock.supervisor.children.recovery import Recovery
from penstock.wire.control import ProcessFailed

HEARTBEAT_CHECK_INTERVAL_S = 1.0
"""How often heartbeats are checked; engines send them as often."""
MAX_CHECK_DELAY_S = 2.0
"""A check that is later than this means that the supervisor itself was stopped or starved, and perhaps its
engines with it."""


class HangDetector:
    """Watches engines that are ready: the ``deadline`` of each is when its silence lasts too long.

    ``timeout`` in seconds; 0: engines are not watched. Times are seconds of any monotonic clock.
    """

    def __init__(self, children: ChildTable, recovery: Recovery, timeout: float) -> None:
        self._children = children
        self._recovery = recovery
        self._timeout = timeout
        self._checked_at = 0.0

    def next_check(self) -> float | None:
        """When :meth:`check` is due; None: no engine is watched."""
        if any(self._is_watched(child) for child in self._children):
            return self._checked_at + HEARTBEAT_CHECK_INTERVAL_S
        return None

    def check(self, now: float) -> None:
        """Extends deadlines by the time in which the supervisor did not run and could hear no heartbeat."""
        missed, self._checked_at = now - self._checked_at - HEARTBEAT_CHECK_INTERVAL_S, now
        if missed <= MAX_CHECK_DELAY_S:
            return
        for child in self._children:
            if self._is_watched(child) and child.deadline is not None:
                child.deadline = min(child.deadline + missed, now + self._timeout)

    def on_heartbeat(self, child: Child, now: float) -> None:
        """A heartbeat, or the child has become ready. Children that are not watched are passed over."""
        if self._is_watched(child):
            child.deadline = now + self._timeout

    def on_silence(self, child: Child, now: float) -> None:
        """The deadline of a ready child has passed: kills it, unless its group is being killed already."""
        peers = self._recovery.group_peers(child)
        if any(peer.killed for peer in peers):
            self.on_heartbeat(child, now)
            return
        child.failure = ProcessFailed(message=self._message(peers, now), fatal=False)
        self._children.kill(child)

    def _is_watched(self, child: Child) -> bool:
        engine = child.name.role == "engine" and self._timeout > 0
        return engine and child.state is ChildState.READY and not child.exiting

    def _message(self, peers: list[Child], now: float) -> str:
        """Names the peers that are nearly as silent: engines of a group wait within a step for one that
        hangs, and the last heartbeat of each may be a little older or newer."""
        text = f"not heard of for {self._timeout:g} s (--engine-hang-timeout)"
        soon = now + self._timeout / 2
        silent = [
            peer
            for peer in peers
            if self._is_watched(peer) and peer.deadline is not None and peer.deadline < soon
        ]
        if not silent:
            return text
        names = join_names(silent)
        return f"{text}, and {names} for nearly as long: one of them hangs, the others may wait for it"
