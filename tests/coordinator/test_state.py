"""What the coordinator tells whom, and when."""

from __future__ import annotations

import msgspec
import pytest

from penstock.coordinator.state import LEASE_S, MAX_SERVERS, PAUSE_S, CoordinatorState, Outgoing
from penstock.metrics import families as f
from penstock.metrics.board import KEPT_STARTS
from penstock.metrics.merge import totals
from penstock.metrics.snapshot import Series, Snapshot, decode_snapshot, encode_snapshot
from penstock.wire.coordination import (
    COORDINATOR_PROTOCOL_VERSION,
    EngineAddress,
    EngineJoin,
    EngineLoad,
    EngineReport,
    FleetLoad,
    JoinAccepted,
    JoinRejected,
    MemberLeave,
    MetricsAnswer,
    MetricsQuery,
    ProcessMetrics,
    Rejoin,
    ServerJoin,
)
from penstock.wire.messages import WireError
from tests.metrics.views import view_of

TRAITS = {"max_model_len": "4096", "vocab_size": "100", "dtype": "float32"}


def local(rank: int, epoch: int = 0, incarnation: int = 0) -> EngineJoin:
    return EngineJoin(COORDINATOR_PROTOCOL_VERSION, rank, epoch, incarnation, "", TRAITS)


ENGINE, SERVER = local(0), ServerJoin(COORDINATOR_PROTOCOL_VERSION, 1, 0)
BUSY = EngineReport(7, 2, 5, 0.125, [1, 40, 3, 9])


def board() -> CoordinatorState:
    made = CoordinatorState(local_ranks=frozenset((0,)))
    assert made.receive(b"engine", ENGINE, 0.0) == [(b"engine", JoinAccepted())]
    assert made.receive(b"server", SERVER, 0.0) == [(b"server", JoinAccepted())]
    return made


def test_an_api_server_is_told_what_concerns_it() -> None:
    known = board()
    known.receive(b"engine", BUSY, 0.0)
    assert known.take_updates(0.0) == [(b"server", FleetLoad([EngineLoad(0, 0, 7, 2, 5, 0.125, 40)]))]


def test_an_api_server_without_submits_has_none_accepted() -> None:
    known = board()
    known.receive(b"engine", EngineReport(7, 0, 1, 0, [3, 9]), 0.0)
    [(_, news)] = known.take_updates(0.0)
    assert isinstance(news, FleetLoad)
    assert news.engines[0].accepted == 0


def test_news_are_told_once_and_not_too_often() -> None:
    known = board()
    assert known.take_updates(0.0) == []
    assert known.next_update_at() is None
    known.receive(b"engine", BUSY, 0.0)
    assert known.take_updates(10.0)
    assert known.take_updates(10.2) == []
    assert known.next_update_at() is None
    known.receive(b"engine", BUSY, 0.0)
    assert known.take_updates(10.09) == []
    assert known.next_update_at() == 10.1
    assert known.take_updates(10.1)


def test_only_engines_that_changed_are_told() -> None:
    known = board()
    known.receive(b"other", remote(1, 7), 0.0)
    known.receive(b"engine", BUSY, 0.0)
    known.take_updates(0.0)
    known.receive(b"other", EngineReport(1, 0, 0, 0, []), 0.0)
    [(_, news)] = known.take_updates(1.0)
    assert isinstance(news, FleetLoad)
    assert [engine.rank for engine in news.engines] == [1]


def test_an_api_server_that_joins_late_is_told_everything() -> None:
    known = board()
    known.receive(b"engine", BUSY, 0.0)
    known.take_updates(0.0)
    late = ServerJoin(COORDINATOR_PROTOCOL_VERSION, 3, 0)
    assert known.receive(b"late", late, 0.0) == [(b"late", JoinAccepted())]
    assert known.take_updates(1.0) == [(b"late", FleetLoad([EngineLoad(0, 0, 7, 2, 5, 0.125, 9)]))]


def test_what_could_not_be_sent_is_told_again() -> None:
    known = board()
    known.receive(b"engine", BUSY, 0.0)
    told = known.take_updates(0.0)
    known.on_send_failed(b"server", 0.0)
    assert known.take_updates(PAUSE_S / 2) == []
    assert known.next_update_at() == PAUSE_S
    assert known.take_updates(PAUSE_S) == told


def test_an_api_server_that_joins_again_is_told_nothing_twice() -> None:
    known = board()
    known.receive(b"engine", BUSY, 0.0)
    known.take_updates(0.0)
    assert known.receive(b"server", SERVER, 0.0) == []
    assert known.take_updates(1.0) == []


