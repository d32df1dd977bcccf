"""Every way a stream can fail, in every dialect, through the gateway's own proxy."""

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest

from tests.gateway.processes import WAIT_S, Behaviour, Call, Gateway, Upstream, gateway
from tests.gateway.streams import ANTHROPIC, RESPONSES
from tests.gateway.test_gateway import LATIN_1, QUICK, eventually, outcome_of
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


def send(call: Call, *pieces: bytes, kind: str = "text/event-stream", end: bool = True) -> None:
    """A stream, each piece a chunk; without its ``end`` the connection breaks."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
    call.send(head.encode())
    for piece in pieces:
        call.chunk(piece)
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
    with gateway(upstream, options=QUICK) as running:
        yield running


def well(upstream: Upstream, front: Gateway, dialect: Dialect, behaviour: Behaviour) -> None:
    """Has requests that go well, so that failures of other tests do not add up to an open breaker, and then
    the behaviour to test."""
    upstream.behaviour = lambda call: send(call, *dialect.events)
    eventually(lambda: front.client.get("/ready").status_code == 200)
    for _ in range(3):
        assert ask(front.client, dialect).content == dialect.raw
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
    assert outcome_of(front, lambda: got.append(ask(front.client, dialect))) == outcome
    assert got[0].status_code == status
    told = b'"upstream_broken"' in got[0].content
    assert told == (status == 200 and failure.__name__.startswith("breaks")), "a client is told of what broke"


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
