"""What other servers send is relayed as it is, and nothing of it ends up where it does not belong."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.gateway.behaviours import DONE, REPLY, TEXT, USAGE, good
from tests.gateway.foreign_streams import STREAMS
from tests.gateway.processes import (
    WAIT_S,
    Behaviour,
    Call,
    Gateway,
    Upstream,
    eventually,
    gateway,
    outcome_of,
)


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with Upstream(good) as server:
        yield server


@pytest.fixture(scope="module")
def front(upstream: Upstream) -> Iterator[Gateway]:
    with gateway(upstream) as running:
        yield running


def streams(raw: bytes) -> Behaviour:
    def behave(call: Call) -> None:
        call.stream(end=False)
        call.chunk(raw)
        call.send(b"0\r\n\r\n")

    return behave


def test_streams_are_relayed_byte_for_byte(upstream: Upstream, front: Gateway) -> None:
    """All of one gateway, one after the other."""
    before, wanted = front.counts(), {"ok": 0, "ok_without_usage": 0}
    for stream in STREAMS:
        upstream.behaviour = streams(stream.raw)
        body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
        reply = front.client.post(stream.path, json=body)
        assert reply.content == stream.raw, stream.name
        wanted[stream.outcome] += 1
    assert {name: count - before.get(name, 0) for name, count in front.counts().items()} == wanted


def test_an_error_in_a_stream_is_logged_without_its_message(upstream: Upstream, front: Gateway) -> None:
    error = '{"error":{"message":"my password is hunter2","type":"server_error","code":"oom"}}'
    upstream.behaviour = streams(f"data: {TEXT}\n\ndata: {error}\n\n".encode())
    headers = {"x-request-id": "with-error"}
    reply = front.client.post("/v1/completions", json={"model": "m", "stream": True}, headers=headers)
    assert "hunter2" in reply.text
    eventually(lambda: any("with-error" in line for line in front.lines))
    assert any("the model server sent an error server_error oom" in line for line in front.lines)
    assert not any("hunter2" in line for line in front.lines)


def coded(body: bytes, kind: str, coding: str) -> Behaviour:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-encoding: {coding}\r\n"

    def behave(call: Call) -> None:
        call.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    return behave


@pytest.mark.parametrize(("kind", "stream"), [("text/event-stream", True), ("application/json", False)])
@pytest.mark.parametrize("coding", ["gzip", "br"])
def test_a_coded_reply_is_relayed_as_it_is(
    upstream: Upstream, front: Gateway, kind: str, stream: bool, coding: str
) -> None:
    body = gzip.compress(REPLY)  # what is not read may be anything
    upstream.behaviour = coded(body, kind, coding)
    ask = {"model": "m", "prompt": "p", "stream": stream}
    got = []

    def act() -> None:
        with front.client.stream("POST", "/v1/completions", json=ask) as reply:
            got.append((reply.headers["content-encoding"], b"".join(reply.iter_raw())))

    assert outcome_of(front, act) == "ok_without_usage"
    assert got == [(coding, body)]


def test_servers_are_asked_not_to_code_what_the_gateway_reads(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = good
    headers = {"accept-encoding": "gzip, br, zstd"}
    front.client.post("/v1/completions", json={"model": "m", "prompt": "p"}, headers=headers)
    assert upstream.calls[-1].headers["accept-encoding"] == "identity"
    front.client.get("/v1/files", headers=headers)
    assert upstream.calls[-1].headers["accept-encoding"] == headers["accept-encoding"]


def exchanges(front: Gateway, *bodies: dict[str, object]) -> list[bytes]:
    """The replies to requests one after the other on one connection, as a proxy with a pool sends them."""
    host, port = front.url.removeprefix("http://").split(":")
    replies = []
    with (
        socket.create_connection((host, int(port)), timeout=WAIT_S) as sock,
        closing(sock.makefile("rb")) as file,
    ):
        for fields in bodies:
            body = json.dumps(fields).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body)
            sock.sendall(head + body)
            length, chunked = 0, False
            while (line := file.readline().strip().lower()) != b"":
                length = int(line.split()[1]) if line.startswith(b"content-length:") else length
                chunked = chunked or line == b"transfer-encoding: chunked"
            reply = file.read(length)
            while chunked and (size := int(file.readline(), 16)) >= 0:
                reply += file.read(size + 2)[:-2]
                if not size:
                    break
            replies.append(reply)
    return replies


def test_a_stream_with_a_length_that_loses_its_usage_has_another_length(
    upstream: Upstream, front: Gateway
) -> None:
    events = f"data: {TEXT}\n\ndata: {USAGE}\n\ndata: {DONE}\n\n".encode()

    def behave(call: Call) -> None:
        if call.json.get("stream"):
            call.reply(200, events, "text/event-stream")
        else:
            call.reply(200, REPLY)

    upstream.behaviour = behave
    ask: dict[str, object] = {"model": "m", "prompt": "p"}
    stripped = f"data: {TEXT}\n\ndata: {DONE}\n\n".encode()
    assert exchanges(front, {**ask, "stream": True}, ask) == [stripped, REPLY]


OTHER = b'{"choices":[{"text":"of somebody else"}]}'


@pytest.mark.parametrize(
    "surplus",
    [
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (len(OTHER), OTHER),
        OTHER,
        b"\r\n0\r\n\r\n",
    ],
    ids=["reply", "body", "nothing"],
)
@pytest.mark.parametrize("padding", [0, 8 << 10])
def test_what_follows_a_reply_is_nobodys(
    upstream: Upstream, front: Gateway, surplus: bytes, padding: int
) -> None:
    """In one read with it, or in a later one."""
    body = REPLY + b" " * padding

    def behave(call: Call) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        call.send(head + body + surplus)

    ask: dict[str, object] = {"model": "m", "prompt": "p"}
    upstream.behaviour = behave
    assert exchanges(front, ask, ask, ask) == [body] * 3
    assert len({id(call.connection) for call in upstream.calls[-3:]}) == 3
