"""What an engine makes of API servers' messages, with a fake engine and no socket."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.engine.base import Engine, Load, RequestRejected, StepRows
from penstock.engine.batch.rows import aborted_rows, empty_rows
from penstock.engine.loop.drain_rate import MIN_RETRY_MS
from penstock.engine.loop.inbox import MAX_HANDLES, MAX_REFUSED_PEERS, MAX_SERVERS, Inbox
from penstock.engine.loop.publisher import Publisher
from penstock.engine.loop.rpc import RpcServer
from penstock.engine.loop.stats import EngineStats
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    Abort,
    Disconnect,
    EngineInfo,
    GoAway,
    Hello,
    RpcCall,
    RpcReply,
    StreamFailed,
    Submit,
    Welcome,
    WireError,
    decode_from_engine,
    encode,
)
from penstock.wire.sockets import server_identity
from tests.engine.support import submit

INFO = EngineInfo("fake", 100, 50, 4)


class FakeEngine:
    """Notes what it is asked. Rejects streams of an odd number; finds stream 66 running already."""

    can_sleep = True

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    @property
    def info(self) -> EngineInfo:
        return INFO

    def submit(self, server: int, request: Submit) -> None:
        if request.stream == 66:
            raise WireError("Submit.stream 66 is running already")
        if request.stream % 2:
            raise RequestRejected("odd", "overloaded")
        self.asked.append(("submit", server, request))

    def abort(self, server: int, streams: Sequence[int]) -> None:
        self.asked.append(("abort", server, list(streams)))

    def drop_server(self, server: int) -> None:
        self.asked.append(("drop", server))

    def has_work(self) -> bool:
        return False

    def step(self) -> StepRows:
        return empty_rows()

    def take_admitted(self) -> Sequence[tuple[int, int]]:
        return ()

    def fail_all(self, code: str, message: str) -> StepRows:
        return empty_rows()

    def load(self) -> Load:
        return Load()

    def metrics(self) -> dict[str, float]:
        return {"steps_total": 3}

    def call(self, method: str, arguments: dict[str, Any]) -> Any:
        match method:
            case "echo":
                return arguments
            case "object":
                return object()
            case "bug":
                raise KeyError("whoops")
        raise ValueError(f"no {method}")

    def close(self) -> None:
        pass


class Desk:
    """An inbox, and what was sent to each peer."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        engine: Engine = self.engine
        self.sent: list[tuple[bytes, Any]] = []
        self.stats = EngineStats()
        self.publisher = Publisher(self)
        self.refusal: RequestRejected | None = None
        self.head = 0
        self.gone: list[int] = []
        """API servers whose connection has broken."""
        self.inbox = Inbox(
            engine,
            self.publisher,
            rank=2,
            epoch=5,
            calls=RpcServer(engine.call, {}, self.publisher.send, lambda: 0),
            stats=self.stats,
            refuse_streams=lambda: self.refusal,
            current_head=lambda: self.head,
            probe=self._probe,
        )

    def _probe(self) -> None:
        for server in self.gone:
            self.inbox.drop_server(server)

    def send(self, identity: bytes, parts: list[bytes]) -> bool:
        self.sent.append((identity, decode_from_engine(parts[0])))
        return True

    def hello(self, server: int = 0, epoch: int = 0) -> bytes:
        identity = server_identity(server, epoch)
        self.inbox.handle(identity, [encode(Hello(ENGINE_PROTOCOL_VERSION, server, epoch))])
        return identity

    def take(self, identity: bytes, *messages: Any) -> None:
        self.inbox.handle(identity, [encode(message) for message in messages])

    def clear(self) -> None:
        self.sent.clear()
        self.engine.asked.clear()


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def zero(desk: Desk) -> bytes:
    """The identity of API server 0, which has said Hello."""
    identity = desk.hello()
    desk.clear()
    return identity


def test_hello(desk: Desk) -> None:
    identity = desk.hello(3, 1)
    assert desk.sent == [(identity, Welcome(ENGINE_PROTOCOL_VERSION, 2, 5, INFO))]


def test_parts_are_taken_in_order(desk: Desk, zero: bytes) -> None:
    desk.take(zero, submit(2), submit(4), Abort([2]))
    assert desk.engine.asked == [("submit", 0, submit(2)), ("submit", 0, submit(4)), ("abort", 0, [2])]
    assert desk.sent == []


