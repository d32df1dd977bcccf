"""The desired list of adapters on one engine."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import pytest

from penstock.adapters.errors import AdapterError
from penstock.engine.loop.state_reconciler import StateReconciler
from penstock.engine.lora.adapter_state import INTERNAL_ERROR, AdapterState
from penstock.engine.lora.adapter_table import AdapterTable
from penstock.wire.adapter_list import AdapterList, AdapterStatus
from penstock.wire.messages import Adapter, DesiredState, StatesObserved
from tests.engine.lora.loaders import FakeLoader
from tests.engine.support import submit

A1, A2 = Adapter("a", "/a1", digest="1"), Adapter("a", "/a2", digest="2")
B1, C1 = Adapter("b", "/b", digest="1"), Adapter("c", "/c", digest="1")


class Reader(Executor):
    """Reads when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Any, tuple[Any, ...]]] = []

    def submit(self, call: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, call, arguments))
        return future

    def read(self) -> None:
        """Read everything that waits."""
        while self.waiting:
            future, call, arguments = self.waiting.pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call(*arguments))
            except Exception as error:  # noqa: BLE001 - as an executor does
                future.set_exception(error)


class Engine:
    """A state over a fake loader."""

    def __init__(self) -> None:
        self.loader = FakeLoader()
        self.table = AdapterTable(self.loader, 8)
        self.reader = Reader()
        self.state = AdapterState(self.table, self.reader)

    def prepare(self, *adapters: Adapter) -> None:
        self.state.prepare(msgspec.to_builtins(AdapterList(list(adapters))))

    def change(self, *adapters: Adapter) -> AdapterStatus:
        """Prepare, commit and settle."""
        self.prepare(*adapters)
        self.reader.read()
        assert self.state.prepared(firm=False)
        self.state.commit()
        self.state.settle()
        return self.status

    @property
    def status(self) -> AdapterStatus:
        return msgspec.convert(self.state.result(), AdapterStatus)


@pytest.fixture
def engine() -> Engine:
    return Engine()


# -- changes


def test_streams_find_an_adapter_from_the_commit_on(engine: Engine) -> None:
    engine.prepare(A1)
    assert engine.state.is_reading
    assert not engine.state.prepared(firm=False)
    engine.reader.read()
    assert engine.state.prepared(firm=False)
    assert not engine.state.is_reading
    assert (engine.loader.keys, engine.table.names()) == (["a 1"], [])
    engine.state.tidy()
    assert engine.loader.keys == ["a 1"]
    engine.state.commit()
    assert engine.status == AdapterStatus({"a": "1"})


def test_only_what_is_not_loaded_is_read(engine: Engine) -> None:
    engine.change(A1)
    assert engine.change(A1, B1).loaded == {"a": "1", "b": "1"}
    assert engine.loader.reads == ["/a1", "/b"]
    assert engine.change(B1).loaded == {"b": "1"}
    assert engine.reader.waiting == []


def test_an_unloaded_adapter_is_removed_when_its_streams_have_ended(engine: Engine) -> None:
    engine.change(A1, B1)
    used = engine.table.of_request(submit(0, adapter="a"))
    used.streams = 1
    assert engine.change().loaded == {}
    engine.state.tidy()
    assert engine.loader.keys == ["a 1"]
    engine.state.tidy()
    assert engine.loader.keys == ["a 1"]
    used.streams = 0
    engine.state.tidy()
    assert (engine.loader.keys, len(engine.table)) == ([], 0)


def test_an_adapter_is_replaced_by_one_with_its_name(engine: Engine) -> None:
    engine.change(A1)
    old = engine.table.of_request(submit(0, adapter="a"))
    old.streams = 1
    assert engine.change(A2).loaded == {"a": "2"}
    engine.state.tidy()
    assert engine.loader.keys == ["a 1", "a 2"]
    assert old.weights == "weights of a 1"
    old.streams = 0
    engine.state.tidy()
    assert engine.loader.keys == ["a 2"]


