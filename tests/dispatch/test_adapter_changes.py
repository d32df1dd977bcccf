"""Loading and unloading adapters through any API server, over links that break and parts that die."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dispatch.adapter_changes import NameTaken, TooManyAdapters
from penstock.dispatch.engine_rpc import OperationOutcome
from penstock.wire.messages import Adapter
from tests.dispatch import state_world
from tests.dispatch.state_world import (
    ENGINES,
    MAX_ADAPTERS,
    SERVERS,
    TIMEOUT_S,
    World,
    list_generation,
    world,
)

EVENTS = [
    *("load",) * 3,
    "unload",
    "change",
    *("deliver",) * 6,
    *("answer",) * 6,
    *("order",) * 4,
    *("report",) * 6,
    *("follow",) * 3,
    "cut",
    "connect",
    "connect",
    "kill_engine",
    "kill_server",
    "wait",
]
STEPS = st.lists(
    st.tuples(st.sampled_from(EVENTS), st.integers(0, SERVERS - 1), st.integers(0, 8)), max_size=60
)


def play(steps: list[tuple[str, int, int]]) -> None:
    with world() as made:
        for name, server, number in steps:
            on_adapter = name in ("load", "unload")
            if name == "follow":
                made.follow(server)
            else:
                getattr(made, name)(server, number if on_adapter else number % ENGINES)
            made.loop.turn()
        made.heal()
        made.check_healed()
        check_lists(made)


def check_lists(made: World) -> None:
    """Every API server and every engine has the desired list, and engines hold nothing else."""
    for engine in made.engines:
        engine.adapters.tidy()
    lists = [server.view.adapters.adapters for server in made.servers]
    assert all(each == lists[0] for each in lists)
    digests = {name: adapter.digest for name, adapter in lists[0].items()}
    for engine in made.engines:
        assert engine.table.digests() == digests
        assert engine.loaded == set(digests.values())


@settings(max_examples=60)
@given(STEPS)
def test_whatever_happens_all_have_the_same_list(steps: list[tuple[str, int, int]]) -> None:
    play(steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=2000)
@given(STEPS)
def test_whatever_happens_in_many_ways(steps: list[tuple[str, int, int]]) -> None:
    play(steps)


def test_loaded_everywhere_and_unloaded() -> None:
    with world() as made:
        asked = made.load(0, 1)
        made.flow()
        assert asked.result().outcome is OperationOutcome.DONE
        assert [receipt.result for receipt in asked.result().receipts] == [
            {"loaded": True, "digest": "d1"}
        ] * ENGINES
        assert all(server.view.adapters.get("a1") for server in made.servers)
        check_lists(made)
        gone = made.unload(1, 1)
        made.flow()
        assert [receipt.result for receipt in gone.result().receipts] == [
            {"loaded": False, "digest": None}
        ] * ENGINES
        assert not any(server.view.adapters.adapters for server in made.servers)
        check_lists(made)


def test_the_same_adapter_again_changes_nothing() -> None:
    with world() as made:
        made.load(0, 1)
        made.flow()
        generation = list_generation(made)
        again = made.load(1, 1)
        made.flow()
        assert again.result().outcome is OperationOutcome.DONE
        assert all(receipt.repeated for receipt in again.result().receipts)
        assert list_generation(made) == generation


def test_another_adapter_of_the_name_needs_a_word() -> None:
    with world() as made:
        made.load(0, 1)
        made.flow()
        refused = made.load(1, 4, replace=False)
        made.flow()
        assert isinstance(refused.exception(), NameTaken)
        asked = made.load(1, 4)
        made.flow()
        assert asked.result().outcome is OperationOutcome.DONE
        check_lists(made)
        assert made.engines[0].table.digests() == {"a1": "d4"}


def test_two_at_the_same_time_are_both_made() -> None:
    with world() as made:
        asked = [made.load(0, 1), made.load(1, 2), made.load(0, 3)]
        for _ in range(40):
            made.flow()
            made.loop.now += 0.25
            made.loop.turn()
        assert [task.result().outcome for task in asked] == [OperationOutcome.DONE] * 3
        check_lists(made)
        assert set(made.engines[0].table.digests()) == {"a0", "a1", "a2"}


def test_a_change_that_another_one_follows_at_once_is_done() -> None:
    with world() as made:
        first = made.load(0, 1)
        for _ in range(2):
            made.follow(0)
        for _ in range(2):
            made.order(1)
            made.exchange(1)
            made.report(1)
        assert [record.settled for record in made.records.values()] == [True]
        made.order(1)  # API server 0 has not heard yet that it holds
        second = made.load(1, 2)
        assert not first.done()
        made.report(1)
        made.flow()
        assert first.result().outcome is OperationOutcome.DONE
        assert [receipt.result for receipt in first.result().receipts] == [
            {"loaded": True, "digest": "d1"}
        ] * ENGINES
        assert second.result().outcome is OperationOutcome.DONE
        check_lists(made)


def test_a_load_that_changed_nothing_ends_although_a_later_change_overtakes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_world, "SERVERS", 3)
    with world() as made:
        made.load(0, 1)
        made.report(0)  # API server 0 is slow from here on
        made.follow(1)
        again = made.load(1, 1)  # it is desired already: the engines are waited for
        for server in (1, 2):
            for _ in range(3):
                made.follow(server)
        assert not again.done()  # API server 0 has not observed it
        made.follow(0)
        made.order(2)
        made.load(2, 2)
        for _ in range(3):
            made.follow(2)
        assert list_generation(made) == 2
        made.flow()
        assert all(state.settled for state in made.store.table().states)
        assert again.result().outcome is OperationOutcome.DONE


def test_a_load_that_waits_for_another_one_s_is_told_that_it_was_rolled_back() -> None:
    with world() as made:
        made.lose_files(1, rank=1)
        made.load(0, 1)
        made.report(0)
        made.order(1)
        again = made.load(1, 1)
        made.flow()
        assert again.result().outcome is OperationOutcome.ABORTED
        assert again.result().receipts[1].error == "adapter a1: its files are gone"
        check_lists(made)


def test_an_adapter_that_one_engine_cannot_read_is_on_none() -> None:
    with world() as made:
        made.lose_files(1, rank=1)
        asked = made.load(0, 1)
        made.flow()
        assert asked.result().outcome is OperationOutcome.ABORTED
        assert asked.result().receipts[1].error == "adapter a1: its files are gone"
        check_lists(made)
        assert made.engines[0].loaded == set()


def test_an_engine_that_comes_back_without_the_files_serves_without_the_adapter() -> None:
    with world() as made:
        made.load(0, 1)
        made.flow()
        made.lose_files(1, rank=1)
        made.kill_engine(0, 1)
        made.flow()
        [without] = {server.view.engines[1].missing_adapters["a1"] for server in made.servers}
        assert without == "its files are gone"
        for server in made.servers:
            assert server.view.engines[1].up_to_date
            assert not server.view.engines[1].has_adapter(("a1", "d1"))
            assert server.view.engines[0].has_adapter(("a1", "d1"))
        # others are loaded all the same, and the same files again are tried again
        asked = made.load(0, 2)
        made.flow()
        assert asked.result().outcome is OperationOutcome.DONE
        again = made.load(1, 1)
        made.flow()
        assert again.result().outcome is OperationOutcome.PARTIAL
        assert [receipt.error for receipt in again.result().receipts] == [
            None,
            "adapter a1: its files are gone",
        ]
        made.unreadable[1].clear()
        again = made.load(1, 1)
        made.flow()
        assert again.result().outcome is OperationOutcome.DONE
        check_lists(made)


def test_a_key_is_remembered_by_every_api_server() -> None:
    with world() as made:
        adapter = Adapter("a1", "/a1", digest="d1")
        first, second = (server.changes for server in made.servers)
        done = made._ask(0, first.load(adapter, "k", TIMEOUT_S, replace=False))
        made.flow()
        assert done.result().outcome is OperationOutcome.DONE
        gone = made.unload(0, 1)
        made.flow()
        assert gone.result().outcome is OperationOutcome.DONE
        again = made._ask(1, second.load(adapter, "k", TIMEOUT_S, replace=False))
        made.flow()
        assert again.result().outcome is OperationOutcome.DONE
        assert [receipt.result["loaded"] for receipt in again.result().receipts] == [False] * ENGINES
        other = made._ask(1, second.unload("a1", "k", TIMEOUT_S))
        made.flow()
        assert other.result().outcome is OperationOutcome.CONFLICT
        assert other.result().reason == "Idempotency-Key 'k' was used for: load a1 d1, not for: unload a1"


def test_no_more_than_the_engines_hold() -> None:
    with world() as made:
        changes = made.servers[0].changes
        for number in range(MAX_ADAPTERS):
            adapter = Adapter(f"n{number}", f"/{number}", digest=str(number))
            made._ask(0, changes.load(adapter, f"k{number}", TIMEOUT_S, replace=False))
            made.flow()
        refused = made._ask(0, changes.load(Adapter("n", "/n"), "k", TIMEOUT_S, replace=False))
        made.flow()
        assert isinstance(refused.exception(), TooManyAdapters)
        assert str(MAX_ADAPTERS) in str(refused.exception())


def test_paths_that_take_too_many_bytes() -> None:
    with world() as made:
        changes = made.servers[0].changes
        refused = made._ask(
            0, changes.load(Adapter("n", "/" + "p" * (1 << 18)), "k", TIMEOUT_S, replace=False)
        )
        made.flow()
        assert isinstance(refused.exception(), TooManyAdapters)
        assert "255" in str(refused.exception()) or "256 KiB" in str(refused.exception())


def test_a_stream_of_a_replaced_adapter_gets_the_earlier_one_until_an_engine_has_the_other() -> None:
    with world() as made:
        made.load(0, 1)
        made.flow()
        registry = made.servers[1].view.adapters
        made.load(0, 4)
        made.report(0)
        made.order(1)
        assert registry.adapters["a1"].digest == "d4"
        known = registry.get("a1")
        assert known is not None
        assert known.digest == "d1"
        made.flow()
        known = registry.get("a1")
        assert known is not None
        assert known.digest == "d4"


def test_an_adapter_that_is_replaced_in_vain_is_still_there_although_its_files_are_not() -> None:
    with world() as made:
        made.load(0, 1)
        made.flow()
        for rank in range(ENGINES):
            made.lose_files(1, rank)  # they were overwritten by those of the other one
        made.lose_files(4, rank=1)
        asked = made.load(0, 4)
        made.flow()
        assert asked.result().outcome is OperationOutcome.ABORTED
        assert asked.result().receipts[1].error == "adapter a1: its files are gone"
        assert [engine.table.digests() for engine in made.engines] == [{"a1": "d1"}] * ENGINES
        check_lists(made)


def test_a_load_of_what_is_being_replaced_in_vain_waits_until_it_is_back() -> None:
    with world() as made:
        made.load(0, 1)
        made.flow()
        made.lose_files(4, rank=1)
        made.load(0, 4)
        made.report(0)
        made.order(0)
        made.order(1)
        made.exchange(0)
        assert [engine.table.digests() for engine in made.engines] == [{"a1": "d4"}, {"a1": "d1"}]
        made.report(0)
        made.order(1)
        again = made.load(1, 1)
        assert not again.done()
        made.flow()
        assert again.result().outcome is OperationOutcome.DONE
        assert [receipt.result["digest"] for receipt in again.result().receipts] == ["d1"] * ENGINES
