"""Which LoRA adapters run: at most ``--max-loras`` at a time, each in a place of the stacked weights.

A stream whose adapter has no place waits until a place has no running streams. Waiting adapters get places in
the order in which they began to wait. For each one that waits, the adapter that got its place longest ago
takes no further streams until its running ones have ended: its place is *drained*. So an adapter with a
constant flow of streams keeps no other out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from penstock.engine.lora.adapter_table import LoadedAdapter
from penstock.wire.arrays import I32

NO_PLACE = -1


@dataclass(slots=True, eq=False)
class _Place:
    index: int
    number: int = 0
    """LoadedAdapter.number of the adapter whose weights are here; 0: none."""
    running: int = 0
    """Streams with a slot that use it, preempted ones included."""
    since: int = 0
    """Places that had been given out when the adapter got this one."""
    drains: bool = False


class AdapterRoom:
    """The places, and who waits for one."""

    def __init__(self, slots: int, places: int) -> None:
        self.places: I32 = np.full(slots, NO_PLACE, np.int32)
        """int32[slots]: the place of each running stream's adapter; NO_PLACE: the base model."""
        self.put: Callable[[int, LoadedAdapter], None] = _nothing
        """Called to bring an adapter's weights to a place, before the first stream that uses them there."""
        self._places = [_Place(index) for index in range(places)]
        self._of: dict[int, _Place] = {}
        """Places by the number of the adapter."""
        self._idle = OrderedDict.fromkeys(self._places)
        """Places without running streams, the longest idle first."""
        self._waiting: dict[int, LoadedAdapter] = {}
        """Adapters that have been refused a place, or further streams, in that order."""
        self._given_out = 0

    # -- streams come and go

    def may_start(self, adapter: LoadedAdapter) -> bool:
        """Whether a stream may start; otherwise it is to wait for :meth:`awaited_by` of the adapter."""
        place = self._of.get(adapter.number)
        if self._idle if place is None else not place.drains:
            return True
        self._waiting.setdefault(adapter.number, adapter)
        return False

    @staticmethod
    def awaited_by(adapter: LoadedAdapter) -> Hashable:
        """What the adapter's waiting streams are held by."""
        return AdapterRoom, adapter.number

    def start(self, slot: int, adapter: LoadedAdapter) -> None:
        """A stream that may start is given a slot."""
        place = self._of.get(adapter.number)
        if place is None:
            place, _ = self._idle.popitem(last=False)
            self._of.pop(place.number, None)
            self._of[adapter.number] = place
            place.number = adapter.number
            self._given_out += 1
            place.since = self._given_out
            self.put(place.index, adapter)
        self._idle.pop(place, None)
        if self._waiting.pop(adapter.number, None) is not None:
            # a stream that came later and is more important may have started before those that are held
            self._waiting[adapter.number] = adapter
        place.running += 1
        self.places[slot] = place.index

    def end(self, slot: int) -> None:
        """The slot's stream, if it has an adapter, leaves."""
        index = int(self.places[slot])
        if index == NO_PLACE:
            return
        self.places[slot] = NO_PLACE
        place = self._places[index]
        place.running -= 1
        if not place.running:
            place.drains = False
            self._idle[place] = None

    def take_ready(self) -> Iterator[LoadedAdapter]:
        """The adapters whose waiting streams may start, those that have waited longest first. To be called
        before each step's streams are chosen."""
        if not self._waiting:
            return
        for adapter in [each for each in self._waiting.values() if not self._has_waiting(each)]:
            del self._waiting[adapter.number]  # its streams were aborted
        self._drain()
        room = len(self._idle)
        for adapter in list(self._waiting.values()):
            place = self._of.get(adapter.number)
            if place is None or not place.running:
                if room:
                    room -= 1
                    yield adapter
            elif not place.drains:
                del self._waiting[adapter.number]
                yield adapter

    def clear(self) -> None:
        """Forget which weights are where; no stream runs."""
        for place in self._idle:
            self._of.pop(place.number, None)
            place.number = 0

    # -- who waits

    def _has_waiting(self, adapter: LoadedAdapter) -> bool:
        place = self._of.get(adapter.number)
        return adapter.streams > (0 if place is None else place.running)

    def _drain(self) -> None:
        """Drain a place for each waiting adapter that has none, those that were given out first."""
        strangers = sum(number not in self._of for number in self._waiting)
        running = sorted((place for place in self._places if place.running), key=lambda each: each.since)
        for rank, place in enumerate(running):
            place.drains = rank < strangers - len(self._idle)


def _nothing(place: int, adapter: LoadedAdapter) -> None:
    """The ``put`` of a scheduler without a model."""
