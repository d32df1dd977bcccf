"""The load client's HTTP/2: against a server by another library, and frame by frame."""

from __future__ import annotations

import itertools
import json
import ssl
from contextlib import closing
from pathlib import Path

import h2.connection
import h2.errors
import h2.settings
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.load.client import LoadClient, LoadError
from penstock.bench.load.http2 import WINDOW, Http2LoadConnection, Http2Requests
from penstock.bench.load.latency import ReadLog
from penstock.bench.load.messages import LoadPlan, RoundOrder, RoundResult
from penstock.http.http2.faults import ErrorCode
from penstock.http.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    frame,
    ping,
    rst_stream,
    settings_frame,
    window_update,
)
from tests import certificates
from tests.bench.conftest import DONE, EVENT, Scripted
from tests.bench.load.http2_server import HEAD, Reply, Scripted2, stream

ORDER = RoundOrder(keep=True, seconds=30.0)
SETTINGS = h2.settings.SettingCodes


def plan(port: int, **changes: object) -> LoadPlan:
    values = {
        "connections": 2,
        "in_flight": 4,
        "requests": 8,
        "bodies": ['{"n":0}', '{"n":1}'],
        "http2": True,
        "streams_per_connection": 2,
    } | changes
    return LoadPlan("127.0.0.1", port, "/v1/completions", **values)  # type: ignore[arg-type]


def run(plan: LoadPlan, rounds: int = 1) -> list[RoundResult]:
    with closing(LoadClient(plan)) as client:
        client.open()
        return [client.run(ORDER) for _ in range(rounds)]


def test_requests_share_connections_over_rounds(scripted2: Scripted2) -> None:
    results = run(plan(scripted2.port, api_key="secret"), rounds=3)
    for result in results:
        assert (result.requests, result.errors, result.error_samples) == (8, 0, [])
        assert result.events == 24
        assert result.ttft_ms.p50 is not None
        assert 0 < result.reads < result.events
    assert len(scripted2.requests) == 24
    assert scripted2.connections == 2
    for head, body in scripted2.requests:
        assert head[b":method"] == b"POST"
        assert head[b":path"] == b"/v1/completions"
        assert head[b":authority"] == b"127.0.0.1:%d" % scripted2.port
        assert head[b"authorization"] == b"Bearer secret"
        assert head[b"content-length"] == b"%d" % len(body)
    assert sorted(json.loads(body)["n"] for _, body in scripted2.requests[:8]) == [0] * 4 + [1] * 4


@pytest.mark.parametrize("size", [1, 7, 50, 211])
def test_frames_split_over_reads_count_once(scripted2: Scripted2, size: int) -> None:
    scripted2.pieces = size
    result = run(plan(scripted2.port))[0]
    assert (result.errors, result.events) == (0, 24)


def refusal(connection: h2.connection.H2Connection, number: int) -> None:
    connection.send_headers(number, [(b":status", b"429")])
    connection.send_data(number, b'{"error":"later"}', end_stream=True)


def unfinished(connection: h2.connection.H2Connection, number: int) -> None:
    connection.send_headers(number, HEAD)
    connection.send_data(number, EVENT)


def reset(connection: h2.connection.H2Connection, number: int) -> None:
    unfinished(connection, number)
    connection.reset_stream(number, h2.errors.ErrorCodes.REFUSED_STREAM)


def without_done(connection: h2.connection.H2Connection, number: int) -> None:
    unfinished(connection, number)
    connection.end_stream(number)


def with_error(connection: h2.connection.H2Connection, number: int) -> None:
    unfinished(connection, number)
    connection.send_data(number, b'data: {"error":{"code":500}}\n\n')
    connection.send_data(number, DONE, end_stream=True)


def split(connection: h2.connection.H2Connection, number: int) -> None:
    """A head in advance, an event in two frames, padding, trailers."""
    connection.send_headers(number, [(b":status", b"103")])
    connection.send_headers(number, HEAD)
    connection.send_data(number, EVENT[:20])
    connection.send_data(number, EVENT[20:] + EVENT, pad_length=7)
    connection.send_data(number, DONE)
    connection.send_headers(number, [(b"x-trailer", b"1")], end_stream=True)


def goodbye(connection: h2.connection.H2Connection, number: int) -> None:
    connection.close_connection(
        h2.errors.ErrorCodes.ENHANCE_YOUR_CALM, b"too many", last_stream_id=number - 2
    )


@pytest.mark.parametrize(
    ("reply", "closes", "reason", "events", "connections"),
    [
        (refusal, False, 'HTTP 429: {"error":"later"}', 0, 1),
        (unfinished, True, "the connection ended before the reply did", 1, 2),
        (lambda connection, number: None, True, "closed without a reply", 0, 2),
        (reset, False, "RST_STREAM: REFUSED_STREAM", 1, 1),
        (without_done, False, "the reply ended without its terminator", 1, 1),
        (with_error, False, 'error event: {"error":{"code":500}}', 2, 1),
        (split, False, None, 2, 1),
        (goodbye, False, "GOAWAY: ENHANCE_YOUR_CALM too many", 0, 2),
    ],
)
def test_a_request_that_goes_wrong_is_an_error_and_the_load_goes_on(
    scripted2: Scripted2, reply: Reply, closes: bool, reason: str | None, events: int, connections: int
) -> None:
    scripted2.reply = lambda number: reply if number == 1 else stream(3)
    scripted2.closing = lambda number: closes and number == 1
    result = run(plan(scripted2.port, connections=1, in_flight=1, requests=4, streams_per_connection=1))[0]
    assert (result.requests, result.errors) == (4, int(reason is not None))
    assert result.error_samples == ([reason] if reason else [])
    assert result.events == 9 + events
    assert scripted2.connections == connections


