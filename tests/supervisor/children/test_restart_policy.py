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


def test_gives_up_after_three_failed_starts_in_a_row() -> None:
    policy = RestartPolicy()
    assert [policy.next_delay(0.0), policy.next_delay(1.0), policy.next_delay(1000.0)] == [
        FIRST_DELAY_S,
        2 * FIRST_DELAY_S,
        None,
    ]


def test_a_start_that_works_forgives_those_that_did_not() -> None:
    policy = RestartPolicy()
    policy.next_delay(0.0)
    policy.next_delay(1.0)
    policy.on_ready(2.0)
    assert policy.next_delay(3.0) is not None
    assert policy.next_delay(4.0) is not None
    assert policy.next_delay(5.0) is not None
    assert policy.next_delay(6.0) is None


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
def test_never_waits_longer_than_the_limit_nor_gives_up_early(events: list[tuple[bool, float]]) -> None:
    policy, now, failed = RestartPolicy(), 0.0, 0
    for works, lasted in events:
        now += lasted
        if works:
            policy.on_ready(now)
            now += lasted
        failed = 0 if works else failed + 1
        delay = policy.next_delay(now)
        if failed >= MAX_FAILED_STARTS:
            assert delay is None
            return
        assert delay is not None
        assert FIRST_DELAY_S <= delay <= MAX_DELAY_S