def test_what_was_stopped_counts_as_stopped(desk: Desk, zero: bytes) -> None:
    desk.take(zero, submit(2), submit(4), Abort([2], stopped=True), Abort([4]))
    assert desk.engine.asked[2:] == [("abort", 0, [2]), ("abort", 0, [4])]
    desk.stats.on_rows(aborted_rows([(0, 2, 0), (0, 4, 0)]), 1.0)
    assert desk.stats.ended == {"stop": 1, "length": 0, "abort": 1, "error": 0}


def test_what_was_rejected_does_not_count(desk: Desk, zero: bytes) -> None:
    desk.take(zero, submit(2), submit(3))
    desk.take(zero, Disconnect())
    assert desk.stats.ended["abort"] == 1


def test_numbers_without_measure_are_refused(desk: Desk, zero: bytes) -> None:
    desk.hello(MAX_SERVERS)
    desk.take(zero, submit(MAX_HANDLES))
    reasons = [message.reason for _, message in desk.sent]
    assert reasons == [
        "Hello.server is 1024, at most 1023 is taken",
        "Submit.stream is 4194304, at most 4194303 is taken",
    ]
    assert ("drop", 0) in desk.engine.asked


def test_rejected(desk: Desk, zero: bytes) -> None:
    desk.take(zero, submit(3, resumed=2), submit(2))
    assert desk.sent == [(zero, StreamFailed(3, 2, "overloaded", "odd", MIN_RETRY_MS))]
    assert desk.engine.asked == [("submit", 0, submit(2))]


def test_bye(desk: Desk, zero: bytes) -> None:
    desk.take(zero, Disconnect())
    assert desk.engine.asked == [("drop", 0)]
    desk.take(zero, submit(2))
    assert desk.engine.asked == [("drop", 0)]


def test_a_call_is_answered(desk: Desk, zero: bytes) -> None:
    desk.take(zero, RpcCall(9, "echo", {"a": 1}))
    assert desk.sent == [(zero, RpcReply(9, None, {"a": 1}))]


def test_streams_are_refused_while_there_is_a_reason(desk: Desk, zero: bytes) -> None:
    desk.refusal = RequestRejected("asleep", "sleeping")
    desk.take(zero, submit(2))
    desk.refusal = None
    desk.take(zero, submit(4))
    assert desk.sent == [(zero, StreamFailed(2, 0, "sleeping", "asleep"))]
    assert desk.engine.asked == [("submit", 0, submit(4))]


# -- restarts


def test_a_restarted_api_server_replaces_itself(desk: Desk, zero: bytes) -> None:
    one = desk.hello(0, 1)
    assert desk.engine.asked == [("drop", 0)]
    desk.clear()
    desk.take(one, submit(2))
    assert desk.engine.asked == [("submit", 0, submit(2))]
    desk.clear()
    desk.take(zero, submit(4))
    assert desk.engine.asked == []
    assert [identity for identity, _ in desk.sent] == [zero]


def test_a_new_connection_drops_the_streams_of_the_last(desk: Desk, zero: bytes) -> None:
    assert desk.hello() == zero
    assert desk.engine.asked == [("drop", 0)]
    assert isinstance(desk.sent[-1][1], Welcome)


def test_a_late_hello_of_a_predecessor_changes_nothing(desk: Desk) -> None:
    one = desk.hello(0, 1)
    desk.clear()
    late = desk.hello(0, 0)
    assert [(identity, type(message)) for identity, message in desk.sent] == [(late, GoAway)]
    assert desk.engine.asked == []
    desk.take(one, submit(2))
    assert desk.engine.asked == [("submit", 0, submit(2))]


def test_api_servers_are_apart(desk: Desk, zero: bytes) -> None:
    other = desk.hello(1)
    desk.clear()
    desk.take(zero, submit(2))
    desk.take(other, submit(2))
    desk.inbox.drop_server(0)
    desk.take(other, submit(4))
    assert desk.engine.asked == [
        ("submit", 0, submit(2)),
        ("submit", 1, submit(2)),
        ("drop", 0),
        ("submit", 1, submit(4)),
    ]


