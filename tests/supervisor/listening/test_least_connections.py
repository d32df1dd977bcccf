from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.supervisor.listening.least_connections import STALL_S, LeastConnectionsBalancer
from penstock.wire.handover import HandoverReport


def spread_of(*servers: str) -> LeastConnectionsBalancer[str]:
    """Servers that accept, without connections."""
    spread: LeastConnectionsBalancer[str] = LeastConnectionsBalancer()
    for server in servers:
        spread.add(server)
        spread.on_report(server, HandoverReport(0, 0, True), 0.0)
    return spread


def give(spread: LeastConnectionsBalancer[str], now: float = 0.0) -> str | None:
    server = spread.choose()
    if server is not None:
        spread.connection_sent(server, now)
    return server


def test_equals_take_turns() -> None:
    spread = spread_of("a", "b", "c")
    assert [give(spread) for _ in range(7)] == ["a", "b", "c", "a", "b", "c", "a"]


def test_the_one_with_the_fewest_open_connections_gets_the_next() -> None:
    spread = spread_of("a", "b")
    for _ in range(8):
        give(spread)
    spread.on_report("a", HandoverReport(taken=4, open=4, accepts=True), 0.0)
    spread.on_report("b", HandoverReport(taken=4, open=1, accepts=True), 0.0)
    assert [give(spread) for _ in range(4)] == ["b", "b", "b", "a"]


def test_connections_on_their_way_count() -> None:
    spread = spread_of("a", "b")
    for _ in range(8):
        give(spread)
    spread.on_report("a", HandoverReport(taken=2, open=0, accepts=True), 0.0)  # two more are on their way
    spread.on_report("b", HandoverReport(taken=4, open=1, accepts=True), 0.0)
    assert [give(spread), give(spread)] == ["b", "a"]


def test_nobody_gets_one_before_it_accepts_or_after() -> None:
    spread: LeastConnectionsBalancer[str] = LeastConnectionsBalancer()
    spread.add("a")
    assert spread.choose() is None
    spread.on_report("a", HandoverReport(0, 0, True), 0.0)
    assert spread.choose() == "a"
    spread.on_report("a", HandoverReport(0, 0, False), 0.0)
    assert spread.choose() is None


def test_one_that_left_gets_none() -> None:
    spread = spread_of("a", "b")
    spread.remove("a")
    assert [give(spread), give(spread)] == ["b", "b"]


def test_one_without_room_is_passed_over_until_it_reports() -> None:
    spread = spread_of("a", "b")
    spread.connection_refused("a", 0.0)
    assert [give(spread), give(spread)] == ["b", "b"]
    spread.connection_refused("b", 0.0)
    assert spread.choose() is None
    spread.on_report("a", HandoverReport(0, 0, True), 0.0)
    assert spread.choose() == "a"


def test_one_without_room_is_asked_after_a_while_though_nothing_waits_for_it() -> None:
    spread = spread_of("a")
    spread.connection_refused("a", 10.0)
    assert list(spread.stalled(10.0 + STALL_S)) == ["a"]
    spread.on_report("a", HandoverReport(0, 0, True), 20.0)
    assert (spread.choose(), spread.next_stall()) == ("a", None)


def test_one_that_takes_nothing_in_time_hangs_and_is_passed_over_until_it_reports() -> None:
    spread = spread_of("a", "b")
    give(spread, 10.0)
    give(spread, 10.5)
    spread.on_report("b", HandoverReport(taken=1, open=1, accepts=True), 10.6)
    assert spread.next_stall() == 10.0 + STALL_S
    assert list(spread.stalled(10.0 + STALL_S)) == ["a"]
    spread.connections_taken_back("a", 1)
    assert (spread.next_stall(), list(spread.stalled(99.0))) == (None, [])
    assert [give(spread, 12.0), give(spread, 12.0)] == ["b", "b"]
    spread.on_report("a", HandoverReport(0, 0, True), 12.0)
    assert give(spread, 12.0) == "a"


@pytest.mark.parametrize(("taken", "stalls_at"), [(0, 10.0), (1, 10.8)])
def test_each_one_that_is_taken_renews_the_time(taken: int, stalls_at: float) -> None:
    spread = spread_of("a")
    give(spread, 10.0)
    give(spread, 10.5)
    spread.on_report("a", HandoverReport(taken=taken, open=taken, accepts=True), 10.8)
    assert spread.next_stall() == stalls_at + STALL_S


@given(st.data())
def test_connections_differ_by_one_at_most_however_they_open(data: st.DataObject) -> None:
    """Whatever is reported late, servers that began empty stay even while nothing closes."""
    spread = spread_of("a", "b", "c")
    counts: Counter[str] = Counter()
    for _ in range(data.draw(st.integers(1, 40))):
        if data.draw(st.booleans()):
            server = data.draw(st.sampled_from("abc"))
            taken = data.draw(st.integers(0, counts[server]))
            spread.on_report(server, HandoverReport(taken, taken, True), 0.0)
        else:
            server = give(spread)
            assert server is not None
            counts[server] += 1
        values = [counts[server] for server in "abc"]
        assert max(values) - min(values) <= 1
