"""The policies of garbage collection, on this process's own collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from penstock.config.options.processes import GcPolicy
from penstock.metrics import gc_policy
from penstock.metrics.gc_policy import GarbageCollector, GcPauses


class Knot:
    """Garbage that reference counting does not free."""

    def __init__(self) -> None:
        self.itself = self


Start = Callable[..., GarbageCollector]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[GarbageCollector] = []

    def start(policy: GcPolicy = "idle", pause_budget_s: float = 1.0) -> GarbageCollector:
        collector = GarbageCollector(policy, pause_budget_s)
        collector.start()
        started.append(collector)
        return collector

    yield start
    for collector in started:
        gc.callbacks.remove(collector.pauses._on_collection)
    gc.unfreeze()
    gc.enable()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.freeze()


def knots(number: int) -> list[weakref.ref[Knot]]:
    return [weakref.ref(Knot()) for _ in range(number)]


def alive(references: list[weakref.ref[Knot]]) -> int:
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("policy", ["idle", "off"])
def test_python_collects_nothing_by_itself(start: Start, policy: GcPolicy) -> None:
    frozen = gc.get_freeze_count()  # by the harness: without it each collection takes a second
    start(policy)
    assert not gc.isenabled()
    assert gc.get_freeze_count() > frozen


def test_default_leaves_everything_to_python(start: Start) -> None:
    frozen = gc.get_freeze_count()
    collector = start("default")
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
    garbage_made = knots(5000)
    assert alive(garbage_made) < 5000
    collections = collector.pauses.collections(0)
    assert collections >= 1
    gc.disable()
    try:
        knots(1000)
        collector.on_busy()
        collector.on_idle()
        assert collector.pauses.collections(0) == collections
    finally:
        gc.enable()


def test_an_idle_gap_is_used_once(start: Start) -> None:
    collector = start()
    gc.collect()
    assert not collector.due
    some = knots(200)
    assert collector.due
    assert alive(some) == 200
    collector.on_idle()
    assert alive(some) == 0
    assert not collector.due
    made = collector.pauses.collections(2)
    collector.on_idle()
    assert collector.pauses.collections(2) == made


def test_off_never_collects(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_policy, "YOUNG_LIMITS", (10, 10))
    collector = start("off")
    some = knots(200)
    assert not collector.due
    collector.on_idle()
    collector.on_busy()
    assert alive(some) == 200


def test_a_busy_process_collects_only_when_much_has_gathered(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = start()
    some = knots(1000)
    collector.on_busy()
    assert alive(some) == 1000
    monkeypatch.setattr(gc_policy, "YOUNG_LIMITS", (10, 500))
    collector.on_busy()
    assert alive(some) == 0
    assert collector.pauses.collections(0) == 1


def test_a_small_budget_makes_young_collections_small(start: Start) -> None:
    collector = start(pause_budget_s=1e-9)
    lowest, _ = gc_policy.YOUNG_LIMITS
    some = knots(2 * lowest)
    collector.on_busy()
    assert alive(some) == 0


def test_a_gap_gets_a_full_collection_only_within_the_budget(start: Start) -> None:
    collector = start(pause_budget_s=1e-9)
    old = Knot()
    gc.collect(0)  # it is not in the youngest generation any more
    full = collector.pauses.collections(2)
    reference = weakref.ref(old)
    del old
    some = knots(200)
    collector.on_idle()
    assert alive(some) == 0
    assert reference() is not None
    assert collector.pauses.collections(2) == full


def test_survivors_lead_to_a_full_collection_even_beyond_the_budget(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc_policy, "OLD_LIMIT", 1500)
    monkeypatch.setattr(gc_policy, "YOUNG_LIMITS", (10, 100))
    collector = start(pause_budget_s=1e-9)
    kept: list[list[object]] = []
    before = collector.pauses.collections(2)
    for _ in range(20):
        kept += [[kept] for _ in range(100)]
        collector.on_busy()
        if collector.pauses.collections(2) > before:
            break
    assert collector.pauses.collections(2) == before + 1
    assert 1400 < len(kept) < 2000


def test_pauses_are_timed_whoever_collects() -> None:
    now = [5.0]

    def clock() -> float:
        now[0] += 0.002
        return now[0]

    pauses = GcPauses(clock)
    gc.collect()
    pauses.watch()
    try:
        knots(10)
        gc.collect(0)
        gc.collect(2)
    finally:
        gc.callbacks.remove(pauses._on_collection)
    gc.collect()
    assert [pauses.collections(generation) for generation in range(3)] == [1, 0, 1]
    assert pauses.longest_s == pytest.approx([0.002, 0.0, 0.002])
    assert pauses.total_s[0] == pytest.approx(0.002)
    assert pauses.freed[0] >= 10


def test_the_report_names_what_grows(start: Start) -> None:
    collector = start()
    name = f"{Knot.__module__}.{Knot.__qualname__}"
    first = collector.report()
    assert (first.policy, first.enabled, first.growth) == ("idle", False, 0)
    kept = [Knot() for _ in range(3000)]
    second = collector.report()
    (found,) = [count for count in second.types if count.type == name]
    assert found.objects == found.growth == len(kept)
    assert 3000 <= second.growth < 10_000
    assert second.frozen > 1000
    assert [pause.generation for pause in second.pauses] == [0, 1, 2]