# -- what is refused


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (b"\xc1", "not a message of an API server"),
        (encode(GoAway("x")), "not a message of an API server"),
        (encode(Hello(ENGINE_PROTOCOL_VERSION + 1, 0, 0)), "this engine speaks 1"),
        (encode(Hello(ENGINE_PROTOCOL_VERSION, 1, 0)), "not this peer's"),
        (encode(submit(66)), "running already"),
    ],
)
def test_a_peer_that_breaks_the_rules_is_dismissed(
    desk: Desk, zero: bytes, part: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        desk.inbox.handle(zero, [encode(submit(2)), part, encode(submit(4))])
    assert desk.engine.asked == [("submit", 0, submit(2)), ("drop", 0)]
    ((identity, goodbye),) = desk.sent
    assert identity == zero
    assert reason in goodbye.reason
    assert len(caplog.records) == 1


def test_once_per_peer(desk: Desk, zero: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            desk.inbox.handle(zero, [b"\xc1"])
            desk.take(zero, submit(2))
            desk.inbox.handle(b"stranger", [b"\xc1"])
            desk.take(b"another", submit(2))
    assert len(caplog.records) == 3
    assert [identity for identity, _ in desk.sent] == [zero, b"stranger", b"another"]
    assert desk.engine.asked == [("drop", 0)]


def test_a_dismissed_peer_may_start_over(desk: Desk, zero: bytes) -> None:
    desk.inbox.handle(zero, [b"\xc1"])
    desk.hello()
    desk.clear()
    desk.take(zero, submit(2))
    assert desk.engine.asked == [("submit", 0, submit(2))]
    desk.clear()
    desk.inbox.handle(zero, [b"\xc1"])
    assert [type(message) for _, message in desk.sent] == [GoAway]


def test_a_process_that_is_refused_again_and_again_is_logged_once(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    for connection in range(5):
        hello = Hello(ENGINE_PROTOCOL_VERSION + 1, 3, 1, 7, connection)
        desk.inbox.handle(server_identity(3, 1, 7, connection), [encode(hello)])
    assert [type(message) for _, message in desk.sent] == [GoAway] * 5
    assert caplog.text.count("api-server-3-1-7") == 1


def of_run(incarnation: int, epoch: int = 0, connection: int = 0) -> tuple[bytes, Hello]:
    """API server 0 of one run of the head."""
    hello = Hello(ENGINE_PROTOCOL_VERSION, 0, epoch, incarnation, connection)
    return server_identity(0, epoch, incarnation, connection), hello


@pytest.mark.parametrize(("first", "second"), [(8, 7), (7, 8)])
def test_the_api_server_of_another_head_is_refused(desk: Desk, first: int, second: int) -> None:
    desk.head = first
    for incarnation in (first, second):
        desk.take(*of_run(incarnation, 5))
    assert [type(message) for _, message in desk.sent] == [Welcome, GoAway]
    desk.take(of_run(first, 5)[0], submit(2))
    assert desk.engine.asked[-1] == ("submit", 0, submit(2)), "the first one's streams are not dropped"


@pytest.mark.parametrize(("first", "second"), [(8, 7), (7, 8)])
def test_the_api_server_of_the_head_that_this_engine_has_joined_replaces_another(
    desk: Desk, first: int, second: int
) -> None:
    desk.take(*of_run(first, 5))
    desk.head = second
    desk.take(*of_run(second))
    assert [type(message) for _, message in desk.sent].count(Welcome) == 2
    desk.take(of_run(second)[0], submit(2))
    assert desk.engine.asked[-1] == ("submit", 0, submit(2))


@pytest.mark.parametrize(("first", "second"), [(8, 7), (7, 8)])
def test_an_api_server_that_is_gone_gives_way_to_any_other(desk: Desk, first: int, second: int) -> None:
    desk.take(*of_run(first, 5))
    desk.gone = [0]
    desk.take(*of_run(second))
    assert [type(message) for _, message in desk.sent] == [Welcome, Welcome]


def test_a_late_hello_of_a_process_that_was_followed_is_refused(desk: Desk) -> None:
    desk.gone = [0]
    desk.take(*of_run(7, 5, 1))
    for epoch, connection in ((5, 0), (4, 9)):
        desk.take(*of_run(7, epoch, connection))
    assert [type(message) for _, message in desk.sent] == [Welcome, GoAway, GoAway]


def test_refusals_are_not_remembered_without_end(desk: Desk) -> None:
    for number in range(MAX_REFUSED_PEERS + 10):
        desk.inbox.handle(b"%d" % number, [b"\xc1"])
    assert len(desk.inbox._refused) <= MAX_REFUSED_PEERS
