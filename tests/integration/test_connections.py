"""Connections: reuse, pipelining, and what a plain socket sees."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import httpx
import pytest

from tests.integration.server import Server


def request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    return (
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (path.encode(), len(data), data)
    )


def connect(server: Server) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port), timeout=60)


def read_until(connection: socket.socket, end: bytes, times: int) -> bytes:
    """What arrives until ``end`` has come ``times`` times."""
    data = b""
    while data.count(end) < times:
        more = connection.recv(65536)
        assert more, f"closed after {data!r}"
        data += more
    return data


def joined(events: str) -> str:
    """The text of all events, as JSON has it."""
    return "".join(re.findall(r'"text":"((?:[^"\\]|\\.)*)"', events))


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    bodies = [
        {"prompt": "a", "max_tokens": 20, "seed": 1, "stream": True},
        {"prompt": "a", "max_tokens": 2, "seed": 2, "stream": True},
        {"prompt": "a", "max_tokens": 5, "seed": 3, "stream": True},
    ]
    with connect(server) as connection:
        connection.sendall(b"".join(map(request, bodies)))
        data = read_until(connection, b"0\r\n\r\n", 3)
    replies = data.split(b"0\r\n\r\n")[:3]
    for body, reply in zip(bodies, replies, strict=True):
        assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
        alone = server.stream(**{key: value for key, value in body.items() if key != "stream"})
        assert joined(reply.decode()) == joined("".join(alone))


def test_a_connection_serves_many_requests_of_all_kinds(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for number in range(20):
            stream = bool(number % 2)
            reply = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": stream})
            assert reply.status_code == 200
            assert client.post("/v1/completions", content=b"{").status_code == 400
        assert client.get("/health").status_code == 200


def test_the_first_event_leaves_with_the_headers_and_is_not_cached(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(request({"prompt": "x", "max_tokens": 3, "stream": True}))
        head, _, rest = read_until(connection, b"\r\n\r\n", 1).partition(b"\r\n\r\n")
        rest += b"" if rest.endswith(b"0\r\n\r\n") else read_until(connection, b"0\r\n\r\n", 1)
    lines = head.lower().split(b"\r\n")
    assert b"content-type: text/event-stream; charset=utf-8" in lines
    assert b"cache-control: no-cache" in lines
    assert b"x-accel-buffering: no" in lines
    assert b"transfer-encoding: chunked" in lines


def test_expect_100_continue(server: Server) -> None:
    data = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    with connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(data)
        )
        assert read_until(connection, b"\r\n\r\n", 1).startswith(b"HTTP/1.1 100 Continue")
        connection.sendall(data)
        assert read_until(connection, b"}", 1).startswith(b"HTTP/1.1 200 OK")


def test_connection_close_is_honoured(server: Server) -> None:
    body = request({"prompt": "x", "max_tokens": 2, "stream": True}).replace(
        b"Host: x", b"Host: x\r\nConnection: close"
    )
    with connect(server) as connection:
        connection.sendall(body)
        data = b""
        while more := connection.recv(65536):
            data += more
    assert b"connection: close" in data.lower()
    assert data.endswith(b"0\r\n\r\n")


def read_to_the_end(connection: socket.socket) -> bytes:
    data = b""
    while more := connection.recv(65536):
        data += more
    return data


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", data)]


MIXED = [
    request({"prompt": "a", "max_tokens": 9, "stream": True}),
    request({"prompt": "a", "max_tokens": 2}),
    b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n",
    request({"prompt": "a", "max_tokens": -1}),
    request({"prompt": "a", "max_tokens": 3, "stream": True}).replace(
        b"Host: x", b"Host: x\r\nConnection: close"
    ),
]


@pytest.mark.parametrize("size", [1 << 20, 100, 7])
def test_pipelined_requests_of_all_kinds_however_they_are_cut(server: Server, size: int) -> None:
    sent = b"".join(MIXED)
    with connect(server) as connection:
        for start in range(0, len(sent), size):
            connection.sendall(sent[start : start + size])
        data = read_to_the_end(connection)
    assert statuses(data) == [200, 200, 404, 400, 200]
    assert data.count(b"data: [DONE]") == 2
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "rest", [b"this is not HTTP\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"]
)
def test_what_is_no_request_does_not_break_into_the_reply_before_it(server: Server, rest: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(request({"prompt": "a", "max_tokens": 200, "stream": True}))
        data = read_until(connection, b"data: {", 1)
        connection.sendall(rest)
        data += read_to_the_end(connection)
    assert statuses(data) == [200, 400]
    assert b"data: [DONE]\n\n\r\n0\r\n\r\nHTTP/1.1 400 " in data


def test_a_request_that_breaks_off_gets_its_error_after_the_replies_before_it(server: Server) -> None:
    broken = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnonsense\r\n"
    with connect(server) as connection:
        connection.sendall(request({"prompt": "a", "max_tokens": 2}))
        assert statuses(read_until(connection, b'"metrics":null}', 1)) == [200]
        connection.sendall(broken)
        assert statuses(read_to_the_end(connection)) == [400]


def test_http_1_0_knows_no_chunks(server: Server) -> None:
    body = request({"prompt": "a", "max_tokens": 20, "seed": 3, "stream": True})
    with connect(server) as connection:
        connection.sendall(body.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, events = read_to_the_end(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    alone = server.stream("a", max_tokens=20, seed=3)
    assert events.startswith(b"data: {")
    assert joined(events.decode()) == joined("".join(alone))
    assert events.endswith(b"data: [DONE]\n\n")