def test_a_retired_adapter_that_comes_back_is_not_read_again(engine: Engine) -> None:
    engine.change(A1)
    engine.table.of_request(submit(0, adapter="a")).streams = 1
    engine.change()
    engine.state.tidy()
    assert engine.change(A1).loaded == {"a": "1"}
    assert engine.loader.reads == ["/a1"]


def test_nothing_is_removed_while_a_change_is_prepared(engine: Engine) -> None:
    engine.change(A1)
    engine.change()
    engine.prepare(A1)
    engine.state.tidy()
    assert engine.loader.keys == ["a 1"]
    assert engine.state.prepared(firm=False)
    engine.state.commit()
    engine.state.settle()
    engine.state.tidy()
    assert engine.status.loaded == {"a": "1"}


def test_what_was_there_before_stays_until_the_change_holds(engine: Engine) -> None:
    engine.change(A1)
    engine.prepare(A2)
    engine.reader.read()
    assert engine.state.prepared(firm=False)
    engine.state.commit()
    engine.state.tidy()
    assert (engine.status.loaded, engine.loader.keys) == ({"a": "2"}, ["a 1", "a 2"])
    engine.loader.unreadable["/a1"] = AdapterError("it was overwritten")
    assert engine.change(A1).loaded == {"a": "1"}  # set back
    engine.state.tidy()
    assert engine.loader.keys == ["a 1"]


# -- changes that are not made


def test_an_abort_drops_what_was_loaded(engine: Engine) -> None:
    engine.change(A1)
    engine.prepare(A1, B1)
    engine.reader.read()
    assert engine.state.prepared(firm=False)
    engine.state.abort()
    engine.state.tidy()
    assert engine.loader.keys == ["a 1"]
    assert engine.status == AdapterStatus({"a": "1"})


def test_an_abort_while_files_are_read(engine: Engine) -> None:
    engine.prepare(A1)
    engine.state.abort()
    assert not engine.state.is_reading
    engine.reader.read()
    engine.state.tidy()
    assert (engine.loader.reads, engine.loader.keys) == ([], [])
    assert engine.change(A1).loaded == {"a": "1"}


@pytest.mark.parametrize("when", ["read", "add"])
def test_an_adapter_that_cannot_be_loaded_is_refused_by_name(engine: Engine, when: str) -> None:
    engine.change(A1)
    if when == "read":
        engine.loader.unreadable["/b"] = AdapterError("its files have changed")
    else:
        engine.loader.refused.add("b")
    engine.prepare(A1, B1)
    engine.reader.read()
    with pytest.raises(AdapterError, match=r"adapter b: (its files have changed|there is no room)"):
        engine.state.prepared(firm=False)
    engine.state.abort()
    engine.state.tidy()
    assert engine.status == AdapterStatus({"a": "1"})


