"""Every way a stream can fail, in every dialect, through the gateway's own proxy."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec
import pytest

from penstock.gateway.responses.response_observer import StreamObserver
from tests.gateway.behaviours import LATIN_1
from tests.gateway.processes import (
    WAIT_S,
    Behaviour,
    Call,
    Gateway,
    Upstream,
    eventually,
    gateway,
    outcome_of,
    three_in_a_row,
)
from tests.gateway.streams import ANTHROPIC, RESPONSES
from tests.golden_replies import load_cases

RECORDED = {case["name"]: case["response_body"].encode() for case in load_cases()}


@dataclass(frozen=True)
class Dialect:
    path: str
    body: dict[str, Any]
    raw: bytes
    """A whole stream that says what it took."""
    error: bytes
    """An error event."""

    @property
    def events(self) -> list[bytes]:
        return [event + b"\n\n" for event in self.raw.removesuffix(b"\n\n").split(b"\n\n")]

    @property
    def may_lack_its_end(self) -> bool:
        """Whether nothing is missing after a finish reason."""
        return self.path != "/v1/responses"

    @property
    def before_tokens(self) -> int:
        """Events that come before the first one with tokens."""
        observer = StreamObserver()
        for count, event in enumerate(self.events):
            observer.feed(event, 0.0)
            if observer.seen.token_events:
                return count
        raise AssertionError("no event has tokens")


USAGE = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
PLAIN_ERROR = b'data: {"error":{"message":"engine gone","code":500}}\n\n'
DIALECTS = {
    "completions of vLLM": Dialect(
        "/v1/completions", {**USAGE, "prompt": "p"}, RECORDED["comp_stream_usage"], PLAIN_ERROR
    ),
    "chat of vLLM": Dialect(
        "/v1/chat/completions",
        {**USAGE, "messages": []},
        RECORDED["chat_stream_usage_continuous"],
        PLAIN_ERROR,
    ),
    "messages": Dialect(
        "/v1/messages",
        {"model": "m", "stream": True, "messages": []},
        ANTHROPIC,
        b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"busy"}}\n\n',
    ),
    "responses": Dialect(
        "/v1/responses",
        {"model": "m", "stream": True, "input": "p"},
        RESPONSES,
        b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"code":"x"}}}\n\n',
    ),
}


def send_on(call: Call, *pieces: bytes, kind: str = "text/event-stream") -> None:
    """A stream that is not over, each piece a chunk."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
    call.send(head.encode())
    for piece in pieces:
        call.chunk(piece)


def send(call: Call, *pieces: bytes, kind: str = "text/event-stream", end: bool = True) -> None:
    """A stream; without its ``end`` the connection breaks."""
    send_on(call, *pieces, kind=kind)
    if end:
        call.send(b"0\r\n\r\n")
    else:
        call.connection.shutdown(socket.SHUT_RDWR)


def refuses(call: Call, dialect: Dialect) -> None:
    call.reset()


def breaks_at_the_first_byte(call: Call, dialect: Dialect) -> None:
    send(call, dialect.raw[:1], end=False)


