from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.supervisor.listening.least_connections import STALL_S, LeastConnectionsBalancer
from penstock.wire.handover import HandoverReport


def balancer_of(*servers: str) -> LeastConnectionsBalancer[str]:
    """Servers that accept, without connections."""
    balancer: LeastConnectionsBalancer[str] = LeastConnectionsBalancer()
    for server in servers:
        balancer.add_server(server)
        balancer.on_report(server, HandoverReport(0, 0, True), 0.0)
    return balancer


def give(balancer: LeastConnectionsBalancer[str], now: float = 0.0) -> str | None:
    server = balancer.choose()
    if server is not None:
        balancer.connection_sent(server, now)
    return server


def test_equals_take_turns() -> None:
    balancer = balancer_of("a", "b", "c")
    assert [give(balancer) for _ in range(7)] == ["a", "b", "c", "a", "b", "c", "a"]


def test_the_one_with_the_fewest_open_connections_gets_the_next() -> None:
    balancer = balancer_of("a", "b")
    for _ in range(8):
        give(balancer)
    balancer.on_report("a", HandoverReport(taken=4, open=4, accepts=True), 0.0)
    balancer.on_report("b", HandoverReport(taken=4, open=1, accepts=True), 0.0)
    assert [give(balancer) for _ in range(4)] == ["b", "b", "b", "a"]


def test_connections_on_their_way_count() -> None:
    balancer = balancer_of("a", "b")
    for _ in range(8):
        give(balancer)
    balancer.on_report("a", HandoverReport(taken=2, open=0, accepts=True), 0.0)  # two more are on their way
    balancer.on_report("b", HandoverReport(taken=4, open=1, accepts=True), 0.0)
    assert [give(balancer), give(balancer)] == ["b", "a"]


def test_nobody_gets_one_before_it_accepts_or_after() -> None:
    balancer: LeastConnectionsBalancer[str] = LeastConnectionsBalancer()
    balancer.add_server("a")
    assert balancer.choose() is None
    balancer.on_report("a", HandoverReport(0, 0, True), 0.0)
    assert balancer.choose() == "a"
    balancer.on_report("a", HandoverReport(0, 0, False), 0.0)
    assert balancer.choose() is None


def test_connections_wait_while_too_many_are_on_their_way() -> None:
    balancer: LeastConnectionsBalancer[str] = LeastConnectionsBalancer(max_in_transit=3)
    for server in "ab":
        balancer.add_server(server)
        balancer.on_report(server, HandoverReport(0, 0, True), 0.0)
    assert [give(balancer) for _ in range(4)] == ["a", "b", "a", None]
    balancer.on_report("b", HandoverReport(taken=1, open=1, accepts=True), 0.0)
    assert [give(balancer), give(balancer)] == ["b", None]
    balancer.connections_taken_back("a", 2)
    assert give(balancer) == "a"


def test_one_that_left_gets_none() -> None:
    balancer = balancer_of("a", "b")
    balancer.remove("a")
    assert [give(balancer), give(balancer)] == ["b", "b"]


def test_one_without_room_is_passed_over_until_it_reports() -> None:
    balancer = balancer_of("a", "b")
    balancer.connection_refused("a", 0.0)
    assert [give(balancer), give(balancer)] == ["b", "b"]
    balancer.connection_refused("b", 0.0)
    assert balancer.choose() is None
    balancer.on_report("a", HandoverReport(0, 0, True), 0.0)
    assert balancer.choose() == "a"


def test_one_without_room_is_asked_after_a_while_though_nothing_waits_for_it() -> None:
    balancer = balancer_of("a")
    balancer.connection_refused("a", 10.0)
    assert list(balancer.stalled(10.0 + STALL_S)) == ["a"]
    balancer.on_report("a", HandoverReport(0, 0, True), 20.0)
    assert (balancer.choose(), balancer.next_stall()) == ("a", None)


def test_one_that_takes_nothing_in_time_hangs_and_is_passed_over_until_it_reports() -> None:
    balancer = balancer_of("a", "b")
    give(balancer, 10.0)
    give(balancer, 10.5)
    balancer.on_report("b", HandoverReport(taken=1, open=1, accepts=True), 10.6)
    assert balancer.next_stall() == 10.0 + STALL_S
    assert list(balancer.stalled(10.0 + STALL_S)) == ["a"]
    balancer.connections_taken_back("a", 1)
    assert (balancer.next_stall(), list(balancer.stalled(99.0))) == (None, [])
    assert [give(balancer, 12.0), give(balancer, 12.0)] == ["b", "b"]
    balancer.on_report("a", HandoverReport(0, 0, True), 12.0)
    assert give(balancer, 12.0) == "a"


@pytest.mark.parametrize(("taken", "stalls_at"), [(0, 10.0), (1, 10.8)])
def test_each_one_that_is_taken_renews_the_time(taken: int, stalls_at: float) -> None:
    balancer = balancer_of("a")
    give(balancer, 10.0)
    give(balancer, 10.5)
    balancer.on_report("a", HandoverReport(taken=taken, open=taken, accepts=True), 10.8)
    assert balancer.next_stall() == stalls_at + STALL_S


@given(st.data())
def test_connections_differ_by_one_at_most_however_they_open(data: st.DataObject) -> None:
    """Whatever is reported late, servers that began empty stay even while nothing closes."""
    balancer = balancer_of("a", "b", "c")
    counts: Counter[str] = Counter()
    for _ in range(data.draw(st.integers(1, 40))):
        if data.draw(st.booleans()):
            server = data.draw(st.sampled_from("abc"))
            taken = data.draw(st.integers(0, counts[server]))
            balancer.on_report(server, HandoverReport(taken, taken, True), 0.0)
        else:
            server = give(balancer)
            assert server is not None
            counts[server] += 1
        values = [counts[server] for server in "abc"]
        assert max(values) - min(values) <= 1
