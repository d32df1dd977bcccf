from __future__ import annotations

from penstock.supervisor.children.actions import ProcessName
from penstock.supervisor.children.agreed_state_store import AgreedStateStore
from penstock.wire.control import AgreedState, AgreedStates, ProposeState

ZERO, ONE = ProcessName("api-server", 0), ProcessName("api-server", 1)


def proposal(key: str, base: int, level: int = 1, name: str = "sleep") -> ProposeState:
    return ProposeState(name=name, key=key, base=base, arguments={"level": level})


def test_the_first_of_two_that_began_alike_is_decided() -> None:
    store = AgreedStateStore()
    assert store.propose(proposal("a", 0))
    assert not store.propose(proposal("b", 0, 2))
    assert store.agreed.states == [AgreedState(name="sleep", key="a", version=1, arguments={"level": 1})]
    assert store.propose(proposal("c", 1, 0))
    assert [(state.key, state.version) for state in store.agreed.states] == [("c", 2)]


def test_states_have_versions_of_their_own() -> None:
    store = AgreedStateStore()
    store.propose(proposal("a", 0))
    assert store.propose(proposal("b", 0, name="adapters"))
    assert store.propose(proposal("c", 1))
    assert {state.name: state.version for state in store.agreed.states} == {"sleep": 3, "adapters": 2}
    assert store.agreed.revision == 3


def test_adopted_by_all_that_serve() -> None:
    store = AgreedStateStore()
    store.propose(proposal("a", 0))
    store.confirm(ZERO, 1)
    assert not store.advance_adopted([ZERO, ONE])
    store.confirm(ONE, 1)
    assert store.advance_adopted([ZERO, ONE])
    assert store.agreed.adopted == 1
    assert not store.advance_adopted([ZERO, ONE])


def test_one_that_comes_back_confirms_again() -> None:
    store = AgreedStateStore()
    store.confirm(ONE, 1)
    store.forget(ONE)
    store.propose(proposal("a", 0))
    store.confirm(ZERO, 1)
    assert not store.advance_adopted([ZERO, ONE])
    assert store.advance_adopted([ZERO])
    assert not store.advance_adopted([])


def test_what_is_agreed_from_the_start() -> None:
    state = AgreedState(name="adapters", key="start", version=1, arguments={"adapters": []})
    store = AgreedStateStore(AgreedStates(revision=1, adopted=0, states=[state]))
    assert not store.propose(proposal("a", 0, name="adapters"))
    assert store.propose(proposal("a", 1, name="adapters"))
    assert [(state.key, state.version) for state in store.agreed.states] == [("a", 2)]