def breaks_in_the_middle(call: Call, dialect: Dialect) -> None:
    send(call, dialect.raw[: len(dialect.raw) // 2], end=False)


def breaks_before_the_terminator(call: Call, dialect: Dialect) -> None:
    send(call, b"".join(dialect.events[:-1]), end=False)


def ends_without_a_terminator(call: Call, dialect: Dialect) -> None:
    send(call, *dialect.events[:-1])


def tells_of_an_error(call: Call, dialect: Dialect) -> None:
    send(call, *dialect.events[:2], dialect.error)


def sends_half_an_object(call: Call, dialect: Dialect) -> None:
    first, second, *rest = dialect.events
    send(call, first, second[:-7] + b"\n\n", *rest)


def sends_latin_1(call: Call, dialect: Dialect) -> None:
    send(call, dialect.raw, kind=LATIN_1)


def answers_500(call: Call, dialect: Dialect) -> None:
    call.reply(500, b'{"error":{"message":"out of memory"}}')


def never_answers(call: Call, dialect: Dialect) -> None:
    call.wait_until_gone()


def sends_a_head_alone(call: Call, dialect: Dialect) -> None:
    send_on(call)
    call.wait_until_gone()


def sends_no_token(call: Call, dialect: Dialect) -> None:
    """But a comment, and what else comes before the first one."""
    send_on(call, b": waiting\n\n", *dialect.events[: dialect.before_tokens])
    call.wait_until_gone()


def stops_between_events(call: Call, dialect: Dialect) -> None:
    send_on(call, b"".join(dialect.events[: dialect.before_tokens + 1]))
    call.wait_until_gone()


def stops_within_an_event(call: Call, dialect: Dialect) -> None:
    events = dialect.events
    send_on(call, b"".join(events[: dialect.before_tokens + 1]) + events[dialect.before_tokens + 1][:7])
    call.wait_until_gone()


FAILURES: list[tuple[Callable[[Call, Dialect], None], int, str]] = [
    (refuses, 502, "network_error"),
    (breaks_at_the_first_byte, 200, "network_error"),
    (breaks_in_the_middle, 200, "network_error"),
    (breaks_before_the_terminator, 200, "network_error"),
    (ends_without_a_terminator, 200, "network_error"),
    (tells_of_an_error, 200, "model_server_error"),
    (sends_half_an_object, 200, "content_error"),
    (sends_latin_1, 200, "content_error"),
    (answers_500, 500, "model_server_error"),
]
failures = pytest.mark.parametrize(
    ("failure", "status", "outcome"), FAILURES, ids=[failure.__name__ for failure, _, _ in FAILURES]
)
dialects = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))


def ask(client: httpx.Client, dialect: Dialect) -> httpx.Response:
    return client.post(dialect.path, json=dialect.body)


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream(lambda call: call.reply(200, b"{}")) as server:
        yield server


@pytest.fixture(scope="module")
def front(upstream: Upstream) -> Iterator[Gateway]:
    """Of one endpoint, so that nothing is retried."""
    with gateway(upstream) as running:
        yield running


def well(upstream: Upstream, front: Gateway, dialect: Dialect, behaviour: Behaviour) -> None:
    """Has requests that go well, so that failures of other tests do not add up to an open breaker, and then
    the behaviour to test."""
    upstream.behaviour = lambda call: send(call, *dialect.events)
    three_in_a_row(lambda: ask(front.client, dialect).content == dialect.raw)
    upstream.behaviour = behaviour


@dialects
@failures
def test_each_failure_has_its_outcome(
    upstream: Upstream,
    front: Gateway,
    dialect: Dialect,
    failure: Callable[[Call, Dialect], None],
    status: int,
    outcome: str,
) -> None:
    well(upstream, front, dialect, lambda call: failure(call, dialect))
    got = []
    complete = failure is ends_without_a_terminator and dialect.may_lack_its_end
    outcome = "ok" if complete else outcome
    assert outcome_of(front, lambda: got.append(ask(front.client, dialect))) == outcome
    assert got[0].status_code == status
    told = b"\n\nevent: error\n" in got[0].content and b'"message":"gateway: ' in got[0].content
    expected = status == 200 and failure.__name__.startswith("breaks")
    if failure is ends_without_a_terminator:
        expected = not complete
    assert told == expected, "a client is told of what broke"


def ends_too_early(call: Call, dialect: Dialect) -> None:
    """In order, after the first token."""
    send(call, *dialect.events[: dialect.before_tokens + 1])


def has_a_short_length(call: Call, dialect: Dialect) -> None:
    """Its length ends within the event after the first token."""
    begun = dialect.before_tokens + 1
    body = b"".join(dialect.events[:begun]) + dialect.events[begun][:9]
    call.reply(200, body, "text/event-stream")


@dialects
@pytest.mark.parametrize("failure", [ends_too_early, has_a_short_length])
def test_a_stream_that_ends_too_early_is_no_complete_one(
    upstream: Upstream, front: Gateway, dialect: Dialect, failure: Callable[[Call, Dialect], None]
) -> None:
    well(upstream, front, dialect, lambda call: failure(call, dialect))
    got = []
    assert outcome_of(front, lambda: got.append(ask(front.client, dialect))) == "network_error"
    *_, last = got[0].content.removesuffix(b"\n\n").split(b"\n\n")
    assert last.startswith(b"event: error\n")
    assert b'"message":"gateway: ' in last
    assert (b'"upstream_broken"' in last) == (dialect.path != "/v1/messages")


