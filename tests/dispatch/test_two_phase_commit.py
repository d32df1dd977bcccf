"""Changes that all engines make or none, over links that break, with parts that die at any moment."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dispatch.engine_rpc import Receipt
from penstock.dispatch.two_phase_change import Outcome, TwoPhaseChange
from tests.dispatch.two_phase_world import ENGINES, SERVERS, World, world


def act(made: World, name: str, server: int, argument: int) -> None:
    getattr(made, name)(server, argument)
    made.loop.turn()


EVENTS = [
    *("change",) * 2,
    *("deliver",) * 6,
    *("answer",) * 6,
    *("order",) * 4,
    "cut",
    "connect",
    "connect",
    "kill_engine",
    "kill_server",
    "fill",
    "occupy",
    "wait",
]
STEPS = st.lists(
    st.tuples(st.sampled_from(EVENTS), st.integers(0, SERVERS - 1), st.integers(0, ENGINES - 1)), max_size=60
)


def play(steps: list[tuple[str, int, int]]) -> None:
    with world() as made:
        for step in steps:
            act(made, *step)
        made.heal()
        made.check_healed()


@settings(max_examples=60)
@given(STEPS)
def test_whatever_happens_all_engines_get_to_what_is_agreed(steps: list[tuple[str, int, int]]) -> None:
    play(steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=2000)
@given(STEPS)
def test_whatever_happens_in_many_ways(steps: list[tuple[str, int, int]]) -> None:
    play(steps)


def outcome_of(made: World, server: int = 0, place: int = -1) -> TwoPhaseChange:
    return made.servers[server].asked[place].result()


def test_undisturbed() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.flow()
        change = outcome_of(made)
        assert change.outcome is Outcome.DONE
        assert change.receipts() == [Receipt(rank, 0, 0, result=1) for rank in range(ENGINES)]
        assert [engine.made for engine in made.engines] == [[1], [1]]
        act(made, "change", 1, 0)
        made.flow()
        assert outcome_of(made, 1).outcome is Outcome.DONE
        made.check_healed()


def test_two_at_a_time() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        act(made, "change", 1, 0)
        act(made, "deliver", 0, 0)
        act(made, "deliver", 1, 1)
        made.flow()
        outcomes = {outcome_of(made, 0).outcome, outcome_of(made, 1).outcome}
        assert Outcome.DONE not in outcomes
        assert outcomes <= {Outcome.CONFLICT, Outcome.ABORTED}
        made.heal()
        made.check_healed()
        assert [engine.made for engine in made.engines] == [[], []]


def test_one_that_cannot_keeps_all_from_it() -> None:
    with world() as made:
        act(made, "fill", 0, 1)
        act(made, "change", 0, 1)
        made.flow()
        change = outcome_of(made)
        assert change.outcome is Outcome.ABORTED
        assert change.receipts()[1].error == "MemoryError: no room"
        assert [engine.held for engine in made.engines] == [None, None]


def test_an_engine_that_is_started_again_gets_to_what_is_agreed() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.flow()
        act(made, "kill_engine", 0, 0)
        assert made.engines[0].level == 0
        act(made, "connect", 0, 0)
        assert not made.servers[0].view.engines[0].up_to_date  # and gets no streams before
        made.flow()
        made.check_healed()
        assert made.engines[0].made == [1]


def test_who_was_asked_dies_after_the_decision() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        for rank in range(ENGINES):
            act(made, "deliver", 0, rank)
            act(made, "answer", 0, rank)
        assert made.keys == {"1"}
        act(made, "kill_server", 0, 0)
        made.flow()
        assert [engine.made for engine in made.engines] == [[1], [1]]
        made.check_healed()


def test_who_was_asked_dies_before_it() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        for rank in range(ENGINES):
            act(made, "deliver", 0, rank)
        assert [engine.held for engine in made.engines] == [1, 1]
        act(made, "kill_server", 0, 0)
        made.flow()
        assert [engine.made for engine in made.engines] == [[], []]
        made.check_healed()


def test_an_engine_that_does_not_answer() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        act(made, "deliver", 0, 0)
        act(made, "answer", 0, 0)
        act(made, "wait", 0, 0)
        act(made, "wait", 0, 0)
        change = outcome_of(made)
        assert change.outcome is Outcome.ABORTED
        assert [receipt.code for receipt in change.receipts()] == ["aborted", "timeout"]
        made.heal()
        made.check_healed()


def test_an_api_server_that_has_not_heard_keeps_it_from_being_done() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        for _ in range(3):
            for rank in range(ENGINES):
                act(made, "deliver", 0, rank)
                act(made, "answer", 0, rank)
            act(made, "order", 0, 0)
        assert [engine.made for engine in made.engines] == [[1], [1]]
        assert not made.servers[0].asked[0].done()
        act(made, "wait", 0, 0)
        change = outcome_of(made)
        assert change.outcome is Outcome.PARTIAL
        assert [receipt.error for receipt in change.receipts()] == [None, None]


def test_an_api_server_whose_engines_have_not_answered_keeps_it_from_being_done() -> None:
    """Until they have, it gives its engines no streams: a client that was told of the change is refused."""
    with world() as made:
        act(made, "change", 0, 1)
        for _ in range(4):
            for rank in range(ENGINES):
                act(made, "deliver", 0, rank)
                act(made, "answer", 0, rank)
            act(made, "order", 0, 0)
            act(made, "order", 1, 0)
            act(made, "deliver", 1, 0)
            act(made, "answer", 1, 0)
        engines = made.servers[1].view.engines
        assert [engine.target_revision for engine in engines] == [1, 1]
        assert not made.servers[0].asked[0].done()
        act(made, "cut", 1, 1)
        act(made, "order", 0, 0)  # an engine that is gone is not waited for
        assert outcome_of(made).outcome is Outcome.DONE
        made.heal()
        made.check_healed()


def test_the_same_change_again_is_not_made_again() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.flow()
        made.changes = 0  # the same key
        act(made, "change", 1, 1)
        made.flow()
        change = outcome_of(made, 1)
        assert change.outcome is Outcome.DONE
        assert [receipt.repeated for receipt in change.receipts()] == [True, True]
        assert [engine.made for engine in made.engines] == [[1], [1]]


def test_the_same_change_by_both_at_a_time() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.changes = 0
        act(made, "change", 1, 1)
        made.flow()
        assert {outcome_of(made, server).outcome for server in range(SERVERS)} == {Outcome.DONE}
        assert [engine.made for engine in made.engines] == [[1], [1]]


def test_the_same_change_after_another_one() -> None:
    with world() as made:
        for server, level in ((0, 1), (0, 0)):
            act(made, "change", server, level)
            made.flow()
        made.changes = 0
        act(made, "change", 1, 1)
        made.flow()
        change = outcome_of(made, 1)
        assert [(receipt.repeated, receipt.result) for receipt in change.receipts()] == [(True, 1), (True, 1)]
        assert [engine.level for engine in made.engines] == [0, 0]
        made.check_healed()
