from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.supervisor.children.restart_policy import (
    FIRST_DELAY_S,
    MAX_DELAY_S,
    MAX_FAILED_STARTS,
    STABLE_AFTER_S,
    RestartPolicy,
)


def test_a_child_keeps_failing_from_the_third_failed_start_in_a_row_on() -> None:
    policy = RestartPolicy()
    told = [(policy.next_delay(now), policy.keeps_failing) for now in (0.0, 1.0, 1000.0)]
    assert told == [(FIRST_DELAY_S, False), (2 * FIRST_DELAY_S, False), (4 * FIRST_DELAY_S, True)]


def test_a_child_that_keeps_failing_waits_longer_than_its_usual_limit() -> None:
    policy = RestartPolicy(max_delay=0.15)
    delays = [policy.next_delay(0.0) for _ in range(12)]
    assert delays[:3] == [0.1, 0.15, 0.15]
    assert delays[-1] == MAX_DELAY_S
    policy.on_ready(1.0)
    assert policy.next_delay(2.0) == 0.15


def test_a_start_that_works_forgives_those_that_did_not() -> None:
    policy = RestartPolicy()
    policy.next_delay(0.0)
    policy.next_delay(1.0)
    policy.on_ready(2.0)
    for now in (3.0, 4.0, 5.0):
        policy.next_delay(now)
        assert not policy.keeps_failing
    policy.next_delay(6.0)
    assert policy.keeps_failing


def test_the_delay_grows_to_its_limit_while_deaths_come_soon() -> None:
    policy = RestartPolicy()
    delays = []
    for now in range(12):
        policy.on_ready(float(now))
        delays.append(policy.next_delay(float(now)))
    assert delays[:4] == [FIRST_DELAY_S * 2**power for power in range(4)]
    assert delays[-1] == MAX_DELAY_S


def test_a_child_that_was_stable_starts_over() -> None:
    policy = RestartPolicy()
    for now in (0.0, 1.0, 2.0):
        policy.on_ready(now)
        policy.next_delay(now)
    policy.on_ready(10.0)
    assert policy.next_delay(10.0 + STABLE_AFTER_S) == FIRST_DELAY_S


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1000)), max_size=40))
def test_never_waits_longer_than_the_limit_and_counts_failed_starts(events: list[tuple[bool, float]]) -> None:
    policy, now, failed = RestartPolicy(), 0.0, 0
    for works, lasted in events:
        now += lasted
        if works:
            policy.on_ready(now)
            now += lasted
        failed = 0 if works else failed + 1
        assert FIRST_DELAY_S <= policy.next_delay(now) <= MAX_DELAY_S
        assert policy.keeps_failing == (failed >= MAX_FAILED_STARTS)
