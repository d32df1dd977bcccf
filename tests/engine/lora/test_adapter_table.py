"""The adapters that an engine has loaded."""

from __future__ import annotations

import msgspec
import pytest

from penstock.adapters.errors import AdapterError
from penstock.config.serve import ServeConfig
from penstock.engine.base import RequestRejected
from penstock.engine.batch.slots import SlotTable
from penstock.engine.lora.adapter_table import AdapterTable, adapter_of
from penstock.engine.schedule.waiting_queue import WaitingQueue
from penstock.wire.messages import NO_ADAPTER, Adapter, Submit
from tests.engine.lora.loaders import FakeLoader
from tests.engine.support import Clock, submit

A1, A2, B1 = Adapter("a", "/a1", digest="1"), Adapter("a", "/a2", digest="2"), Adapter("b", "/b", digest="1")


def request(name: str = "a", digest: str = "", resumed: int = 0) -> Submit:
    return msgspec.structs.replace(submit(0, adapter=name, resumed=resumed), adapter_digest=digest)


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


@pytest.fixture
def table(loader: FakeLoader) -> AdapterTable:
    """Adapter a, with digest 1, is current."""
    table = AdapterTable(loader, 4)
    table.add_adapter(A1, "weights")
    table.make_current([A1])
    return table


def test_numbers_are_given_once(table: AdapterTable, loader: FakeLoader) -> None:
    table.add_adapter(A2, None)
    table.make_current([])
    assert not table.remove_unused()
    assert (len(table), loader.keys) == (0, [])
    table.add_adapter(A1, "again")
    table.make_current([A1])
    loaded = table.of_request(request())
    assert (loaded.number, loaded.weights, loaded.key) == (3, "again", ("a", "1"))


def test_a_staged_adapter_is_not_found_by_its_name(table: AdapterTable) -> None:
    table.add_adapter(B1, None)
    assert ("b", "1") in table
    assert table.names() == ["a"]
    with pytest.raises(RequestRejected, match="the adapter 'b' is not loaded") as refused:
        table.of_request(request("b"))
    assert refused.value.code == NO_ADAPTER
    table.make_current([A1, B1])
    assert table.of_request(request("b")).adapter == B1
    assert table.digests() == {"a": "1", "b": "1"}


def test_a_replaced_adapter_is_found_by_its_digest_until_no_stream_uses_it(
    table: AdapterTable, loader: FakeLoader
) -> None:
    old = table.of_request(request())
    old.streams += 1
    table.add_adapter(A2, None)
    table.make_current([A2])
    assert table.of_request(request()).adapter == A2
    assert table.of_request(request(digest="1")) is old
    assert table.remove_unused()
    assert loader.keys == ["a 1", "a 2"]
    old.streams -= 1
    assert not table.remove_unused()
    assert loader.keys == ["a 2"]
    assert table.of_request(request(digest="1")).adapter == A2  # its API server does not know yet
    with pytest.raises(RequestRejected, match="'a' is not loaded"):
        table.of_request(request(digest="1", resumed=2))  # the stream began with other weights


def test_an_unloaded_adapter_is_refused_by_name(table: AdapterTable) -> None:
    table.make_current([])
    assert not table.remove_unused()
    for digest in ("", "1"):
        with pytest.raises(RequestRejected, match="'a' is not loaded"):
            table.of_request(request(digest=digest))


def test_an_adapter_that_comes_back_before_it_is_removed_is_the_same(
    table: AdapterTable, loader: FakeLoader
) -> None:
    loaded = table.of_request(request())
    table.make_current([])
    elsewhere = Adapter("a", "/elsewhere", digest="1")
    table.make_current([elsewhere])
    assert table.of_request(request()) is loaded
    assert loaded.adapter == elsewhere
    assert not table.remove_unused()
    assert loader.keys == ["a 1"]


def test_one_that_cannot_be_made_ready_leaves_nothing(table: AdapterTable, loader: FakeLoader) -> None:
    loader.refused.add("b")
    with pytest.raises(AdapterError, match="there is no room"):
        table.add_adapter(B1, None)
    assert ("b", "1") not in table
    table.make_current([A1, B1])
    assert table.names() == ["a"]


def test_requests_without_an_adapter_and_engines_without_adapters(table: AdapterTable) -> None:
    assert adapter_of(submit(0), table) is None
    assert adapter_of(submit(0), None) is None
    assert adapter_of(request(), table) is table.of_request(request())
    with pytest.raises(RequestRejected, match="'a' is not loaded"):
        adapter_of(request(), None)


def test_streams_count_from_the_queue_to_the_end_of_their_slot(table: AdapterTable) -> None:
    adapter = table.of_request(request())
    queue = WaitingQueue(ServeConfig())
    slots = SlotTable(2, 64, (), Clock(), vocab_size=320)
    queue.push(0, submit(1, adapter="a"), 0, adapter)
    queue.push(0, submit(2, adapter="a"), 0, adapter)
    queue.push(0, submit(3), 0)
    assert adapter.streams == 2
    first = queue.pop()
    slot = slots.allocate(first.server, first.request, first.adapter)
    assert slots.adapters == {slot: adapter}
    assert adapter.streams == 2
    assert queue.abort(0, 2)
    assert adapter.streams == 1
    slots.release(slot)
    assert (adapter.streams, slots.adapters) == (0, {})
    queue.push(0, submit(4, adapter="a"), 0, adapter)
    queue.drop_server(0)
    assert adapter.streams == 0
