"""What the desired states keep from an engine's streams: computing, beginning, or all."""

from __future__ import annotations

from collections.abc import Callable

from penstock.engine.base import Engine, Hold
from penstock.engine.loop.peers import Peers
from penstock.wire.messages import PAUSE


class StreamGate:
    """Holds an engine's streams back by the most that any state asks for, and ends them."""

    def __init__(self, engine: Engine, peers: Peers, in_wave: Callable[[], bool] = lambda: False) -> None:
        """``in_wave``: whether another rank of the engine's group may need steps of this one."""
        self._engine = engine
        self._peers = peers
        self._holds: dict[str, Hold] = {}
        self.in_wave = in_wave

    def hold(self, state: str, hold: Hold) -> None:
        """Hold streams back for the desired state of that name. Raises ValueError if the engine cannot."""
        others = [Hold.NOTHING, *(each for name, each in self._holds.items() if name != state)]
        self._engine.hold(max(hold, *others))
        self._holds[state] = hold

    def is_paused(self) -> bool:
        """Whether a pause keeps streams where they are."""
        return self._holds.get(PAUSE) is Hold.ALL

    def abort(self, is_wanted: Callable[[tuple[str, ...]], bool] = lambda ids: True) -> int:
        """End all streams, or those whose request's ids are wanted, with what they have, in the next step.
        Returns their number."""
        count = 0
        for peer in self._peers:
            numbers = [number for number in peer.streams.values() if is_wanted(self._peers.ids_of(number))]
            self._engine.abort(peer.server, numbers)
            count += len(numbers)
        return count

    def is_still(self) -> bool:
        """Whether nothing is computed any more of what is held back, and all ends have been published."""
        return not self._engine.can_step()

    def has_running(self) -> bool:
        """Whether a stream has begun and not ended."""
        return self._engine.load().running > 0

    def is_idle(self) -> bool:
        """Whether neither this engine nor another rank of its group has work."""
        return not self._engine.has_work() and not self.in_wave()


def wanted_ids(arguments: dict[str, object]) -> Callable[[tuple[str, ...]], bool]:
    """Which requests the call ``abort_streams`` means, by their ids: those in ``ids``, those that begin with
    ``prefix``, or with ``all`` every one. Raises ValueError."""
    match arguments:
        case {"all": True}:
            return lambda ids: True
        case {"prefix": str(prefix)} if prefix:
            return lambda ids: any(each.startswith(prefix) for each in ids)
        case {"ids": list(listed)} if all(isinstance(each, str) for each in listed):
            wanted = set(listed)
            return lambda ids: not wanted.isdisjoint(ids)
    raise ValueError("abort_streams takes ids (texts), a prefix that is not empty, or all: true")
