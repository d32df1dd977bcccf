"""Hung processes: those whose heartbeats stop for longer than their role allows are killed."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.supervisor.children.child_state import Child, ChildState, ChildTable, join_names
from penstock.supervisor.children.recovery import Recovery
from penstock.wire.control import ProcessFailed, Role

OPTIONS: dict[Role, str] = {
    "engine": "--engine-hang-timeout",
    "api-server": "--api-server-hang-timeout",
    "coordinator": "--api-server-hang-timeout",
    "media-worker": "--api-server-hang-timeout",
    "gateway": "--worker-hang-timeout",
}
"""The option that holds the timeout of each role."""
_WATCHED = (ChildState.READY, ChildState.RETIRING)


class HangDetector:
    """Watches processes that are ready: the ``deadline`` of each is when its silence lasts too long.

    ``timeouts`` in seconds; 0: processes of this role are not watched. Times are those of
    :class:`~penstock.supervisor.running_clock.RunningClock`: time in which the supervisor could hear no
    heartbeat does not count.
    """

    def __init__(self, children: ChildTable, recovery: Recovery, timeouts: Mapping[Role, float]) -> None:
        self._children = children
        self._recovery = recovery
        self._timeouts = timeouts

    def on_heartbeat(self, child: Child, now: float) -> None:
        """A heartbeat, or the child has become ready. Children that are not watched are passed over."""
        if self.is_watched(child):
            child.deadline = now + self._timeouts[child.name.role]

    def on_silence(self, child: Child, now: float) -> None:
        """The deadline of a watched child has passed: kills it, unless its group is being killed already."""
        peers = self._recovery.group_peers(child)
        if any(peer.killed for peer in peers):
            self.on_heartbeat(child, now)
            return
        child.failure = ProcessFailed(message=self._message(child, peers, now), fatal=False)
        self._children.kill(child)

    def is_watched(self, child: Child) -> bool:
        return self._timeouts[child.name.role] > 0 and child.state in _WATCHED and not child.exiting

    def _message(self, child: Child, peers: list[Child], now: float) -> str:
        """Names the peers that are nearly as silent: engines of a group wait within a step for one that
        hangs, and the last heartbeat of each may be a little older or newer."""
        role = child.name.role
        text = f"not heard of for {self._timeouts[role]:g} s ({OPTIONS[role]})"
        soon = now + self._timeouts[role] / 2
        silent = [
            peer
            for peer in peers
            if self.is_watched(peer) and peer.deadline is not None and peer.deadline < soon
        ]
        if not silent:
            return text
        names = join_names(silent)
        return f"{text}, and {names} for nearly as long: one of them hangs, the others may wait for it"