def test_a_stream_without_any_event_is_no_reply(upstream: Upstream, front: Gateway) -> None:
    dialect = DIALECTS["completions of vLLM"]
    well(upstream, front, dialect, lambda call: send(call))
    assert ask(front.client, dialect).status_code == 502


@dialects
@pytest.mark.parametrize("within", [False, True], ids=["before the first token", "after it"])
def test_a_client_that_leaves(upstream: Upstream, front: Gateway, dialect: Dialect, within: bool) -> None:
    def waits(call: Call) -> None:
        if within:
            call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + dialect.raw[:-20])
        call.wait_until_gone()

    well(upstream, front, dialect, waits)
    count = len(upstream.calls)

    def leave() -> None:
        body = msgspec.json.encode(dialect.body)
        head = f"POST {dialect.path} HTTP/1.1\r\nhost: h\r\ncontent-length: {len(body)}\r\n\r\n"
        host, port = front.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(head.encode() + body)
            eventually(lambda: len(upstream.calls) > count)
            if within:
                assert sock.recv(4096)

    assert outcome_of(front, leave) == "client_disconnect"
    assert upstream.calls[-1].gone.wait(WAIT_S), "the model server is told"


# -- stalls: all dialects at once, as each takes as long as a time-out

Stall = Callable[[Call, Dialect], None]
Reply = TypeVar("Reply")
NO_TOKEN = ("--first-token-timeout", "1")
NO_EVENT = ("--event-timeout", "1")
STALLS = [
    (never_answers, NO_TOKEN, {504}),
    (sends_a_head_alone, NO_TOKEN, {504}),
    (sends_no_token, NO_TOKEN, {200, 504}),  # 504 where a second passes until it is relayed
    (stops_between_events, NO_EVENT, {200}),
    (stops_within_an_event, NO_EVENT, {200}),
]
LIKE_OTHERS = (sends_a_head_alone, stops_within_an_event)
REASONS = {NO_TOKEN: "no token came within 1 s", NO_EVENT: "nothing came for 1 s"}


def ask_all(ask_one: Callable[[Dialect], Reply]) -> list[Reply]:
    """In each dialect at once."""
    with ThreadPoolExecutor(len(DIALECTS)) as pool:
        return list(pool.map(ask_one, DIALECTS.values()))


def stalling(stall: Stall) -> Behaviour:
    by_path = {dialect.path: dialect for dialect in DIALECTS.values()}
    return lambda call: stall(call, by_path[call.path])


def check_stalls(server: Upstream, front: Gateway, stall: Stall) -> None:
    """They have been counted once each, with the tokens that came, and nothing remains of them."""
    eventually(lambda: front.counts() == {"network_error": len(DIALECTS)})
    assert front.counts("requests_in_flight") == {"": 0.0}
    assert front.counts("endpoint_in_flight") == {server.url: 0.0}
    for call in server.calls:
        assert call.gone.wait(WAIT_S), "the model server is told"
    tokens = front.counts("tokens_total")
    if stall in (
        stops_between_events,
        stops_within_an_event,
    ):  # two of the dialects have told of usage by then
        assert (tokens["output,events"], tokens["output,usage"]) == (2, 2)
    else:
        assert "output,events" not in tokens


@pytest.mark.parametrize(
    ("stall", "options", "statuses"),
    [
        pytest.param(*row, id=row[0].__name__, marks=[pytest.mark.slow] if row[0] in LIKE_OTHERS else [])
        for row in STALLS
    ],
)
def test_stalls(stall: Stall, options: tuple[str, ...], statuses: set[int]) -> None:
    with Upstream(stalling(stall)) as server, gateway(server, options=options) as front:
        replies = ask_all(lambda dialect: ask(front.client, dialect))
        check_stalls(server, front, stall)
    assert len(replies) == len(server.calls) == len(DIALECTS)
    for reply in replies:
        assert reply.status_code in statuses
        assert REASONS[options] in reply.text
