"""The load client against a server of scripted replies."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from penstock.bench.load import client
from penstock.bench.load.client import LoadClient, LoadError
from penstock.bench.load.messages import LoadPlan, RoundOrder, RoundResult
from tests.bench.conftest import DONE, EVENT, HEAD, LAST_CHUNK, Scripted, chunk, refusal, stream

ORDER = RoundOrder(keep=True, seconds=30.0)


def plan(server: Scripted, **changes: object) -> LoadPlan:
    values = {"connections": 4, "in_flight": 4, "requests": 4, "bodies": ['{"n":0}', '{"n":1}']} | changes
    return LoadPlan("127.0.0.1", server.port, "/v1/completions", **values)  # type: ignore[arg-type]


def run(plan: LoadPlan, rounds: int = 1, *, poll: bool = False) -> list[RoundResult]:
    with closing(LoadClient(plan, poll=poll)) as client:
        client.open()
        return [client.run(ORDER) for _ in range(rounds)]


@pytest.mark.parametrize("poll", [False, True])
def test_connections_are_reused_over_requests_and_rounds(scripted: Scripted, poll: bool) -> None:
    results = run(plan(scripted, requests=10), rounds=3, poll=poll)
    for result in results:
        assert (result.requests, result.errors, result.error_samples) == (10, 0, [])
        assert (result.events, result.bytes) == (30, 10 * len(stream(3)))
    assert len(scripted.requests) == 30
    assert scripted.connections == 4


def test_requests_are_sent_as_planned(scripted: Scripted) -> None:
    run(plan(scripted, api_key="secret", requests=3, connections=1, in_flight=1))
    head = scripted.requests[0][0]
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"\r\nHost: 127.0.0.1:%d\r\n" % scripted.port in head
    assert b"\r\nAuthorization: Bearer secret\r\n" in head
    assert [json.loads(body)["n"] for _, body in scripted.requests] == [0, 1, 0]


def test_no_more_are_in_flight_than_planned_and_all_connections_serve(scripted: Scripted) -> None:
    result = run(plan(scripted, connections=5, in_flight=1, requests=10))[0]
    assert (result.requests, result.errors) == (10, 0)
    assert scripted.connections == 5


@pytest.mark.parametrize("size", [1, 7, 50, 211])
def test_events_split_over_reads_count_once(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(client, "READ_BYTES", size)
    result = run(plan(scripted))[0]
    assert (result.errors, result.events, result.bytes) == (0, 12, 4 * len(stream(3)))


@pytest.mark.parametrize(
    ("reply", "closes", "reason", "events"),
    [
        (refusal(b"429 Too Many", b'{"error":"later"}'), False, 'HTTP 429: {"error":"later"}', 0),
        (HEAD + chunk(EVENT), True, "the connection ended before the reply did", 1),
        (HEAD + chunk(EVENT)[:20], True, "the connection ended before the reply did", 0),
        (b"", True, "closed without a reply", 0),
        (HEAD + chunk(EVENT) + LAST_CHUNK, False, "the reply ended without its terminator", 1),
        (
            HEAD + chunk(EVENT) + chunk(b'data: {"error":{"code":500}}\n\n') + chunk(DONE) + LAST_CHUNK,
            False,
            'error event: {"error":{"code":500}}',
            2,
        ),
    ],
)
def test_a_request_that_goes_wrong_is_an_error_and_the_load_goes_on(
    scripted: Scripted, reply: bytes, closes: bool, reason: str, events: int
) -> None:
    scripted.reply = lambda number: reply if number == 1 else stream(3)
    scripted.closing = lambda number: closes and number == 1
    result = run(plan(scripted, connections=1, in_flight=1))[0]
    assert (result.requests, result.errors, result.error_samples) == (4, 1, [reason])
    assert result.events == 9 + events
    assert scripted.connections == 2  # another one took its place


def test_an_error_event_within_a_stream_is_seen(scripted: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the way that whole events take."""
    error = chunk(b'data: {"error":{"code":500}}\n\n')
    head_and_event = HEAD + chunk(EVENT)
    monkeypatch.setattr(client, "READ_BYTES", len(head_and_event))
    rest = chunk(b" " * (len(head_and_event) - len(error) - len(b"xx\r\n\r\n")))
    assert len(error + rest) == len(head_and_event)
    scripted.reply = lambda number: head_and_event + error + rest
    scripted.closing = lambda number: True
    result = run(plan(scripted, connections=1, in_flight=1, requests=1))[0]
    assert result.error_samples == ['error event: {"error":{"code":500}}']


def test_a_server_that_refuses_everything_ends_the_round(scripted: Scripted) -> None:
    scripted.reply = lambda number: refusal(b"400 Bad", b"no %d" % number)
    result = run(plan(scripted, requests=20))[0]
    assert (result.requests, result.errors, result.events) == (20, 20, 0)
    assert len(result.error_samples) == client.SAMPLES
    assert result.ttft_ms.p50 is None


def test_connections_closed_between_rounds_are_renewed(scripted: Scripted) -> None:
    scripted.closing = lambda number: number < 4
    with closing(LoadClient(plan(scripted))) as client:
        client.open()
        assert client.run(ORDER).errors == 0
        for _ in range(4):
            assert scripted.closed.acquire(timeout=10)
        assert client.run(ORDER).errors == 0
    assert scripted.connections == 8


def test_a_request_larger_than_the_socket_takes_is_sent_whole(scripted: Scripted) -> None:
    body = json.dumps({"prompt": "x" * 20_000_000})
    result = run(plan(scripted, bodies=[body], connections=2, in_flight=2, requests=2))[0]
    assert (result.errors, result.events) == (0, 6)
    assert [request[1] == body.encode() for request in scripted.requests] == [True, True]


def test_a_round_that_takes_too_long_fails(scripted: Scripted) -> None:
    scripted.hold.clear()
    with closing(LoadClient(plan(scripted))) as client:
        client.open()
        with pytest.raises(
            LoadError, match=r"0 of 4 requests of the round finished \(0 .*\) and 4 in flight"
        ):
            client.run(RoundOrder(keep=True, seconds=0.1))


def test_a_server_that_is_not_there_is_named() -> None:
    nowhere = LoadPlan("127.0.0.1", 1, "/", ["{}"], 1, 1, 1)
    with (
        closing(LoadClient(nowhere)) as client,
        pytest.raises(LoadError, match=r"cannot connect to 127\.0\.0\.1:1: "),
    ):
        client.open()


def test_totals_are_those_of_kept_rounds(scripted: Scripted) -> None:
    with closing(LoadClient(plan(scripted))) as client:
        client.open()
        first = client.run(RoundOrder(keep=False, seconds=30.0))
        second = client.run(RoundOrder(keep=True, seconds=30.0))
        third = client.run(RoundOrder(keep=True, seconds=30.0))
    assert first.all_ttft_ms == first.ttft_ms
    assert second.all_ttft_ms == second.ttft_ms
    assert third.all_ttft_ms.max == max(second.ttft_ms.max or 0, third.ttft_ms.max or 0)
    assert third.all_itl_ms.mean is not None
