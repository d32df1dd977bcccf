"""What an engine makes of API servers' messages, with a fake engine and no socket."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from penstock.engine.base import Engine, Load, RequestRejected, StepRows
from penstock.engine.batch.rows import aborted_rows, empty_rows
from penstock.engine.loop.drain_rate import MIN_RETRY_MS
from penstock.engine.loop.identity import EngineIdentity
from penstock.engine.loop.inbox import INTERNAL_ERROR, MAX_REFUSED_PEERS, Inbox, InboxHooks
from penstock.engine.loop.publisher import Publisher
from penstock.engine.loop.rpc import RpcServer
from penstock.engine.loop.state_reconciler import StateReconciler
from penstock.engine.loop.stats import EngineStats
from penstock.engine.loop.stream_spans import StreamSpans
from penstock.engine.lora.adapter_table import AdapterTable
from penstock.wire.decoding import decode_from_engine
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    MAX_ABORTED,
    MAX_CALL_BYTES,
    MAX_SERVERS,
    PROMPT_GONE,
    Abort,
    ApplyStates,
    DesiredState,
    Disconnect,
    EngineInfo,
    GoAway,
    Hello,
    KeptPrefix,
    ObservedState,
    RpcCall,
    RpcReply,
    SamplingParams,
    StatesObserved,
    StreamFailed,
    Submit,
    SubmitChoice,
    Welcome,
    encode,
)
from penstock.wire.sockets import PeerGone, Wakeup, server_identity
from tests.engine.loop.levels import Level
from tests.engine.support import submit

INFO = EngineInfo("fake", 100, 50, 4)


class FakeEngine:
    """Notes what it is asked, about streams by their seed, which the tests take from the handle. Rejects odd
    ones; stream 66 finds a defect."""

    adapters: AdapterTable | None = None
    can_sleep = True
    pages = None

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.seeds: dict[int, int] = {}
        self.prompts: dict[int, bytes] = {}
        """By seed."""

    @property
    def info(self) -> EngineInfo:
        return INFO

    def submit(self, server: int, request: Submit) -> None:
        seed = request.sampling.seed
        if seed == 66:
            raise OverflowError("int too large")
        if seed % 2:
            raise RequestRejected("odd", "overloaded")
        self.seeds[request.stream] = seed
        self.prompts[seed] = request.prompt
        self.asked.append(("submit", server, seed))

    def abort(self, server: int, streams: Sequence[int]) -> None:
        self.asked.append(("abort", server, [self.seeds[stream] for stream in streams]))

    def drop_server(self, server: int) -> None:
        self.asked.append(("drop", server))

    def has_work(self) -> bool:
        return False

    def can_step(self) -> bool:
        return False

    wakeups: Sequence[Wakeup] = ()

    def step(self) -> StepRows:
        return empty_rows()

    def take_admitted(self) -> Sequence[tuple[int, int]]:
        return ()

    def on_resubmitted_start(self, notify: Callable[[int, int], None]) -> None:
        pass

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
        self.gone: set[bytes] = set()
        self.stats = EngineStats()
        self.publisher = Publisher(self, kept_prompt_bytes=100)
        self.refusal: RequestRejected | None = None
        self.head = 0
        self.broken: list[int] = []
        """API servers whose connection has broken, which a probe finds."""
        self.level = Level()
        self.states = StateReconciler(
            [self.level], self.publisher.send, self.publisher.send_to_all, lambda: 0, lambda: 0.0
        )
        self.inbox = Inbox(
            engine,
            self.publisher,
            EngineIdentity(2, 5, build="1.2+a"),
            calls=RpcServer(engine.call, self.publisher.send, lambda: 0),
            states=self.states,
            stats=self.stats,
            spans=StreamSpans(None, self.stats, 2, "m"),
            hooks=InboxHooks(
                refuse_streams=lambda: self.refusal,
                current_head=lambda: self.head,
                probe=self._probe,
            ),
        )

    def _probe(self) -> None:
        for server in self.broken:
            if (peer := self.publisher.peers.get(server)) is not None:
                self.publisher.peers.detach(peer)
        self.inbox.drop_disconnected()

    def send(self, identity: bytes, parts: list[bytes]) -> bool:
        if identity in self.gone:
            raise PeerGone(identity.decode())
        self.sent.append((identity, decode_from_engine(parts[0])))
        return True

    def handle(self, identity: bytes, parts: list[bytes]) -> None:
        self.inbox.receive(identity, parts)
        while self.inbox.waiting:
            self.inbox.handle()

    def hello(self, server: int = 0, epoch: int = 0) -> bytes:
        identity = server_identity(server, epoch)
        self.handle(identity, [encode(Hello(ENGINE_PROTOCOL_VERSION, server, epoch))])
        return identity

    def take(self, identity: bytes, *messages: Any) -> None:
        self.handle(identity, [encode(message) for message in messages])

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
    assert desk.sent == [(identity, Welcome(ENGINE_PROTOCOL_VERSION, 2, 5, INFO, kept_prompt_bytes=100))]


def test_parts_are_taken_in_order(desk: Desk, zero: bytes) -> None:
    desk.take(zero, submit(2), submit(4), Abort([2]))
    assert desk.engine.asked == [("submit", 0, 2), ("submit", 0, 4), ("abort", 0, [2])]
    assert desk.sent == []


def test_what_was_stopped_counts_as_stopped(desk: Desk, zero: bytes) -> None:
    desk.take(zero, submit(2), submit(4), Abort([2], stopped=True), Abort([4]))
    assert desk.engine.asked[2:] == [("abort", 0, [2]), ("abort", 0, [4])]
    desk.stats.on_rows(aborted_rows([(0, number, 0) for number in desk.engine.seeds]), 1.0, 0)
    assert desk.stats.ended == {"stop": 1, "length": 0, "abort": 1, "error": 0}


def test_what_was_rejected_does_not_count(desk: Desk, zero: bytes) -> None:
    desk.take(zero, submit(2), submit(3))
    desk.take(zero, Disconnect())
    assert desk.stats.ended["abort"] == 1


def test_rejected(desk: Desk, zero: bytes) -> None:
    desk.take(zero, submit(3, resumed=2), submit(2))
    assert desk.sent == [(zero, StreamFailed(3, 2, "overloaded", "odd", MIN_RETRY_MS))]
    assert desk.engine.asked == [("submit", 0, 2)]


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
    assert desk.engine.asked == [("submit", 0, 4)]


# -- kept prompts


def test_the_engine_gets_whole_prompts(desk: Desk, zero: bytes) -> None:
    first, second = submit(2), replace(submit(4), prompt=b"\7\0\0\0", prefix=KeptPrefix(1, 2, True), keep=2)
    desk.take(zero, replace(first, keep=1), second)
    assert desk.engine.prompts == {2: first.prompt, 4: first.prompt[:8] + b"\7\0\0\0"}


def test_streams_of_a_prompt_that_is_gone_fail_and_can_come_again(desk: Desk, zero: bytes) -> None:
    lost = replace(submit(2), prefix=KeptPrefix(1, 2), choices=(SubmitChoice(4, 4, 9),))
    desk.take(zero, lost)
    failed = [message for _, message in desk.sent]
    assert [(each.stream, each.code) for each in failed] == [(2, PROMPT_GONE), (4, PROMPT_GONE)]
    assert desk.publisher.peers.accepted() == {0: 2}
    desk.take(zero, replace(lost, prefix=None))
    assert [name for name, *_ in desk.engine.asked] == ["submit", "submit"]


def test_what_a_connection_has_kept_ends_with_it(desk: Desk, zero: bytes) -> None:
    desk.take(zero, replace(submit(2), keep=1))
    assert desk.publisher.peers.prompts.bytes == 12
    desk.take(zero, Disconnect())
    assert desk.publisher.peers.prompts.bytes == 0


def test_a_prompt_put_together_counts_as_what_it_is(desk: Desk, zero: bytes) -> None:
    """A step waits for so many bytes of requests at most."""
    desk.inbox.receive(zero, [encode(replace(submit(2), prefix=KeptPrefix(1, 1 << 20)))])
    assert desk.inbox.handle() > 1 << 22


# -- restarts


def test_a_restarted_api_server_replaces_itself(desk: Desk, zero: bytes) -> None:
    one = desk.hello(0, 1)
    assert desk.engine.asked == [("drop", 0)]
    desk.clear()
    desk.take(one, submit(2))
    assert desk.engine.asked == [("submit", 0, 2)]
    desk.clear()
    desk.take(zero, submit(4))
    assert desk.engine.asked == []
    assert [identity for identity, _ in desk.sent] == [zero]


def test_a_second_hello_on_a_connection_is_refused(desk: Desk, zero: bytes) -> None:
    """Its streams are dropped, and it is told, so that it can connect again."""
    desk.take(zero, submit(2))
    desk.clear()
    assert desk.hello() == zero
    assert desk.engine.asked == [("drop", 0)]
    ((identity, answer),) = desk.sent
    assert identity == zero
    assert isinstance(answer, GoAway)
    assert "a second Hello" in answer.reason


def test_a_late_hello_of_a_predecessor_changes_nothing(desk: Desk) -> None:
    one = desk.hello(0, 1)
    desk.clear()
    late = desk.hello(0, 0)
    assert [(identity, type(message)) for identity, message in desk.sent] == [(late, GoAway)]
    assert desk.engine.asked == []
    desk.take(one, submit(2))
    assert desk.engine.asked == [("submit", 0, 2)]


def test_api_servers_are_apart(desk: Desk, zero: bytes) -> None:
    other = desk.hello(1)
    desk.clear()
    desk.take(zero, submit(2))
    desk.take(other, submit(2))
    desk.take(zero, Disconnect())
    desk.take(other, submit(4))
    assert desk.engine.asked == [
        ("submit", 0, 2),
        ("submit", 1, 2),
        ("drop", 0),
        ("submit", 1, 4),
    ]


# -- a stream that cannot run


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("min_tokens", 1 << 31, "min_tokens 2147483648: expected int <= 2147483647"),
        ("max_tokens", -1, "max_tokens -1: expected int >= 0"),
        ("temperature", float("nan"), "temperature nan: expected float >= 0.0"),
        ("top_k", 1 << 40, "top_k 1099511627776: expected int <= 2147483647"),
        ("logprobs", 1 << 21, "logprobs 2097152: expected int <= 1048576"),
        ("stop_token_ids", (7, -1), "stop_token_ids -1: expected int >= 0"),
        ("grammar", 7, "grammar 7: expected str | null, got int"),
        ("interval", 0, "interval 0: expected int >= 1"),
        ("priority", 1 << 63, "priority 9223372036854775808: "),
        ("prompt", b"", "prompt has 0 bytes, not a positive multiple of 4"),
        ("prompt", b"12345", "prompt has 5 bytes, not a positive multiple of 4"),
        ("adapter", "a" * 1025, "adapter: expected str of length <= 1024"),
    ],
)
def test_a_field_out_of_bounds_fails_its_stream_and_is_named(
    desk: Desk, zero: bytes, field: str, value: Any, reason: str
) -> None:
    bad = submit(4, resumed=1, prompt=[1, 2])
    if field in SamplingParams.__struct_fields__:
        bad = msgspec.structs.replace(bad, sampling=msgspec.structs.replace(bad.sampling, **{field: value}))
    else:
        bad = msgspec.structs.replace(bad, **{field: value})
    desk.take(zero, submit(2), bad, submit(6))
    assert desk.engine.asked == [("submit", 0, 2), ("submit", 0, 6)]
    ((identity, failed),) = desk.sent
    assert (identity, type(failed)) == (zero, StreamFailed)
    assert (failed.stream, failed.position, failed.code) == (4, 1, "invalid_request")
    assert failed.message.startswith(reason)
    assert desk.publisher.peers.accepted() == {0: 3}
    assert desk.stats.refused_messages == 1


def test_a_defect_fails_its_stream(desk: Desk, zero: bytes, caplog: pytest.LogCaptureFixture) -> None:
    desk.take(zero, submit(2), submit(66), submit(66), submit(4))
    assert desk.engine.asked == [("submit", 0, 2), ("submit", 0, 4)]
    assert [message for _, message in desk.sent] == [StreamFailed(66, 0, "engine_error", INTERNAL_ERROR)] * 2
    (record,) = caplog.records
    assert record.getMessage() == "a request of api-server 0 could not be handled"
    assert "int too large" in caplog.text, "the traceback"


def test_a_defect_in_another_message_ends_its_peer(
    desk: Desk, zero: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def abort(server: int, streams: Sequence[int]) -> None:
        raise KeyError("whoops")

    monkeypatch.setattr(desk.engine, "abort", abort)
    desk.take(zero, submit(2), Abort([2]), submit(4))
    assert desk.engine.asked == [("submit", 0, 2), ("drop", 0)]
    assert desk.sent == [(zero, GoAway("the engine could not handle its message"))]


# -- what is refused


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (b"", "no message of an API server"),
        (b"\xc1", "no message of an API server"),
        (encode(GoAway("x")), "no message of an API server"),
        (encode(Hello(ENGINE_PROTOCOL_VERSION + 1, 0, 0)), f"this engine speaks {ENGINE_PROTOCOL_VERSION}"),
        (encode(Hello(ENGINE_PROTOCOL_VERSION, 1, 0)), "not this peer's"),
        (
            encode(Hello(ENGINE_PROTOCOL_VERSION, 0, 0, build="1.2+b")),
            "its build is 1.2+b, this engine's is 1.2+a",
        ),
        (
            encode(Hello(ENGINE_PROTOCOL_VERSION, MAX_SERVERS, 0)),
            "Hello has server 1024: expected int <= 1023",
        ),
        (encode(submit(2)), "it submits stream 2, which has not ended"),
        (encode(submit(1 << 31)), "its Submit has stream 2147483648: expected int <= 2147483647"),
        (encode(submit(2, max_tokens=-1)), "max_tokens -1"),
        (encode(submit(4))[:-1], "its Submit cannot be decoded"),
        (encode(Abort([1] * (MAX_ABORTED + 1))), "its Abort has streams: expected array of length <= 65536"),
        (encode(RpcCall(1, "echo", {"a": "x" * MAX_CALL_BYTES})), "bytes, at most 1048576 are taken"),
        (encode(RpcCall(1, "x" * 2000)), "its RpcCall has method: expected str of length <= 1024"),
        (b"\x93\x05\x01\xa1\xff", "its RpcCall cannot be decoded"),
    ],
)
def test_a_peer_that_breaks_the_rules_is_dismissed(
    desk: Desk, zero: bytes, part: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        desk.handle(zero, [encode(submit(2)), part, encode(submit(4))])
    assert desk.engine.asked == [("submit", 0, 2), ("drop", 0)]
    ((identity, goodbye),) = desk.sent
    assert (identity, type(goodbye)) == (zero, GoAway)
    assert reason in goodbye.reason
    (record,) = caplog.records
    assert record.getMessage().startswith("api-server 0 is refused: ")


def test_one_line_and_one_answer_per_peer(desk: Desk, zero: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            desk.handle(zero, [b"\xc1"])
            desk.take(zero, submit(2))
            desk.handle(b"stranger", [b"\xc1"])
            desk.take(b"another", submit(2))
    assert [record.getMessage().partition(" is refused")[0] for record in caplog.records] == [
        "api-server 0",
        "an unknown peer",
    ]
    assert [identity for identity, _ in desk.sent] == [zero, b"stranger", b"another"]
    assert desk.engine.asked == [("drop", 0)]
    assert desk.stats.refused_messages == 20


def test_a_disconnect_of_an_unknown_peer_is_not_worth_a_line(
    desk: Desk, zero: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    desk.take(zero, Disconnect())
    desk.take(zero, Disconnect())
    desk.take(b"stranger", Disconnect())
    assert (desk.sent, caplog.records, desk.stats.refused_messages) == ([], [], 0)


def test_a_dismissed_peer_may_start_over(desk: Desk, zero: bytes) -> None:
    desk.handle(zero, [b"\xc1"])
    desk.hello()
    desk.clear()
    desk.take(zero, submit(2))
    assert desk.engine.asked == [("submit", 0, 2)]
    desk.clear()
    desk.handle(zero, [b"\xc1"])
    assert [type(message) for _, message in desk.sent] == [GoAway]


def test_a_process_that_is_refused_again_and_again_is_logged_once(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    for connection in range(5):
        hello = Hello(ENGINE_PROTOCOL_VERSION + 1, 3, 1, 7, connection)
        desk.handle(server_identity(3, 1, 7, connection), [encode(hello)])
    assert [type(message) for _, message in desk.sent] == [GoAway] * 5
    assert caplog.text.count("api-server 3") == 1


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
    assert desk.engine.asked[-1] == ("submit", 0, 2), "the first one's streams are not dropped"


@pytest.mark.parametrize(("first", "second"), [(8, 7), (7, 8)])
def test_the_api_server_of_the_head_that_this_engine_has_joined_replaces_another(
    desk: Desk, first: int, second: int
) -> None:
    desk.take(*of_run(first, 5))
    desk.head = second
    desk.take(*of_run(second))
    assert [type(message) for _, message in desk.sent].count(Welcome) == 2
    desk.take(of_run(second)[0], submit(2))
    assert desk.engine.asked[-1] == ("submit", 0, 2)


def test_another_head_numbers_its_desired_states_from_the_beginning(desk: Desk) -> None:
    observed = StatesObserved([ObservedState("level", 5, None, {"level": 2})])
    desk.take(*of_run(7))
    desk.take(of_run(7)[0], ApplyStates([DesiredState("level", 5, {"level": 2})]))
    assert [message for _, message in desk.sent[1:]] == [observed, observed], "a report and the answer"
    desk.head = 8
    desk.take(*of_run(8))
    desk.states.advance()
    assert desk.level.level == 0
    desk.take(of_run(8)[0], ApplyStates([DesiredState("level", 1, {"level": 3})]))
    assert desk.sent[-1][1] == StatesObserved([ObservedState("level", 1, None, {"level": 3})])


@pytest.mark.parametrize(("first", "second"), [(8, 7), (7, 8)])
def test_an_api_server_that_is_gone_gives_way_to_any_other(desk: Desk, first: int, second: int) -> None:
    desk.take(*of_run(first, 5))
    desk.broken = [0]
    desk.take(*of_run(second))
    assert [type(message) for _, message in desk.sent] == [Welcome, Welcome]


def test_a_late_hello_of_a_process_that_was_followed_is_refused(desk: Desk) -> None:
    desk.broken = [0]
    desk.take(*of_run(7, 5, 1))
    for epoch, connection in ((5, 0), (4, 9)):
        desk.take(*of_run(7, epoch, connection))
    assert [type(message) for _, message in desk.sent] == [Welcome, GoAway, GoAway]


def test_refusals_are_not_remembered_without_end(desk: Desk) -> None:
    for number in range(MAX_REFUSED_PEERS + 10):
        desk.handle(b"%d" % number, [b"\xc1"])
    assert len(desk.inbox._refused) <= MAX_REFUSED_PEERS
