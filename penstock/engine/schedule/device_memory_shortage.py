"""What follows when the device has no memory for a step: smaller steps for a while, and streams that rest.

A batch that ran only in parts halves the steps: the next ones have no more tokens than the largest part that
ran, and twice as many after some steps without a shortage. A stream that finds no memory even by itself
rests while others advance, and its next chunks have half the tokens, which grow again like steps; after some
tries it is given up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I32

GROW_STEPS = 64
"""Steps without a shortage after which steps may have twice the tokens. One that fails again costs the
device's wait for a few launches; chosen, not measured."""
REST_STEPS = 32
"""Steps of other streams before a stream is tried again that found no memory by itself."""
MAX_TRIES = 8
"""Tries of a stream by itself at one place of its history; each has half the tokens of the one before."""
UNLIMITED = (1 << 31) - 1


@dataclass(slots=True)
class _Stream:
    tries: int = 0
    most: int = UNLIMITED
    """Tokens of its chunks and drafts."""
    end: int = 0
    """The place: it has advanced when this many tokens of its history are computed."""
    rests_until: int = 0
    grows_at: int = 0


class MemoryShortage:
    """Tokens that a step may have, and the slots that are short of memory by themselves."""

    def __init__(self, most: int) -> None:
        """``most``: tokens of a step while there is no shortage."""
        self.step_tokens = most
        self._most = most
        self._grows_at = 0
        self._streams: dict[int, _Stream] = {}
        """Streams by slot."""

    # -- steps

    def begin_step(self, step: int) -> None:
        """Let steps grow again."""
        if self.step_tokens < self._most and step >= self._grows_at:
            self.step_tokens = min(2 * self.step_tokens, self._most)
            self._grows_at = step + GROW_STEPS

    def shrink(self, tokens: int, step: int) -> None:
        """Make steps smaller: of a batch that had no memory the largest part that ran has ``tokens``."""
        self.step_tokens = max(1, min(tokens, self.step_tokens))
        self._grows_at = step + GROW_STEPS

    # -- streams

    def may_try_again(self, slot: int, count: int, end: int, step: int) -> bool:
        """Note that ``count`` tokens of a slot, up to ``end`` of its history, had no memory by themselves.
        False: it was tried often enough."""
        stream = self._streams.setdefault(slot, _Stream())
        stream.tries += 1
        stream.most = max(1, min(stream.most, count) // 2)
        stream.end = max(stream.end, end)
        stream.rests_until = step + REST_STEPS
        stream.grows_at = step + GROW_STEPS
        return stream.tries < MAX_TRIES

    def on_launched(self, computed: I32, step: int) -> None:
        """``computed`` int32[slots]: tokens of each slot whose computation has begun."""
        for slot, stream in list(self._streams.items()):
            if computed[slot] < stream.end:
                continue
            stream.tries = stream.end = 0
            if step >= stream.grows_at:
                stream.most, stream.grows_at = 2 * stream.most, step + GROW_STEPS
                if stream.most >= self._most:
                    self.forget(slot)

    def may_begin(self, slots: NDArray[np.intp], step: int) -> NDArray[np.bool_]:
        """bool[n]: slots that do not rest."""
        resting = [slot for slot, stream in self._streams.items() if stream.rests_until > step]
        return ~np.isin(slots, resting)

    def most_tokens(self, slots: NDArray[np.intp]) -> I32:
        """int32[n]: tokens of a step that each slot may have."""
        most = np.full(len(slots), UNLIMITED, np.int32)
        for slot, stream in self._streams.items():
            most[slots == slot] = stream.most
        return most

    def most_tokens_of(self, slot: int) -> int:
        """:meth:`most_tokens` of one slot."""
        stream = self._streams.get(slot)
        return UNLIMITED if stream is None else stream.most

    def forget(self, slot: int) -> None:
        """Forget a slot whose stream has left."""
        self._streams.pop(slot, None)

    def __bool__(self) -> bool:
        """Whether any slot is short of memory."""
        return bool(self._streams)