def test_a_successor_takes_its_predecessors_place() -> None:
    known = board()
    known.receive(b"engine", BUSY, 0.0)
    known.receive(b"engine again", local(0, epoch=1), 0.0)
    assert known.receive(b"engine", BUSY, 0.0) == [(b"engine", Rejoin())]
    known.remove_member(b"server")
    known.receive(b"server again", ServerJoin(COORDINATOR_PROTOCOL_VERSION, 1, 1), 0.0)
    known.receive(b"engine again", EngineReport(0, 0, 0, 0, []), 0.0)
    assert known.take_updates(0.0) == [(b"server again", FleetLoad([EngineLoad(0, 1, 0, 0, 0, 0, 0)]))]


def test_strangers_are_asked_to_join() -> None:
    assert CoordinatorState().receive(b"engine", BUSY, 0.0) == [(b"engine", Rejoin())]


def test_who_leaves_is_forgotten() -> None:
    known = board()
    known.receive(b"engine", BUSY, 0.0)
    known.receive(b"server", MemberLeave(), 0.0)
    assert known.take_updates(0.0) == []
    known.receive(b"engine", MemberLeave(), 0.0)
    assert known.receive(b"engine", BUSY, 0.0) == [(b"engine", Rejoin())]


def test_another_protocol_is_refused_by_its_version() -> None:
    [(_, refusal)] = CoordinatorState().receive(
        b"engine", EngineJoin(COORDINATOR_PROTOCOL_VERSION + 1, 0, 0), 0.0
    )
    assert isinstance(refusal, JoinRejected)
    assert str(COORDINATOR_PROTOCOL_VERSION + 1) in refusal.reason


# -- metrics


def metrics_of(
    process: str, epoch: int, sequence: int, incarnation: int = 0, tokens: int = 1
) -> ProcessMetrics:
    series = [Series(f.DELIVERED.name, ("1",), tokens)]
    snapshot = Snapshot(process, epoch, sequence, series, incarnation)
    return ProcessMetrics(process, epoch, sequence, encode_snapshot(snapshot), incarnation)


def test_metrics_go_to_all_other_api_servers() -> None:
    known = board()
    known.receive(b"other", ServerJoin(COORDINATOR_PROTOCOL_VERSION, 2, 0), 0.0)
    metrics = metrics_of("api-server 1", 0, 5)
    known.receive(b"server", metrics, 0.0)
    assert known.take_updates(0.0) == [(b"other", metrics)]
    known.receive(b"server", metrics, 0.0)
    assert known.take_updates(1.0) == [], "it is the same"
    later = metrics_of("api-server 1", 0, 6)
    known.receive(b"server", later, 0.0)
    assert known.take_updates(2.0) == [(b"other", later)]


def test_metrics_of_the_dead_stay() -> None:
    known = board()
    metrics = metrics_of("api-server 1", 0, 5)
    known.receive(b"server", metrics, 0.0)
    known.remove_member(b"server")
    known.receive(b"server again", ServerJoin(COORDINATOR_PROTOCOL_VERSION, 1, 1), 0.0)
    assert known.take_updates(0.0) == [(b"server again", metrics)]


def test_metrics_of_many_restarts_become_one_sum() -> None:
    known = board()
    for epoch in range(500):
        known.receive(b"server", metrics_of("api-server 1", epoch, 5, tokens=10), 0.0)
    known.receive(b"other", ServerJoin(COORDINATOR_PROTOCOL_VERSION, 2, 0), 0.0)
    told = [message for identity, message in known.take_updates(0.0) if identity == b"other"]
    snapshots = [decode_snapshot(message.snapshot) for message in told if isinstance(message, ProcessMetrics)]
    assert len(snapshots) == 1 + KEPT_STARTS
    assert totals(view_of(*snapshots))[f.DELIVERED.name] == {("1",): 5000}


def test_invented_processes_find_no_room() -> None:
    known = board()
    for process in ("stranger 1", "engine 99999", "engine 01", "engine", "engine -1", "api-server 1 "):
        with pytest.raises(WireError, match="no process"):
            known.receive(b"server", metrics_of(process, 0, 1), 0.0)
    few = CoordinatorState(ranks=2, incarnation=7)
    few.receive(b"server", ServerJoin(COORDINATOR_PROTOCOL_VERSION, 1, 0, 7), 0.0)
    with pytest.raises(WireError, match="engine 2, which is no process of this fleet"):
        few.receive(b"server", metrics_of("engine 2", 0, 1), 0.0)
    with pytest.raises(WireError, match="another run of the head"):
        few.receive(b"server", metrics_of("api-server 2", 0, 1, 8), 0.0)
    few.receive(b"server", metrics_of("engine 1", 0, 1, 8), 0.0)
    with pytest.raises(WireError, match="under another name"):
        known.receive(
            b"server", msgspec.structs.replace(metrics_of("engine 1", 0, 1), process="engine 2"), 0.0
        )
    with pytest.raises(WireError, match="not a snapshot"):
        known.receive(b"server", ProcessMetrics("engine 1", 0, 1, b"\xff"), 0.0)


