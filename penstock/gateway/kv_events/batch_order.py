"""Puts the batches of one publisher in order: what was missed is asked for, or the blocks are forgotten.

A publisher numbers its batches from 0 on, and keeps the latest ones for replay. The first ones may be missed
(the subscriber has just connected), some be dropped (it is slow), and the numbers begin anew (the publisher
has restarted). This object has neither sockets nor a clock; it is told what happens and returns what to do.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, TypeAlias


class Reset(Enum):
    """Steps that forget the blocks of the publisher."""

    CLEAR = 0
    """Batches follow."""
    LOST = 1
    """None follow until there is a connection again."""


CLEAR: Final[Literal[Reset.CLEAR]] = Reset.CLEAR
LOST: Final[Literal[Reset.LOST]] = Reset.LOST
FallbackStep: TypeAlias = bytes | Reset
"""A batch to apply, or the blocks to be forgotten."""
MAX_HELD, MAX_HELD_BYTES = 4096, 64 << 20
"""Live batches that wait for the end of a replay."""


class BatchOrder:
    """The order of one publisher's batches."""

    def __init__(self, *, replays: bool) -> None:
        """``replays``: the publisher has a replay socket."""
        self.wanted: int | None = None
        """First number of the replay that is waited for; None: none is."""
        self._replays = replays
        self._next: int | None = None
        """The number that comes next; None: any."""
        self._last_live = -1
        self._held: list[tuple[int, bytes]] = []
        self._held_bytes = 0

    def on_connected(self) -> list[FallbackStep]:
        """A connection is there, to the same publisher or another one."""
        self._next, self._last_live = None, -1
        self._release_held()
        self.wanted = 0 if self._replays else None
        return [CLEAR]

    def on_disconnected(self) -> list[FallbackStep]:
        self.on_connected()
        self.wanted = None
        return [LOST]

    def on_live(self, number: int, batch: bytes) -> list[FallbackStep]:
        """A batch came by subscription."""
        steps: list[FallbackStep] = []
        if number <= self._last_live:  # they come in order: the publisher has begun anew
            steps = self.on_connected()
        self._last_live = number
        if self.wanted is not None:
            self._hold(number, batch)
            if len(self._held) > MAX_HELD or self._held_bytes > MAX_HELD_BYTES:
                steps += self.on_replay_failed()
            return steps
        return steps + self._take(number, batch)

    def _hold(self, number: int, batch: bytes) -> None:
        self._held.append((number, batch))
        self._held_bytes += len(batch)

    def _release_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _take(self, number: int, batch: bytes) -> list[FallbackStep]:
        if self._next is not None and number < self._next:
            return []  # the replay had it
        if self._next is not None and number > self._next:
            if self._replays:
                self.wanted = self._next
                self._hold(number, batch)
                return []
            self._next = number + 1
            return [CLEAR, batch]
        self._next = number + 1
        return [batch]

    def on_replayed(self, number: int, batch: bytes) -> list[FallbackStep]:
        """A batch of the replay came."""
        if self.wanted is None or (self._next is not None and number < self._next):
            return []
        lost = self._next is not None and number > self._next
        self._next = number + 1
        return [CLEAR, batch] if lost else [batch]

    def on_replay_ended(self) -> list[FallbackStep]:
        """The replay is complete. What it did not have is lost."""
        return self._take_held([])

    def on_replay_failed(self) -> list[FallbackStep]:
        """The replay did not come: it is unknown what was lost."""
        self._next = None
        return self._take_held([CLEAR])

    def _take_held(self, steps: list[FallbackStep]) -> list[FallbackStep]:
        self.wanted = None
        for number, batch in self._held:
            if self._next is None or number == self._next:
                steps.append(batch)
            elif number > self._next:
                steps += [CLEAR, batch]
            else:
                continue
            self._next = number + 1
        self._release_held()
        return steps
