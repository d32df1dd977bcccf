from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.desired_state_store import DesiredStateStore
from penstock.wire.control import MAX_CHANGES, MAX_STATES, ChangeRecord, ChangeState, StateReport
from penstock.wire.messages import DesiredState

ZERO, ONE = ProcessName("api-server", 0), ProcessName("api-server", 1)


def asked(
    key: str, base: int, level: int = 1, name: str = "sleep", first: Sequence[dict[str, Any]] = ()
) -> ChangeState:
    stages = [*first, level_of(level)]
    return ChangeState(name=name, key=key, asked=f"{name} {level}", base=base, stages=stages)


def level_of(level: int) -> dict[str, Any]:
    return {"level": level}


def state_of(store: DesiredStateStore, name: str = "sleep") -> DesiredState:
    return {state.name: state for state in store.table().states}[name]


def settle(store: DesiredStateStore, name: str = "sleep") -> None:
    """API server 0, which is alone, reaches what is set."""
    reach(store, ZERO, state_of(store, name).generation, name)
    assert store.advance([ZERO]) == (True, [])


def reach(store: DesiredStateStore, server: ProcessName, generation: int, name: str = "sleep") -> None:
    store.report(server, {name: StateReport(generation)})


def roll_back(
    store: DesiredStateStore, generation: int, *, name: str = "sleep", rank: int | None = None
) -> bool:
    """API server 0, which is alone, reports an error."""
    store.report(ZERO, {name: StateReport(generation, "no room", rank)})
    changed, _ = store.advance([ZERO])
    return changed


def test_the_first_of_two_that_began_alike_is_made() -> None:
    store = DesiredStateStore()
    assert store.change(ZERO, asked("a", 0))
    assert not store.change(ONE, asked("b", 0, 2))
    assert state_of(store) == DesiredState("sleep", 1, level_of(1))
    assert not store.change(ONE, asked("b", 1, 2)), "the first one is pending"
    settle(store)
    assert store.change(ONE, asked("c", 1, 0))
    assert state_of(store) == DesiredState("sleep", 2, level_of(0))
    assert [record.key for record in store.table().changes["sleep"]] == ["a", "c"]


def test_states_have_generations_of_their_own() -> None:
    store = DesiredStateStore()
    store.change(ZERO, asked("a", 0))
    assert store.change(ZERO, asked("b", 0, name="adapters"))
    settle(store)
    assert store.change(ZERO, asked("c", 1))
    assert {state.name: state.generation for state in store.table().states} == {"sleep": 2, "adapters": 1}


def test_settled_by_all_that_serve() -> None:
    store = DesiredStateStore()
    store.change(ZERO, asked("a", 0))
    reach(store, ZERO, 1)
    assert store.advance([ZERO, ONE]) == (False, [])
    reach(store, ONE, 1)
    assert store.advance([ZERO, ONE]) == (True, [])
    assert state_of(store).settled
    assert store.table().changes["sleep"] == [ChangeRecord("a", "sleep 1", 1, settled=True)]
    assert store.advance([ZERO, ONE]) == (False, [])


def test_one_that_comes_back_observes_again() -> None:
    store = DesiredStateStore()
    reach(store, ONE, 1)
    store.forget(ONE)
    store.change(ZERO, asked("a", 0))
    reach(store, ZERO, 1)
    assert store.advance([ZERO, ONE]) == (False, [])
    assert store.advance([ZERO, ONE])[0] is False
    assert store.advance([ZERO]) == (True, [])


def test_a_first_stage_must_be_observed_before_the_value_is_set() -> None:
    store = DesiredStateStore()
    store.change(ZERO, asked("a", 0, first=[{"hold": True}]))
    assert state_of(store) == DesiredState("sleep", 1, {"hold": True})
    settle(store)
    assert state_of(store) == DesiredState("sleep", 2, level_of(1))
    assert store.table().changes["sleep"] == [ChangeRecord("a", "sleep 1", 2)]
    assert store.settled() is None
    settle(store)
    assert state_of(store).settled
    assert store.table().changes["sleep"] == [ChangeRecord("a", "sleep 1", 2, settled=True)]


