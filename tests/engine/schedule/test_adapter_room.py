"""At most so many adapters run at a time, and none waits for ever."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.lora.adapter_table import AdapterTable, LoadedAdapter
from penstock.engine.schedule.adapter_room import NO_PLACE, AdapterRoom
from penstock.engine.schedule.scheduler import Scheduler
from tests.engine.paged import Driver, adapter_table, make_scheduler, replace_adapters

NAMES = tuple("abcdef")


class Places:
    """What an engine has in its stacks, and what its streams must find there."""

    def __init__(self, scheduler: Scheduler) -> None:
        assert scheduler.adapter_room is not None
        self.scheduler, self.room = scheduler, scheduler.adapter_room
        self.room.put = self._put
        self.contents: dict[int, LoadedAdapter] = {}
        self.puts = 0

    def _put(self, place: int, adapter: LoadedAdapter) -> None:
        in_use = {int(used) for slot, used in enumerate(self.room.places) if slot in self._adapters()}
        assert place not in in_use, "the weights of a running stream are replaced"
        self.contents[place] = adapter
        self.puts += 1

    def _adapters(self) -> dict[int, LoadedAdapter]:
        return self.scheduler.table.adapters

    def check(self) -> None:
        for slot in range(self.scheduler.table.size):
            place = int(self.room.places[slot])
            adapter = self._adapters().get(slot)
            assert adapter is (None if place == NO_PLACE else self.contents[place])
        for place in self.room._places:
            assert place.running == np.count_nonzero(self.room.places == place.index)
            assert (place in self.room._idle) == (not place.running)


def driver_of(table: AdapterTable, **options: Any) -> tuple[Driver, Places]:
    driver = Driver(make_scheduler(adapters=table, **options))
    return driver, Places(driver.scheduler)


@settings(max_examples=20)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 4),
    st.integers(15, 60),
    st.integers(1, 6),
    st.sampled_from(["fcfs", "priority"]),
)
def test_every_stream_ends_with_its_adapter_in_a_place(
    rng: random.Random, places: int, blocks: int, slots: int, policy: str
) -> None:
    table = adapter_table(*NAMES)
    driver, found = driver_of(table, max_loras=places, blocks=blocks, slots=slots, scheduling_policy=policy)
    for stream in range(60):
        driver.submit(
            stream,
            [rng.randrange(50) for _ in range(rng.randrange(1, 20))],
            rng.randrange(1, 20),
            adapter=rng.choice([None, *NAMES]),
            priority=rng.randrange(3),
        )
        for _ in range(rng.randrange(4)):
            driver.step()
            found.check()
        if rng.random() < 0.1:
            driver.scheduler.abort(0, [rng.randrange(stream + 1)])
    driver.finish(each=lambda batch: found.check())
    assert not driver.scheduler.table.adapters
    assert all(not loaded.streams for loaded in table._loaded.values())


def test_a_stream_waits_in_nobody_s_way() -> None:
    driver, _ = driver_of(adapter_table("a", "b"), max_loras=1)
    for stream, adapter in enumerate(("a", "b", None)):
        driver.submit(stream, [5, 6], 10, adapter=adapter)
    driver.step()
    assert (driver.scheduler.running(), driver.scheduler.deferred()) == (2, 1)
    driver.finish()
    assert driver.received.finish.keys() == {0, 1, 2}


def test_weights_stay_where_they_are_between_streams() -> None:
    driver, found = driver_of(adapter_table("a", "b", "c"), max_loras=2)
    for stream, adapter in enumerate("abab"):
        driver.submit(stream, [5, 6], 2, adapter=adapter)
        driver.finish()
    assert found.puts == 2
    driver.submit(4, [5, 6], 2, adapter="c")  # in the place that is idle for longest, which is that of a
    driver.finish()
    driver.submit(5, [5, 6], 2, adapter="b")
    driver.finish()
    assert found.puts == 3


@pytest.mark.parametrize("places", [1, 2])
def test_a_constant_flow_keeps_no_other_adapter_out(places: int) -> None:
    driver, _ = driver_of(adapter_table("a", "b", "c"), max_loras=places, slots=8, blocks=100)
    names = "ab"[:places]
    started: dict[int, int] = {}
    stream = 0
    for step in range(120):
        if step % 3 == 0:
            for name in names:
                driver.submit(stream, [5, 6, stream % 50], 9, adapter=name)
                stream += 1
        if step in (20, 60):
            driver.submit(1000 + step, [5, 6], 4, adapter="c")
        driver.step()
        started |= {each: step for _, each in driver.scheduler.table.take_admitted()}
    for step in (20, 60):
        assert started[1000 + step] - step <= 10  # the streams that ran have 9 tokens
    flow = [started[each] for each in started if each < 1000]
    assert max(np.diff(sorted(flow))) <= 16
    driver.finish()
    assert driver.scheduler.table.running() == 0


def test_a_drained_place_takes_streams_again_when_nobody_waits() -> None:
    driver, found = driver_of(adapter_table("a", "b"), max_loras=1)
    driver.submit(0, [5], 50, adapter="a")
    driver.step()
    driver.submit(1, [5], 5, adapter="b")
    driver.step()
    driver.submit(2, [6], 5, adapter="a")
    driver.step()
    driver.step()
    assert driver.scheduler.running() == 1
    driver.scheduler.abort(0, [1])
    driver.step()
    assert driver.scheduler.running() == 2
    driver.finish()
    assert found.puts == 1


def test_places_are_given_in_the_order_of_waiting() -> None:
    driver, _ = driver_of(adapter_table(*NAMES), max_loras=1, slots=8)
    order: list[str] = []
    for stream, adapter in enumerate("afbecdbf"):
        driver.submit(stream, [5, 6], 12, adapter=adapter)
        driver.step()

    def note(batch: object) -> None:
        order.extend(loaded.adapter.name for loaded in driver.scheduler.table.adapters.values())

    driver.finish(each=note)
    assert list(dict.fromkeys(order)) == ["a", "f", "b", "e", "c", "d"]
    assert order == sorted(order, key="afbecd".index)


def test_a_more_important_stream_of_the_same_adapter_leaves_nobody_behind() -> None:
    driver, _ = driver_of(adapter_table("a", "b", "c"), max_loras=1, scheduling_policy="priority")
    for stream, adapter in enumerate("abc"):
        driver.submit(stream, [5], 3, adapter=adapter, priority=5)
    while 0 not in driver.received.finish:
        driver.step()
    driver.submit(3, [7], 3, adapter="c", priority=0)  # it takes the place that b was to get
    driver.finish(most_steps=50)
    assert driver.received.finish.keys() == {0, 1, 2, 3}


def test_versions_of_an_adapter_have_places_of_their_own() -> None:
    table = adapter_table("a")
    driver, found = driver_of(table, max_loras=2)
    driver.submit(0, [5, 6, 7, 8, 9], 9, adapter="a")
    driver.step()
    replace_adapters(table, "a", digest="2")
    driver.submit(1, [5, 6, 7, 8, 9], 9, adapter="a")
    driver.step()
    assert found.puts == 2
    assert [loaded.adapter.digest for loaded in found.contents.values()] == ["1", "2"]
    driver.finish()
    assert 1 not in driver.cached


def test_cleared_places_get_their_weights_anew() -> None:
    driver, found = driver_of(adapter_table("a"), max_loras=1)
    for stream in range(2):
        driver.submit(stream, [5], 2, adapter="a")
        driver.finish()
        found.room.clear()
    assert found.puts == 2


def test_a_preempted_stream_keeps_its_place() -> None:
    driver, found = driver_of(adapter_table("a", "b"), max_loras=1, blocks=6, slots=3)
    driver.submit(0, [5, 6], 20, adapter="a")
    driver.submit(1, [7, 8], 20, adapter="a")
    driver.submit(2, [9, 9], 3, adapter="b")
    driver.finish(each=lambda batch: found.check())
    assert driver.scheduler.streams.preemptions > 0
    assert found.puts == 2


def test_an_engine_without_adapters_has_no_room() -> None:
    assert make_scheduler().adapter_room is None
    assert AdapterRoom(3, 2).places.tolist() == [NO_PLACE] * 3
