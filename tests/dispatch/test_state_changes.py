"""Desired states that everybody gets to, over links that break, with parts that die at any moment."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.dispatch.engine_rpc import OperationOutcome, OperationResult, Receipt
from penstock.dispatch.weight_changes import WeightUpdate
from penstock.wire.messages import SLEEP, WEIGHTS
from penstock.wire.weights.desired import DesiredWeights, WeightSource
from tests.dispatch.state_world import ENGINES, SERVERS, TIMEOUT_S, World, world


def act(made: World, name: str, server: int, argument: int) -> None:
    """``argument``: what a change is to be, otherwise an engine."""
    getattr(made, name)(server, argument if name in CHANGES else argument % ENGINES)
    made.loop.turn()
    made.check_gates()
    made.check_weights()


CHANGES = ("change", "pause", "update", "lose_weights")
EVENTS = [
    *CHANGES,
    *("change", "update") * 2,
    "break_copy",
    *("deliver",) * 6,
    *("answer",) * 6,
    *("order",) * 4,
    *("report",) * 6,
    "cut",
    "connect",
    "connect",
    "kill_engine",
    "kill_server",
    "fill",
    "occupy",
    "wait",
    *("follow",) * 3,
]
STEPS = st.lists(
    st.tuples(st.sampled_from(EVENTS), st.integers(0, SERVERS - 1), st.integers(0, 3)), max_size=60
)


def play(steps: list[tuple[str, int, int]], *, lockstep: bool) -> None:
    with world(lockstep=lockstep) as made:
        for name, server, argument in steps:
            if name == "follow":
                made.follow(server)
                made.check_gates()
                made.check_weights()
            else:
                act(made, name, server, argument)
        made.heal()
        made.check_healed()


@settings(max_examples=60)
@given(STEPS, st.booleans())
def test_whatever_happens_all_get_to_what_is_desired(
    steps: list[tuple[str, int, int]], lockstep: bool
) -> None:
    play(steps, lockstep=lockstep)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=2000)
@given(STEPS, st.booleans())
def test_whatever_happens_in_many_ways(steps: list[tuple[str, int, int]], lockstep: bool) -> None:
    play(steps, lockstep=lockstep)


def outcome_of(made: World, server: int = 0, place: int = -1) -> OperationResult:
    found: OperationResult = made.servers[server].asked[place].result()
    return found


def errors_of(change: OperationResult) -> list[str | None]:
    return [receipt.error for receipt in change.receipts]


def test_undisturbed() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.flow()
        change = outcome_of(made)
        assert change.outcome is OperationOutcome.DONE
        assert change.receipts == [Receipt(rank, 0, 0, result={"level": 1}) for rank in range(ENGINES)]
        assert [engine.made for engine in made.engines] == [[1], [1]]
        act(made, "change", 1, 0)
        made.flow()
        assert outcome_of(made, 1).outcome is OperationOutcome.DONE
        made.check_healed()


def test_of_two_at_a_time_one_is_made() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        act(made, "change", 1, 0)
        made.flow()
        outcomes = [outcome_of(made, server) for server in range(SERVERS)]
        assert [change.outcome for change in outcomes] == [OperationOutcome.DONE, OperationOutcome.CONFLICT]
        assert errors_of(outcomes[1]) == ["another change of sleep is under way or came first"] * ENGINES
        act(made, "change", 0, 0)
        act(made, "order", 0, 0)
        act(made, "report", 0, 0)
        act(made, "order", 0, 0)
        act(made, "change", 0, 1)  # refused here, while the other one is under way
        assert outcome_of(made, 0).outcome is OperationOutcome.CONFLICT
        made.heal()
        made.check_healed()
        assert [engine.made for engine in made.engines] == [[1, 0], [1, 0]]


def test_one_that_cannot_keeps_all_from_it() -> None:
    with world() as made:
        made.engines[1].can_sleep = False
        act(made, "change", 0, 1)
        made.flow()
        change = outcome_of(made)
        assert change.outcome is OperationOutcome.ABORTED
        assert change.receipts[1].error == "this engine cannot sleep"
        assert change.receipts[0].error == "the change was rolled back: engine 1: this engine cannot sleep"
        assert [engine.made for engine in made.engines] == [[], []]
        made.heal()
        made.check_healed()


def test_one_that_fails_at_the_end_has_the_others_go_back() -> None:
    with world() as made:
        act(made, "fill", 0, 1)
        act(made, "change", 0, 1)
        made.flow()
        change = outcome_of(made)
        assert change.outcome is OperationOutcome.ABORTED
        assert change.receipts[1].error == "MemoryError: no room"
        assert [engine.made for engine in made.engines] == [[1, 0], []]
        made.heal()
        made.check_healed()


def test_one_that_cannot_wake_has_the_others_sleep_again() -> None:
    with world(lockstep=True) as made:
        act(made, "change", 0, 1)
        made.flow()
        act(made, "fill", 0, 1)
        act(made, "change", 1, 0)
        made.flow()
        change = outcome_of(made, 1)
        assert change.outcome is OperationOutcome.ABORTED
        assert change.receipts[1].error == "MemoryError: no room"
        assert [engine.made for engine in made.engines] == [[1, 0, 1], [1]]
        made.heal()
        made.check_healed()


def test_the_caller_gets_the_error_also_by_another_api_server() -> None:
    with world() as made:
        made.engines[1].can_sleep = False
        act(made, "change", 0, 1)
        act(made, "report", 0, 0)
        act(made, "order", 0, 0)
        act(made, "cut", 0, 1)
        made.follow(1)  # its engines tell this one, which reports it
        act(made, "order", 0, 0)
        made.loop.now += TIMEOUT_S
        act(made, "wait", 0, 0)
        change = outcome_of(made)
        assert change.outcome is OperationOutcome.ABORTED
        assert errors_of(change)[1] == "this engine cannot sleep"
        made.heal()
        made.check_healed()


def test_an_engine_that_is_started_again_gets_to_what_is_desired() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.flow()
        act(made, "kill_engine", 0, 0)
        assert made.engines[0].level == 0
        act(made, "connect", 0, 0)
        assert not made.servers[0].view.engines[0].up_to_date
        assert not made.servers[0].view.engines[0].accepts_streams
        made.flow()
        made.check_healed()
        assert made.engines[0].made == [1]


def test_an_engine_that_is_started_again_while_all_are_awake_gets_no_streams_before_it_knows() -> None:
    with world() as made:
        for level in (1, 0):
            act(made, "change", 0, level)
            made.flow()
        act(made, "kill_engine", 0, 0)
        act(made, "connect", 0, 0)
        assert not made.servers[0].view.engines[0].accepts_streams
        made.flow()
        assert made.servers[0].view.engines[0].accepts_streams


def test_who_was_asked_dies_when_all_have_observed_it() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        for _ in range(6):
            made.follow(0)
            made.follow(1)
        assert made.records["1"].settled
        act(made, "kill_server", 0, 0)
        made.flow()
        assert [engine.made for engine in made.engines] == [[1], [1]]
        made.check_healed()


def test_who_was_asked_dies_before() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.follow(0)
        made.exchange(0)
        assert [engine.sleep.refusal() is None for engine in made.engines] == [True, True]
        made.follow(0)
        assert [engine.sleep.refusal() is None for engine in made.engines] == [False, False]
        act(made, "kill_server", 0, 0)
        made.flow()
        assert [engine.made for engine in made.engines] == [[], []]
        assert made.records["1"].error == "the API server that was asked has ended"
        made.check_healed()


def test_an_engine_that_does_not_answer() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        act(made, "report", 0, 0)
        act(made, "order", 0, 0)
        act(made, "deliver", 0, 0)
        while made.links[0, 0].answers:
            act(made, "answer", 0, 0)
        act(made, "wait", 0, 0)
        assert not made.servers[0].asked[0].done()
        for _ in range(2):
            act(made, "report", 0, 0)
        act(made, "order", 0, 0)
        act(made, "wait", 0, 0)
        change = outcome_of(made)
        assert change.outcome is OperationOutcome.ABORTED
        assert [receipt.code for receipt in change.receipts] == ["aborted", "timeout"]
        assert change.receipts[1].error == "no answer within 10 s"
        made.heal()
        made.check_healed()
        assert [engine.made for engine in made.engines] == [[], []]


def test_a_supervisor_that_does_not_answer() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        act(made, "wait", 0, 0)
        act(made, "wait", 0, 0)
        change = outcome_of(made)
        assert change.outcome is OperationOutcome.UNDECIDED
        assert [receipt.code for receipt in change.receipts] == ["undecided"] * ENGINES


def test_an_api_server_that_has_not_heard_keeps_it_from_being_done() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        for _ in range(4):
            made.follow(0)
        assert [engine.made for engine in made.engines] == [[], []], "it may still give them streams"
        assert not made.servers[0].asked[0].done()
        act(made, "wait", 0, 0)
        for _ in range(3):
            made.follow(0)
        act(made, "wait", 0, 0)
        change = outcome_of(made)
        assert change.outcome is OperationOutcome.ABORTED
        assert [receipt.code for receipt in change.receipts] == ["aborted"] * ENGINES
        made.heal()
        made.check_healed()


def test_an_api_server_whose_engines_have_not_answered_keeps_it_from_being_done() -> None:
    """Until they have, it gives its engines no streams: a client that was told of the change is refused."""
    with world() as made:
        act(made, "change", 0, 0)
        for _ in range(4):
            made.follow(0)
            act(made, "order", 1, 0)
            act(made, "deliver", 1, 0)
            while made.links[1, 0].answers:
                act(made, "answer", 1, 0)
            made.report(1)
        engines = made.servers[1].view.engines
        assert [engine.closed for engine in engines] == ["", "sleeping"]
        assert not made.servers[0].asked[0].done()
        act(made, "cut", 1, 1)
        made.report(1)
        act(made, "order", 0, 0)  # an engine that is gone is not waited for
        assert outcome_of(made).outcome is OperationOutcome.DONE
        made.heal()
        made.check_healed()


def test_an_engine_that_starts_too_late_is_told_of() -> None:
    """All that are there have observed the change, so it holds."""
    with world() as made:
        for server in range(SERVERS):
            act(made, "cut", server, 1)
        act(made, "change", 0, 1)
        for _ in range(6):
            made.follow(0)
            made.follow(1)
        assert made.records["1"].settled
        assert not made.servers[0].asked[0].done()
        act(made, "wait", 0, 0)
        change = outcome_of(made)
        assert change.outcome is OperationOutcome.PARTIAL
        assert errors_of(change) == [None, "not connected within 10 s"]
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
        assert change.outcome is OperationOutcome.DONE
        assert [receipt.repeated for receipt in change.receipts] == [True, True]
        assert [engine.made for engine in made.engines] == [[1], [1]]


def test_the_same_change_by_both_at_a_time() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.changes = 0
        act(made, "change", 1, 1)
        made.flow()
        assert {outcome_of(made, server).outcome for server in range(SERVERS)} == {OperationOutcome.DONE}
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
        assert change.outcome is OperationOutcome.DONE
        # it was made, and what holds by then is told
        assert [(receipt.repeated, receipt.result) for receipt in change.receipts] == [
            (True, {"level": 0})
        ] * ENGINES
        assert [engine.level for engine in made.engines] == [0, 0]
        made.check_healed()


def test_a_key_stands_for_one_change() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.flow()
        states = made.servers[1].states
        other = made._ask(1, states.change(SLEEP, "1", "wake_up", [{"level": 0}], TIMEOUT_S))
        made.flow()
        result = other.result()
        assert (result.outcome, result.receipts) == (OperationOutcome.CONFLICT, [])
        assert result.reason == "Idempotency-Key '1' was used for: sleep 1, not for: wake_up"


@pytest.mark.parametrize("servers", [(0, 0, 1), (1, 0, 1)])
def test_of_calls_with_one_key_at_the_same_time_one_makes_the_change(servers: tuple[int, ...]) -> None:
    with world() as made:
        asked = [
            made._ask(
                server,
                made.servers[server].states.change(SLEEP, "k", "sleep 1", [{"level": 1}], TIMEOUT_S),
            )
            for server in servers
        ]
        made.flow()
        results = [each.result() for each in asked]
        assert {result.outcome for result in results} == {OperationOutcome.DONE}
        repeated = [{receipt.repeated for receipt in result.receipts} for result in results]
        assert sorted(map(list, repeated)) == [[False], [True], [True]]
        assert [engine.made for engine in made.engines] == [[1], [1]]
        made.heal()
        made.check_healed()


def test_of_calls_with_one_key_at_the_same_time_those_for_something_else_are_conflicts() -> None:
    with world() as made:
        for server, level in ((0, 1), (1, 0)):
            change = made.servers[server].states.change(
                SLEEP, "k", f"sleep {level}", [{"level": level}], TIMEOUT_S
            )
            made._ask(server, change)
        made.flow()
        assert outcome_of(made, 0).outcome is OperationOutcome.DONE
        refused = outcome_of(made, 1)
        assert (refused.outcome, refused.receipts) == (OperationOutcome.CONFLICT, [])
        assert refused.reason == "Idempotency-Key 'k' was used for: sleep 1, not for: sleep 0"


def test_a_change_that_was_rolled_back_may_be_tried_again_with_its_key() -> None:
    with world() as made:
        made.engines[1].can_sleep = False
        act(made, "change", 0, 1)
        made.flow()
        assert outcome_of(made).outcome is OperationOutcome.ABORTED
        made.engines[1].can_sleep = True
        made.changes = 0
        act(made, "change", 1, 1)
        made.flow()
        assert outcome_of(made, 1).outcome is OperationOutcome.DONE
        made.heal()
        made.check_healed()


def test_a_rollback_that_takes_its_time_makes_way_for_the_next_change() -> None:
    with world() as made:
        act(made, "occupy", 0, 1)
        act(made, "change", 0, 1)
        made.flow()
        act(made, "wait", 0, 0)
        made.report(0)
        for server in range(SERVERS):
            act(made, "order", server, 0)
        assert made.records["1"].error.endswith("within 10 s")
        act(made, "change", 1, 0)  # before any engine has observed the rollback
        made.flow()
        assert outcome_of(made, 1).outcome is OperationOutcome.DONE
        made.heal()
        made.check_healed()


def test_set_back_to_less_sleep_one_that_sleeps_more_stays_as_it_is() -> None:
    with world() as made:
        act(made, "change", 0, 1)
        made.flow()
        act(made, "fill", 0, 1)
        act(made, "change", 0, 2)
        made.flow()
        assert outcome_of(made).outcome is OperationOutcome.ABORTED
        assert [engine.level for engine in made.engines] == [2, 1]
        made.heal()
        made.check_healed()
        act(made, "change", 1, 0)
        made.flow()
        assert outcome_of(made, 1).outcome is OperationOutcome.DONE
        made.check_healed()


def test_in_lock_step_no_engine_gets_streams_before_all_are_awake() -> None:
    with world(lockstep=True) as made:
        act(made, "change", 0, 1)
        made.flow()
        act(made, "change", 0, 0)
        act(made, "report", 0, 0)
        act(made, "order", 0, 0)
        act(made, "deliver", 0, 0)
        while made.links[0, 0].answers:
            act(made, "answer", 0, 0)
        assert [engine.level for engine in made.engines] == [0, 1]
        assert not any(engine.accepts_streams for engine in made.servers[0].view.engines)
        made.flow()
        assert all(engine.accepts_streams for engine in made.servers[0].view.engines)


def test_a_change_that_was_given_up_stays_given_up_although_all_have_observed_it_then() -> None:
    with world() as made:
        act(made, "change", 0, 0)
        act(made, "report", 0, 0)
        made.follow(1)
        act(made, "order", 0, 0)
        act(made, "wait", 0, 0)  # that it is given up waits in the channel to the supervisor
        made.exchange(0)
        made.flow()
        assert made.records["1"].error == "not everybody made it within 10 s"
        assert outcome_of(made).outcome is OperationOutcome.ABORTED
        made.heal()
        made.check_healed()


def started(made: World, *numbers: int) -> None:
    """Weights are updated, one after the other."""
    for number in numbers:
        act(made, "update", 0, number)
        made.flow()
        assert outcome_of(made).outcome is OperationOutcome.DONE


def versions(made: World) -> list[list[str | None]]:
    return [[engine.weight_version for engine in server.view.engines] for server in made.servers]


def test_weights_that_are_added_come_with_all_before_to_an_engine_that_starts_again() -> None:
    with world() as made:
        started(made, 0, 1, 3)
        act(made, "kill_engine", 0, 1)
        act(made, "connect", 0, 1)
        engine = made.servers[0].view.engines[1]
        assert (engine.weight_version, engine.closed) == ("default", "weights")
        made.flow()
        assert [engine.weights.copied for engine in made.engines] == [["/w0", "/w1", "/w3"]] * ENGINES
        started(made, 2)
        assert [engine.weights.copied for engine in made.engines] == [["/w2"]] * ENGINES
        assert versions(made) == [["v2"] * ENGINES] * SERVERS
        made.check_healed()


def test_the_same_weights_again_are_not_copied_again() -> None:
    with world() as made:
        started(made, 0)
        act(made, "update", 1, 0)
        made.flow()
        receipts = outcome_of(made, 1).receipts
        assert [receipt.repeated for receipt in receipts] == [True] * ENGINES
        assert made.generation(WEIGHTS) == 1


def test_the_same_weights_by_both_at_a_time() -> None:
    with world() as made:
        act(made, "update", 0, 0)
        act(made, "update", 1, 0)
        made.flow()
        assert {outcome_of(made, server).outcome for server in range(SERVERS)} == {OperationOutcome.DONE}
        assert made.generation(WEIGHTS) == 1


def test_a_version_stands_for_its_sources() -> None:
    with world() as made:
        started(made, 0)
        other = WeightUpdate(DesiredWeights("v0", [WeightSource("/other")]), whole=True)
        asked = made._ask(1, made.servers[1].weights.update(other, "another key", TIMEOUT_S))
        made.flow()
        assert asked.result().outcome is OperationOutcome.CONFLICT
        assert "'v0' is in use for other sources" in asked.result().reason


def test_engines_take_streams_with_what_they_have_until_an_update_is_settled() -> None:
    with world() as made:
        started(made, 0)
        act(made, "update", 0, 2)
        act(made, "report", 0, 0)
        act(made, "order", 0, 0)
        act(made, "deliver", 0, 0)
        act(made, "answer", 0, 0)
        assert [engine.accepts_streams for engine in made.servers[0].view.engines] == [True, True]
        assert versions(made)[0] == ["v2", "v0"]
        act(made, "kill_engine", 0, 1)
        act(made, "connect", 0, 1)
        assert not made.servers[0].view.engines[1].accepts_streams
        made.flow()
        assert versions(made) == [["v2"] * ENGINES] * SERVERS


@pytest.mark.parametrize("lockstep", [False, True])
def test_one_that_cannot_copy_has_the_others_go_back(lockstep: bool) -> None:
    with world(lockstep=lockstep) as made:
        started(made, 0)
        act(made, "break_copy", 1, 0)
        act(made, "update", 0, 2)
        made.flow()
        change = outcome_of(made)
        assert change.outcome is OperationOutcome.ABORTED
        assert errors_of(change)[1] == "OSError: a file cannot be read any more"
        made.heal()
        assert [engine.weights.copied for engine in made.engines] == [["/w0"]] * ENGINES
        made.check_healed()


def test_the_first_update_of_engines_in_lock_step_is_rolled_back_in_lock_step() -> None:
    with world(lockstep=True) as made:
        act(made, "break_copy", 1, 0)
        act(made, "update", 0, 2)
        made.flow()
        assert outcome_of(made).outcome is OperationOutcome.ABORTED
        assert made.generation(WEIGHTS) == 4  # hold, copy, hold, and what was there at the start
        assert [engine.weights.copied for engine in made.engines] == [[], []]
        made.check_healed()


def test_paused_engines_that_keep_streams_take_new_ones() -> None:
    with world() as made:
        for number, accepts in ((2, True), (0, False), (3, True)):  # keep, abort, go on
            act(made, "pause", 0, number)
            made.flow()
            assert outcome_of(made).outcome is OperationOutcome.DONE
            for server in made.servers:
                assert [engine.accepts_streams for engine in server.view.engines] == [accepts] * ENGINES
                assert server.view.states.closed() == ("" if accepts else "paused")
        made.check_healed()