def test_metrics_that_were_shown_are_told_before_the_answer_to_a_query() -> None:
    known = board()
    known.receive(b"other", ServerJoin(COORDINATOR_PROTOCOL_VERSION, 2, 0), 0.0)
    shown = metrics_of("api-server 1", 0, 5)
    known.receive(b"server", shown, 0.0)
    assert known.receive(b"server", MetricsQuery(1), 0.0) == [(b"server", MetricsAnswer(1))]
    assert known.receive(b"other", MetricsQuery(1), 0.0) == [(b"other", shown), (b"other", MetricsAnswer(1))]
    assert known.receive(b"other", MetricsQuery(2), 0.0) == [(b"other", MetricsAnswer(2))]
    assert known.receive(b"stranger", MetricsQuery(1), 0.0) == [(b"stranger", Rejoin())]


def test_metrics_of_strangers_make_them_join() -> None:
    assert CoordinatorState().receive(b"server", ProcessMetrics("api-server 1", 0, 5, b""), 0.0) == [
        (b"server", Rejoin())
    ]


def test_api_servers_of_another_run_are_refused() -> None:
    known = CoordinatorState(incarnation=7)
    assert "run" in refusal(known.receive(b"old", ServerJoin(COORDINATOR_PROTOCOL_VERSION, 1, 0, 6), 0.0))
    accepted = known.receive(b"own", ServerJoin(COORDINATOR_PROTOCOL_VERSION, 1, 0, 7), 0.0)
    assert accepted == [(b"own", JoinAccepted(7))]


def test_members_are_bounded_and_those_that_speak_stay() -> None:
    known = board()
    for number in range(3 * MAX_SERVERS):
        known.receive(b"%d" % number, ServerJoin(COORDINATOR_PROTOCOL_VERSION, number % 7, number), 0.0)
        if number % 100 == 0:
            assert known.receive(b"server", SERVER, 0.0) == []
    assert len(known._servers) == MAX_SERVERS
    for number in range(1000):
        known.receive(b"%d" % number, remote(1, 1000 + number), 0.0)
    assert len(known._contests) == 1


# -- engines of other hosts


def remote(rank: int, incarnation: int, epoch: int = 0, **traits: str) -> EngineJoin:
    return EngineJoin(
        COORDINATOR_PROTOCOL_VERSION,
        rank,
        epoch,
        incarnation,
        f"tcp://host-{incarnation}:5000",
        TRAITS | traits,
    )


def place_of(join: EngineJoin) -> EngineAddress:
    return EngineAddress(join.rank, join.epoch, join.incarnation, join.address)


def refusal(answers: list[Outgoing]) -> str:
    [(_, message)] = answers
    assert isinstance(message, JoinRejected)
    return message.reason


def test_api_servers_are_told_where_engines_are() -> None:
    known = board()
    assert known.receive(b"far", remote(1, 7), 0.0) == [(b"far", JoinAccepted())]
    assert known.take_updates(0.0) == [(b"server", place_of(remote(1, 7)))]
    assert known.receive(b"far", remote(1, 7), 1.0) == [(b"far", JoinAccepted())]
    assert known.take_updates(1.0) == [], "it says every second that it is there"
    known.receive(b"late", ServerJoin(COORDINATOR_PROTOCOL_VERSION, 3, 0), 2.0)
    assert known.take_updates(2.0) == [(b"late", place_of(remote(1, 7)))]


def test_api_servers_are_told_that_one_has_left() -> None:
    known = board()
    known.receive(b"far", remote(1, 7), 0.0)
    known.take_updates(0.0)
    known.receive(b"far", MemberLeave(), 1.0)
    assert known.take_updates(1.0) == [(b"server", EngineAddress(1, 0, 7, ""))]
    assert known.receive(b"other", remote(1, 8), 1.0) == [(b"other", JoinAccepted())]
    assert known.take_updates(2.0) == [(b"server", place_of(remote(1, 8)))]


def test_a_restarted_engine_replaces_its_former_self_at_once() -> None:
    known = board()
    known.receive(b"far", remote(1, 7, epoch=0), 0.0)
    assert known.receive(b"far again", remote(1, 7, epoch=1), 0.1) == [(b"far again", JoinAccepted())]
    assert known.receive(b"far", remote(1, 7, epoch=0), 0.2) == [], "it ended, and its message came late"
    assert known.receive(b"far again", BUSY, 0.3) == []