def test_rolled_back_by_a_further_generation() -> None:
    store = DesiredStateStore()
    store.change(ZERO, asked("a", 0, first=[{"hold": True}]))
    settle(store)
    settle(store)
    store.change(ZERO, asked("b", 2, 0))
    assert not roll_back(store, 2), "it is an earlier generation"
    store.report(ZERO, {"sleep": StateReport(3, "no room", 1)})
    assert store.advance([ZERO]) == (True, ["sleep is set back: engine 1: no room"])
    assert not roll_back(store, 3)
    # as it was set at first: in two stages
    assert state_of(store) == DesiredState("sleep", 4, {"hold": True}, rollback=True)
    assert not roll_back(store, 4), "a rollback is not rolled back, and not settled either"
    assert store.table().changes["sleep"][-1] == ChangeRecord("b", "sleep 0", 3, error="no room", rank=1)
    settle(store)
    assert state_of(store) == DesiredState("sleep", 5, level_of(1), rollback=True)
    settle(store)
    assert state_of(store) == DesiredState("sleep", 5, level_of(1), rollback=True, settled=True)
    assert store.table().changes["sleep"][-1].error == "no room"


def test_what_never_had_a_value_goes_back_to_its_default() -> None:
    store = DesiredStateStore()
    store.change(ZERO, asked("a", 0))
    assert roll_back(store, 1)
    assert state_of(store) == DesiredState("sleep", 2, {}, rollback=True)


def test_a_rollback_makes_way_for_the_next_change() -> None:
    store = DesiredStateStore()
    store.change(ZERO, asked("a", 0))
    assert roll_back(store, 1)
    assert store.change(ZERO, asked("b", 2, 2))
    assert roll_back(store, 3)
    assert state_of(store).value == {}, "what was settled last"


def test_what_an_api_server_asked_for_that_has_ended_is_rolled_back() -> None:
    store = DesiredStateStore()
    store.change(ZERO, asked("a", 0))
    store.change(ONE, asked("b", 0, name="adapters"))
    store.forget(ZERO)
    assert store.advance([ONE]) == (True, ["sleep is set back: the API server that was asked has ended"])
    assert state_of(store).rollback
    assert not state_of(store, "adapters").rollback
    assert store.table().changes["sleep"][0].error == "the API server that was asked has ended"
    store.report(ONE, {"adapters": StateReport(1), "sleep": StateReport(2)})
    assert store.advance([ONE]) == (True, [])
    store.forget(ONE)
    assert store.advance([]) == (False, []), "it is settled"


def test_a_key_makes_one_change() -> None:
    store = DesiredStateStore()
    store.change(ZERO, asked("a", 0))
    settle(store)
    assert not store.change(ONE, asked("a", 1))
    store.change(ZERO, asked("b", 1, 2))
    assert roll_back(store, 2)
    assert store.change(ONE, asked("b", 3, 2)), "one that was rolled back may be tried again"
    assert [record.key for record in store.table().changes["sleep"]] == ["a", "b"]


def test_what_there_is_from_the_start() -> None:
    store = DesiredStateStore({"adapters": {"adapters": []}}, key="start")
    assert state_of(store, "adapters") == DesiredState("adapters", 1, {"adapters": []}, settled=True)
    settled = store.settled()
    assert settled is not None
    assert settled.states == [state_of(store, "adapters")]
    assert not store.change(ZERO, asked("a", 0, name="adapters"))
    assert store.change(ZERO, asked("a", 1, name="adapters"))
    assert [(record.key, record.generation) for record in store.table().changes["adapters"]] == [
        ("start", 1),
        ("a", 2),
    ]
    assert store.settled() is None, "what is pending is not settled"
    assert roll_back(store, 2, name="adapters")
    assert state_of(store, "adapters").value == {"adapters": []}


def test_states_and_changes_are_bounded() -> None:
    store = DesiredStateStore()
    for number in range(MAX_STATES):
        assert store.change(ZERO, asked("a", 0, name=str(number)))
    assert not store.change(ZERO, asked("a", 0))
    for number in range(MAX_CHANGES + 5):
        settle(store, "7")
        assert store.change(ZERO, asked(f"{number}", state_of(store, "7").generation, name="7"))
    assert len(store.table().changes["7"]) == MAX_CHANGES
