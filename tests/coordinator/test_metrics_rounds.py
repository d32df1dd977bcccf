"""Rounds: who is asked, who is waited for, and that nobody is waited for twice."""

from __future__ import annotations

from penstock.coordinator.metrics_rounds import ROUND_INTERVAL_S, ROUND_TIMEOUT_S, MetricsRounds
from penstock.wire.coordination import MetricsRequest

ALL = [b"a", b"b", b"c"]


def asked(rounds: MetricsRounds, now: float, members: list[bytes] = ALL) -> list[bytes]:
    requests, answers = rounds.advance(members, now)
    assert not answers
    assert all(isinstance(request, MetricsRequest) for _, request in requests)
    return [identity for identity, _ in requests]


def answered(rounds: MetricsRounds, now: float, members: list[bytes] = ALL) -> list[tuple[bytes, int]]:
    requests, answers = rounds.advance(members, now)
    assert not requests
    return answers


def test_an_answer_comes_when_all_others_have_sent_theirs() -> None:
    rounds = MetricsRounds()
    assert rounds.advance_at() is None
    rounds.add_query(b"a", 7)
    assert asked(rounds, 1.0) == [b"b", b"c"]
    rounds.on_sent(b"b", 1)
    assert answered(rounds, 1.0) == []
    assert rounds.advance_at() == 1.0 + ROUND_TIMEOUT_S
    rounds.on_sent(b"c", 1)
    assert answered(rounds, 1.0) == [(b"a", 7)]
    assert rounds.advance_at() is None


def test_a_query_during_a_round_gets_one_of_its_own() -> None:
    rounds = MetricsRounds()
    rounds.add_query(b"a", 1)
    assert asked(rounds, 0.0) == [b"b", b"c"]
    rounds.add_query(b"b", 1)
    rounds.on_sent(b"b", 1)
    rounds.on_sent(b"c", 1)
    assert answered(rounds, 0.0) == [(b"a", 1)]
    assert rounds.advance_at() == ROUND_INTERVAL_S
    assert asked(rounds, ROUND_INTERVAL_S) == [b"a", b"c"]


def test_one_that_does_not_answer_is_left_out_until_it_does() -> None:
    rounds = MetricsRounds()
    rounds.add_query(b"a", 1)
    assert asked(rounds, 0.0) == [b"b", b"c"]
    rounds.on_sent(b"b", 1)
    assert answered(rounds, ROUND_TIMEOUT_S) == [(b"a", 1)]
    rounds.add_query(b"a", 2)
    assert asked(rounds, 1.0) == [b"b"]
    rounds.on_sent(b"c", 1)
    rounds.on_sent(b"b", 2)
    assert answered(rounds, 1.0) == [(b"a", 2)]
    rounds.add_query(b"a", 3)
    assert asked(rounds, 2.0) == [b"b", b"c"]


def test_one_that_leaves_is_not_waited_for() -> None:
    rounds = MetricsRounds()
    rounds.add_query(b"a", 1)
    assert asked(rounds, 0.0, [b"a", b"b"]) == [b"b"]
    assert answered(rounds, 0.0, [b"a"]) == [(b"a", 1)]


def test_alone() -> None:
    rounds = MetricsRounds()
    rounds.add_query(b"a", 1)
    assert answered(rounds, 0.0, [b"a"]) == [(b"a", 1)]