def test_a_rank_is_not_taken_from_an_engine_that_lives() -> None:
    known = board()
    known.receive(b"far", remote(1, 7), 0.0)
    for second in range(1, 10):
        answers = known.receive(b"other", remote(1, 8), second + 0.5)
        if answers:
            break
        known.receive(b"far", remote(1, 7), second + 1.0)
    assert "rank 1 is taken by the engine at tcp://host-7:5000" in refusal(answers)
    assert known.take_updates(60.0) == [(b"server", place_of(remote(1, 7)))]


def test_the_rank_of_a_silent_engine_is_free_after_a_while() -> None:
    known = board()
    known.receive(b"far", remote(1, 7), 0.0)
    second = 0.0
    while not (answers := known.receive(b"other", remote(1, 8), second)):
        second += 1.0
    assert answers == [(b"other", JoinAccepted())]
    assert second == LEASE_S
    assert known.take_updates(60.0) == [(b"server", place_of(remote(1, 8)))]
    assert known.receive(b"far", BUSY, 61.0) == [(b"far", Rejoin())], "it was cut off, and is back"
    known.receive(b"other", remote(1, 8), 62.0)
    assert known.receive(b"far", remote(1, 7), 62.0) == []
    known.receive(b"other", remote(1, 8), 64.0)
    assert "host-8" in refusal(known.receive(b"far", remote(1, 7), 64.0))


def test_the_heads_own_ranks_are_no_one_elses() -> None:
    known = CoordinatorState(local_ranks=frozenset((0, 1)), incarnation=7)
    reason = refusal(known.receive(b"far", remote(1, 8), 0.0))
    assert "rank 1 is one of the head's own, which are 0 to 1" in reason
    assert known.receive(b"own", local(1, incarnation=7), 0.0) == [(b"own", JoinAccepted(7))]


def test_engines_that_differ_are_refused_by_what_differs() -> None:
    known = CoordinatorState(traits={"build": "1.2+a", "--seed": "0"})
    reason = refusal(known.receive(b"old", remote(0, 7, **{"build": "1.2+a", "--seed": "5"}), 0.0))
    assert reason == "its --seed is 5, the fleet's is 0"
    head = {"build": "1.2+a", "--seed": "0"}
    assert known.receive(b"first", remote(0, 8, **head), 0.0) == [(b"first", JoinAccepted())]
    reason = refusal(known.receive(b"short", remote(1, 9, max_model_len="512", **head), 0.0))
    assert reason == "its max_model_len is 512, the fleet's is 4096"


def test_engines_that_do_not_tell_their_traits_are_refused() -> None:
    known = CoordinatorState(traits={"build": "1.2+a"})
    bare = msgspec.structs.replace(remote(0, 7), traits={})
    reason = refusal(known.receive(b"bare", bare, 0.0))
    assert reason == "it does not tell its build, max_model_len, vocab_size, dtype"
    assert "build" in refusal(known.receive(b"old", remote(0, 7), 0.0))
    assert known.receive(b"other", remote(0, 8, build="1.2+a"), 0.0) == [(b"other", JoinAccepted())]


def test_members_of_another_build_are_refused_by_that_name() -> None:
    """Also where their protocol is another one. What else differs follows from that."""
    known = CoordinatorState(traits={"build": "1.2+a", "--seed": "0"}, incarnation=7)
    wrong = "its build is 1.2+b, the fleet's is 1.2+a: install the same one on all hosts"
    engine = remote(0, 7, **{"build": "1.2+b", "--seed": "5"})
    assert refusal(known.receive(b"e", engine, 0.0)) == wrong
    assert refusal(known.receive(b"e", msgspec.structs.replace(engine, protocol=9), 0.0)) == wrong
    server = ServerJoin(COORDINATOR_PROTOCOL_VERSION, 1, 0, 7, "1.2+b")
    assert refusal(known.receive(b"s", server, 0.0)) == wrong
    old = ServerJoin(COORDINATOR_PROTOCOL_VERSION - 1, 1, 0, 7)
    assert "its build is not told, the head's 1.2+a" in refusal(known.receive(b"s", old, 0.0))
    same = msgspec.structs.replace(server, build="1.2+a")
    assert known.receive(b"s", same, 0.0) == [(b"s", JoinAccepted(7))]


def test_an_address_is_that_of_an_engine_of_another_host() -> None:
    known = CoordinatorState(local_ranks=frozenset((0,)))
    assert "'tcp://host-0:5000'" in refusal(known.receive(b"near", remote(0, 0), 0.0))
    assert "address is ''" in refusal(known.receive(b"far", local(1, incarnation=7), 0.0))


def test_ranks_end_with_the_fleet() -> None:
    known = CoordinatorState(ranks=2)
    reason = refusal(known.receive(b"far", remote(2, 7), 0.0))
    assert reason == "rank 2: ranks are 0 to 1 (--data-parallel-size)"
