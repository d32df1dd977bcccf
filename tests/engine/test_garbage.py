import gc
import weakref
from collections.abc import Iterator

import pytest

from penstock.engine import garbage
from penstock.engine.garbage import IdleCollector


class Knot:
    """Garbage that reference counting does not free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[IdleCollector]:
    collector = IdleCollector()
    collector.start()
    yield collector
    gc.enable()
    gc.unfreeze()


def test_python_collects_nothing_by_itself(collector: IdleCollector) -> None:
    assert not gc.isenabled()
    assert gc.get_freeze_count() > 1000


def test_idle_time_is_used_once(collector: IdleCollector) -> None:
    assert not collector.due
    knot = weakref.ref(Knot())
    collector.on_step()
    assert collector.due
    assert knot() is not None
    collector.on_idle()
    assert knot() is None
    assert not collector.due


def test_a_busy_engine_collects_only_when_much_has_gathered(
    collector: IdleCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    knots = [weakref.ref(Knot()) for _ in range(1000)]
    collector.on_control()
    assert knots[0]() is not None
    monkeypatch.setattr(garbage, "BUSY_LIMIT", 500)
    collector.on_control()
    assert all(knot() is None for knot in knots)
