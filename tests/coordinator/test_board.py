"""What the coordinator tells whom, and when."""

from penstock.coordinator.board import Board
from penstock.wire.coordination import (
    PROTOCOL_VERSION,
    EngineJoin,
    EngineLoad,
    EngineReport,
    FleetLoad,
    Joined,
    Leave,
    ProcessMetrics,
    Refused,
    Rejoin,
    ServerJoin,
)

ENGINE, SERVER = EngineJoin(PROTOCOL_VERSION, 0, 0), ServerJoin(PROTOCOL_VERSION, 1, 0)
BUSY = EngineReport(7, 2, 5, 125, [1, 40, 3, 9])


def board() -> Board:
    made = Board()
    assert made.receive(b"engine", ENGINE) == []
    assert made.receive(b"server", SERVER) == [(b"server", Joined())]
    return made


def test_an_api_server_is_told_what_concerns_it() -> None:
    known = board()
    known.receive(b"engine", BUSY)
    assert known.push(0.0) == [(b"server", FleetLoad([EngineLoad(0, 0, 7, 2, 5, 125, 40)]))]


def test_an_api_server_without_submits_has_none_accepted() -> None:
    known = board()
    known.receive(b"engine", EngineReport(7, 0, 1, 0, [3, 9]))
    [(_, news)] = known.push(0.0)
    assert isinstance(news, FleetLoad)
    assert news.engines[0].accepted == 0


def test_news_are_told_once_and_not_too_often() -> None:
    known = board()
    assert known.next_push() is None
    known.receive(b"engine", BUSY)
    assert known.push(10.0)
    assert known.push(10.2) == []
    assert known.next_push() is None
    known.receive(b"engine", BUSY)
    assert known.push(10.09) == []
    assert known.next_push() == 10.1
    assert known.push(10.1)


def test_only_engines_that_changed_are_told() -> None:
    known = board()
    known.receive(b"other", EngineJoin(PROTOCOL_VERSION, 1, 0))
    known.receive(b"engine", BUSY)
    known.push(0.0)
    known.receive(b"other", EngineReport(1, 0, 0, 0, []))
    [(_, news)] = known.push(1.0)
    assert isinstance(news, FleetLoad)
    assert [engine.rank for engine in news.engines] == [1]


def test_an_api_server_that_joins_late_is_told_everything_at_once() -> None:
    known = board()
    known.receive(b"engine", BUSY)
    known.push(0.0)
    assert known.receive(b"late", ServerJoin(PROTOCOL_VERSION, 3, 0)) == [
        (b"late", Joined()),
        (b"late", FleetLoad([EngineLoad(0, 0, 7, 2, 5, 125, 9)])),
    ]


def test_what_could_not_be_sent_is_told_again() -> None:
    known = board()
    known.receive(b"engine", BUSY)
    told = known.push(0.0)
    known.missed(b"server")
    assert known.push(1.0) == told


def test_an_api_server_that_joins_again_is_told_nothing_twice() -> None:
    known = board()
    known.receive(b"engine", BUSY)
    known.push(0.0)
    assert known.receive(b"server", SERVER) == []
    assert known.push(1.0) == []


def test_a_successor_takes_its_predecessors_place() -> None:
    known = board()
    known.receive(b"engine", BUSY)
    known.receive(b"engine again", EngineJoin(PROTOCOL_VERSION, 0, 1))
    assert known.receive(b"engine", BUSY) == [(b"engine", Rejoin())]
    known.receive(b"server again", ServerJoin(PROTOCOL_VERSION, 1, 1))
    known.receive(b"engine again", EngineReport(0, 0, 0, 0, []))
    assert known.push(0.0) == [(b"server again", FleetLoad([EngineLoad(0, 1, 0, 0, 0, 0, 0)]))]


def test_strangers_are_asked_to_join() -> None:
    assert Board().receive(b"engine", BUSY) == [(b"engine", Rejoin())]


def test_who_leaves_is_forgotten() -> None:
    known = board()
    known.receive(b"engine", BUSY)
    known.receive(b"server", Leave())
    assert known.push(0.0) == []
    known.receive(b"engine", Leave())
    assert known.receive(b"engine", BUSY) == [(b"engine", Rejoin())]


def test_another_protocol_is_refused_by_its_version() -> None:
    [(_, refusal)] = Board().receive(b"engine", EngineJoin(PROTOCOL_VERSION + 1, 0, 0))
    assert isinstance(refusal, Refused)
    assert str(PROTOCOL_VERSION + 1) in refusal.reason


# -- metrics


def test_metrics_go_to_all_other_api_servers() -> None:
    known = board()
    known.receive(b"other", ServerJoin(PROTOCOL_VERSION, 2, 0))
    metrics = ProcessMetrics("api-server 1", 0, 5, b"...")
    known.receive(b"server", metrics)
    assert known.push(0.0) == [(b"other", metrics)]
    known.receive(b"server", metrics)
    assert known.push(1.0) == [], "it is the same"
    later = ProcessMetrics("api-server 1", 0, 6, b"...")
    known.receive(b"server", later)
    assert known.push(2.0) == [(b"other", later)]


def test_metrics_of_the_dead_stay() -> None:
    known = board()
    metrics = ProcessMetrics("api-server 1", 0, 5, b"...")
    known.receive(b"server", metrics)
    known.forget(b"server")
    assert known.receive(b"server again", ServerJoin(PROTOCOL_VERSION, 1, 1)) == [
        (b"server again", Joined()),
        (b"server again", metrics),
    ]


def test_metrics_of_strangers_make_them_join() -> None:
    assert Board().receive(b"server", ProcessMetrics("api-server 1", 0, 5, b"")) == [(b"server", Rejoin())]
