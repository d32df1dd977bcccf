"""Schedules garbage collection in place of Python's triggers, and measures its pauses.

A step of an engine, or of an API server's loop, makes no reference cycles, so reference counting frees its
objects. Python would still collect whenever enough objects have accumulated, and walk over all live objects
while every stream waits. See ``docs/gc.md``.
"""

from __future__ import annotations

import contextlib
import gc
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from penstock.config.options.processes import GcPolicy

GENERATIONS = 3
PAUSE_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Seconds."""
DUE_OBJECTS = 100
"""Objects allocated and not freed since the last collection that justify one while idle."""
OLD_LIMIT = 1_000_000
"""Survivors of young collections after which even a busy process makes a full one, whatever its pause. If all
were garbage, they would take about 100 MB."""
YOUNG_LIMITS = (1_000, 1_000_000)
"""Minimum and maximum of the objects between young collections, whatever budget and cost are."""
MIN_COST_S = 1e-9
"""Minimum CPU seconds per walked object, for coarse clocks; 50 to 100 ns are usual."""
TOP_TYPES = 25
"""Types in each of a report's two rankings."""


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """For imports: nothing is collected in the block, and no collection walks over what it leaves."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


class GcPauses:
    """Times every collection of this process, by generation; 2 is a full one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.counts = [[0] * (len(PAUSE_BOUNDS) + 1) for _ in range(GENERATIONS)]
        """Collections per bucket of PAUSE_BOUNDS, the last one above every bound."""
        self.total_s = [0.0] * GENERATIONS
        self.longest_s = [0.0] * GENERATIONS
        self.freed = [0] * GENERATIONS
        """Objects freed."""
        self._clock = clock
        self._began = 0.0

    def watch(self) -> None:
        """Start timing."""
        gc.callbacks.append(self._on_collection)

    def collections(self, generation: int) -> int:
        return sum(self.counts[generation])

    def _on_collection(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        if phase == "start":
            self._began = self._clock()
            return
        generation, taken = info["generation"], self._clock() - self._began
        self.counts[generation][bisect_left(PAUSE_BOUNDS, taken)] += 1
        self.total_s[generation] += taken
        self.longest_s[generation] = max(self.longest_s[generation], taken)
        self.freed[generation] += info["collected"]


class TypeCount(msgspec.Struct, frozen=True):
    """Tracked objects of one type, and their growth since the previous report (0 in the first one)."""

    type: str
    objects: int
    growth: int


class PauseReport(msgspec.Struct, frozen=True):
    """Collections of one generation since the start."""

    generation: int
    collections: int
    freed: int
    total_ms: float
    longest_ms: float


class GarbageReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of one process's garbage collector, as in /debug/gc. Only ``frozen`` counts frozen objects."""

    policy: GcPolicy
    enabled: bool
    threshold: tuple[int, int, int]
    tracked: int
    growth: int
    frozen: int
    pauses: list[PauseReport]
    types: list[TypeCount]
    """The most frequent types, and those that grew or shrank most."""


class GarbageCollector:
    """Garbage collection of one process, by one of three policies:

    ``idle``
        Objects alive at :meth:`start` are frozen and never walked again. Collections run while the process
        is idle; while it is busy, only young ones that fit the pause budget.
    ``default``
        Python's own triggers; pauses are timed.
    ``off``
        As ``idle``, without any collection after the start.
    """

    def __init__(self, policy: GcPolicy = "idle", pause_budget_s: float = 0.005) -> None:
        self.pauses = GcPauses()
        self._policy = policy
        self._budget_s = pause_budget_s
        self._cost_s = MIN_COST_S
        """CPU time to walk over one object."""
        self._survivors = 0
        """Objects that survived young collections since the last full one."""
        self._last_full_s = 0.0
        self._census: Counter[str] | None = None

    def start(self) -> None:
        """Apply the policy; to be called when the process is ready to serve."""
        self.pauses.watch()
        if self._policy == "default":
            return
        gc.collect()
        self._cost_s = max(MIN_COST_S, self._timed_collection(2) / len(gc.get_objects()))
        gc.freeze()
        gc.disable()

    @property
    def due(self) -> bool:
        """Whether :meth:`on_idle` would collect."""
        return self._policy == "idle" and gc.get_count()[0] >= DUE_OBJECTS

    def on_busy(self) -> None:
        """To be called now and then while the process works: makes a young collection if one is due."""
        if self._policy != "idle":
            return
        lowest, highest = YOUNG_LIMITS
        limit = min(max(lowest, self._budget_s / self._cost_s), highest)
        if self._survivors > OLD_LIMIT:
            self._collect_all()
        elif gc.get_count()[0] >= limit:
            self._collect_young()

    def on_idle(self) -> None:
        """To be called when the process is idle: makes a full collection, or a young one if that exceeds the
        budget."""
        if not self.due:
            return
        expected = self._last_full_s + (gc.get_count()[0] + self._survivors) * self._cost_s
        if expected <= self._budget_s or self._survivors > OLD_LIMIT:
            self._collect_all()
        else:
            self._collect_young()

    def _collect_young(self) -> None:
        walked, freed = gc.get_count()[0], self.pauses.freed[0]
        cost_s = max(MIN_COST_S, self._timed_collection(0) / walked)
        self._cost_s += (cost_s - self._cost_s) / 4
        self._survivors += max(0, walked - (self.pauses.freed[0] - freed))

    def _collect_all(self) -> None:
        self._last_full_s = self._timed_collection(2)
        self._survivors = 0

    def _timed_collection(self, generation: int) -> float:
        """Collect; returns the CPU seconds of this thread, which other processes do not affect."""
        began = time.thread_time()
        gc.collect(generation)
        return time.thread_time() - began

    # -- reports

    def report(self) -> GarbageReport:
        """Count all tracked objects, at about 0.1 microseconds each."""
        census = Counter(f"{kind.__module__}.{kind.__qualname__}" for kind in map(type, gc.get_objects()))
        growth = Counter(census)
        growth.subtract(census if self._census is None else self._census)
        self._census = census
        names = [name for name, _ in census.most_common(TOP_TYPES)]
        names += sorted(growth, key=lambda name: -abs(growth[name]))[:TOP_TYPES]
        return GarbageReport(
            policy=self._policy,
            enabled=gc.isenabled(),
            threshold=gc.get_threshold(),
            tracked=census.total(),
            growth=growth.total(),
            frozen=gc.get_freeze_count(),
            pauses=[self._pause_report(generation) for generation in range(GENERATIONS)],
            types=[TypeCount(name, census[name], growth[name]) for name in dict.fromkeys(names)],
        )

    def _pause_report(self, generation: int) -> PauseReport:
        pauses = self.pauses
        return PauseReport(
            generation=generation,
            collections=pauses.collections(generation),
            freed=pauses.freed[generation],
            total_ms=round(pauses.total_s[generation] * 1000, 3),
            longest_ms=round(pauses.longest_s[generation] * 1000, 3),
        )