def test_an_error_of_the_engine_s_own_is_not_told(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.loader.unreadable["/b"] = RuntimeError("secret")
    engine.prepare(B1)
    engine.reader.read()
    with pytest.raises(AdapterError, match="adapter b: it could not be loaded; the engine's log says more"):
        engine.state.prepared(firm=False)
    assert "secret" in caplog.text


def test_arguments_that_are_no_list(engine: Engine) -> None:
    with pytest.raises(ValueError, match="adapters"):
        engine.state.prepare({"adapters": 1})


# -- changes that hold all the same


def test_a_change_that_holds_is_made_without_what_cannot_be_loaded(engine: Engine) -> None:
    engine.loader.unreadable["/b"] = AdapterError("its files have changed")
    engine.prepare(A1, B1)
    engine.reader.read()
    assert engine.state.prepared(firm=True)
    engine.state.commit()
    assert engine.status == AdapterStatus({"a": "1"}, {"b": "its files have changed"})


def test_what_is_missing_does_not_keep_others_out_and_is_tried_again(engine: Engine) -> None:
    engine.loader.unreadable["/b"] = AdapterError("no")
    engine.prepare(B1)
    engine.reader.read()
    assert engine.state.prepared(firm=True)
    engine.state.commit()
    assert engine.change(B1, C1) == AdapterStatus({"c": "1"}, {"b": "no"})
    engine.loader.unreadable.clear()
    assert engine.change(B1, C1) == AdapterStatus({"b": "1", "c": "1"})


# -- the start


def test_adapters_of_the_start(engine: Engine) -> None:
    engine.state.load_at_start([A1, B1], tolerant=False)
    assert engine.status == AdapterStatus({"a": "1", "b": "1"})
    assert engine.change(A1, B1) == AdapterStatus({"a": "1", "b": "1"})
    assert engine.loader.reads == ["/a1", "/b"]


def test_a_first_start_fails_and_a_later_one_serves_without(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.loader.unreadable["/b"] = AdapterError("it does not exist")
    with pytest.raises(AdapterError, match=r"adapter b \(/b\): it does not exist"):
        engine.state.load_at_start([B1], tolerant=False)
    engine.state.load_at_start([A1, B1], tolerant=True)
    assert engine.status == AdapterStatus({"a": "1"}, {"b": "it does not exist"})
    engine.prepare(A1, B1)  # as the API servers have it do next
    engine.reader.read()
    assert engine.state.prepared(firm=True)
    engine.state.commit()
    assert caplog.messages == ["adapter b (/b) cannot be loaded: it does not exist"]


def test_adapters_that_only_their_streams_keep_are_bounded(engine: Engine) -> None:
    versions = [Adapter("a", f"/{number}", digest=str(number)) for number in range(10)]
    for version in versions[:9]:
        engine.change(version)
        engine.table.of_request(submit(1, adapter="a")).streams += 1
        engine.state.tidy()
    engine.prepare(versions[9])
    engine.reader.read()
    with pytest.raises(AdapterError, match="9 adapters that were unloaded or replaced still have streams"):
        engine.state.prepared(firm=False)
    engine.state.abort()
    engine.state.tidy()
    assert len(engine.loader.keys) == 9
    fourth = msgspec.structs.replace(submit(1, adapter="a"), adapter_digest="3")
    engine.table.of_request(fourth).streams -= 1
    engine.change(versions[8])
    engine.state.tidy()
    assert engine.change(versions[9]) == AdapterStatus({"a": "9"})


def test_an_adapter_without_streams_is_unloaded_however_many_are_retired(engine: Engine) -> None:
    for number in range(9):
        engine.change(Adapter("a", f"/{number}", digest=str(number)))
        if number < 8:
            engine.table.of_request(submit(1, adapter="a")).streams += 1
        engine.state.tidy()
    assert len(engine.loader.keys) == 9
    assert engine.change() == AdapterStatus({})


def test_a_restarted_engine_serves_without_what_a_defect_keeps_it_from_loading(engine: Engine) -> None:
    engine.loader.unreadable["/b"] = RuntimeError("out of pinned memory")
    engine.state.load_at_start([A1, B1], tolerant=True)
    assert engine.status.loaded == {"a": "1"}
    assert engine.status.missing == {"b": INTERNAL_ERROR}


def test_a_change_whose_thread_cannot_start_is_undone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    engine.change(A1)
    monkeypatch.setattr(engine.reader, "submit", refuse)
    told: list[StatesObserved] = []
    states = StateReconciler([engine.state], lambda server, one: None, told.append, lambda: 0, lambda: 0.0)
    states.apply(0, [DesiredState("adapters", 1, msgspec.to_builtins(AdapterList([A1, B1])))])
    assert told[-1].states[0].error == "RuntimeError: can't start new thread"
    assert engine.status.loaded == {"a": "1"}
    monkeypatch.undo()
    engine.change()
    engine.state.tidy()
    assert not engine.loader.keys