def test_a_lost_connection_fails_all_its_requests(scripted2: Scripted2) -> None:
    scripted2.reply = lambda number: stream(3) if number > 3 else unfinished
    scripted2.closing = lambda number: number == 3
    result = run(plan(scripted2.port, connections=1, streams_per_connection=4, requests=6))[0]
    assert (result.requests, result.errors) == (6, 4)
    assert result.error_samples == ["the connection ended before the reply did"]


def test_bodies_wait_for_the_windows_of_the_server(scripted2: Scripted2) -> None:
    scripted2.settings = {SETTINGS.INITIAL_WINDOW_SIZE: 1000}
    body = json.dumps({"prompt": "x" * 200_000})
    result = run(plan(scripted2.port, bodies=[body], requests=4))[0]
    assert (result.errors, result.events) == (0, 12)
    assert all(received == body.encode() for _, received in scripted2.requests)


def test_a_reply_before_the_end_of_its_request_resets_it(scripted2: Scripted2) -> None:
    connection = ready({SETTINGS.INITIAL_WINDOW_SIZE: 10}, body=b"x" * 100)
    connection.start(0)
    connection.take_output()
    head = bytes([0x88])
    ended = connection.feed(
        frame(HEADERS, END_HEADERS, 1, head) + frame(DATA, END_STREAM, 1, DONE),
        ReadLog(),
    )
    assert [each.error for each in ended] == [None]
    assert connection.take_output() == rst_stream(1, ErrorCode.CANCEL)
    assert connection.unsent == 0


def test_a_server_of_fewer_streams_is_named(scripted2: Scripted2) -> None:
    scripted2.settings = {SETTINGS.MAX_CONCURRENT_STREAMS: 1}
    with pytest.raises(LoadError, match=r"takes 1 streams per connection .* 2 are needed: use more conn"):
        run(plan(scripted2.port))


def test_a_server_of_http1_is_named(scripted: Scripted) -> None:
    scripted.closing = lambda number: True
    with pytest.raises(
        LoadError, match=r"closed the connection instead of|cannot connect|not a frame of HTTP/2"
    ):
        run(plan(scripted.port))


def test_it_works_over_tls(scripted2: Scripted2, tmp_path: Path) -> None:
    files = certificates.make(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.both)
    context.set_alpn_protocols(["h2"])
    scripted2.context = context
    # Replies of many records, so that reads end within them.
    scripted2.reply = lambda number: stream(1000)
    result = run(plan(scripted2.port, authority=files.authority), rounds=2)[1]
    assert (result.errors, result.events) == (0, 8000)
    assert scripted2.requests[0][0][b":scheme"] == b"https"


def test_a_server_without_h2_by_alpn_is_named(scripted2: Scripted2, tmp_path: Path) -> None:
    files = certificates.make(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.both)
    context.set_alpn_protocols(["http/1.1"])
    scripted2.context = context
    with pytest.raises(LoadError, match=r"chose None by ALPN, not h2"):
        run(plan(scripted2.port, authority=files.authority))


def ready(values: dict[int, int], body: bytes = b"{}", places: int = 4) -> Http2LoadConnection:
    """A connection after the settings of its server."""
    requests = Http2Requests(plan(80), [body])
    connection = Http2LoadConnection(requests, places)
    connection.feed(settings_frame(values), ReadLog())
    connection.take_output()
    return connection


@given(st.lists(st.integers(0, 10_000), max_size=40), st.integers(1, 4))
def test_reads_may_end_anywhere(cuts: list[int], events: int) -> None:
    connection, log = ready({}), ReadLog()
    connection.start(0)
    data = frame(HEADERS, END_HEADERS, 1, bytes([0x88])) + frame(DATA, 0, 1, EVENT) * events
    data += frame(PING, 0, 0, b"12345678") + frame(DATA, END_STREAM, 1, DONE)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    ended = []
    for start, end in itertools.pairwise(edges):
        ended += connection.feed(data[start:end], log)
    assert [(each.request, each.error) for each in ended] == [(0, None)]
    assert log.events == events
    assert connection.take_output().endswith(ping(b"12345678", ack=True))


def test_the_server_is_granted_what_was_read() -> None:
    connection, log = ready({}), ReadLog()
    connection.start(0)
    connection.take_output()
    connection.feed(frame(HEADERS, END_HEADERS, 1, bytes([0x88])), log)
    connection.core.receive_window = WINDOW // 2 + 3 * len(EVENT)
    connection.feed(frame(DATA, 0, 1, EVENT) * 2, log)
    assert connection.take_output() == b""
    connection.feed(frame(DATA, 0, 1, EVENT) * 2, log)
    assert connection.take_output() == window_update(0, WINDOW // 2 + len(EVENT))
    assert connection.core.receive_window == WINDOW
