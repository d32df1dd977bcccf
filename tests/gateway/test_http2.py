"""A real gateway in front of model servers that speak HTTP/2: the outcomes of HTTP/1.1, stream by stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from penstock.http.http2.frames import END_HEADERS, HEADERS, PREFACE, frame, rst_stream, settings_frame
from penstock.http.http2.header_blocks import encode_fields
from tests.gateway.processes import (
    WAIT_S,
    Call,
    Gateway,
    Upstream,
    eventually,
    gateway,
    outcome_of,
    three_in_a_row,
)
from tests.gateway.upstream.http2_server import Server, Stream, http2_server
from tests.integration.clients import address_of

TOKEN = b'data: {"choices":[{"index":0,"text":" a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
EVENTS = [(b":status", b"200"), (b"content-type", b"text/event-stream")]
Behaviour = Callable[[Stream], Awaitable[None]]


@dataclass
class ModelServer:
    """In a thread of its own."""

    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def streams(self) -> list[Stream]:
        """Without scrapes."""
        return [each for each in self.server.streams if dict(each.headers)[b":path"] != b"/metrics"]

    def behave(self, behaviour: Behaviour) -> None:
        self.loop.call_soon_threadsafe(setattr, self.server, "behaviour", behaviour)


@contextlib.contextmanager
def model_server(behaviour: Behaviour) -> Iterator[ModelServer]:
    ready = threading.Event()
    made: list[ModelServer] = []
    over: list[asyncio.Event] = []

    async def serve() -> None:
        async with http2_server(behaviour) as server:
            over.append(asyncio.Event())
            made.append(ModelServer(server, asyncio.get_running_loop()))
            ready.set()
            await over[0].wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(WAIT_S)
    try:
        yield made[0]
    finally:
        made[0].loop.call_soon_threadsafe(over[0].set)
        thread.join()


async def good(stream: Stream) -> None:
    await stream.complete.wait()
    stream.send_head(EVENTS)
    for _ in range(20):
        await stream.send(TOKEN)
    await stream.send(USAGE + DONE, end=True)


async def whole(stream: Stream) -> None:
    await stream.complete.wait()
    stream.send_head([(b":status", b"200"), (b"content-type", b"application/json")])
    await stream.send(
        b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}', end=True
    )


def resets(code: int, *, after: bytes = b"") -> Behaviour:
    async def behaviour(stream: Stream) -> None:
        if after:
            stream.send_head(EVENTS)
            await stream.send(after)
        stream.connection.h2.reset_stream(stream.stream_id, code)
        stream.connection.flush()

    return behaviour


def lost(*, after: bytes = b"") -> Behaviour:
    async def behaviour(stream: Stream) -> None:
        if after:
            stream.send_head(EVENTS)
            await stream.send(after)
        stream.connection.transport.close()

    return behaviour


def first(one: Behaviour, others: Behaviour) -> Behaviour:
    """``one`` for the first request."""
    begun = False

    async def behaviour(stream: Stream) -> None:
        nonlocal begun
        begun, is_first = True, not begun
        await (one if is_first else others)(stream)

    return behaviour


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with model_server(good) as each:
        yield each


@pytest.fixture(scope="module")
def front(server: ModelServer) -> Iterator[Gateway]:
    options = ("--upstream-http2", "require", "--max-attempts", "1", "--include-usage", "auto")
    with gateway(server.url, options=options) as each:
        yield each


def ask(
    front: Gateway, server: ModelServer, behaviour: Behaviour, **fields: Any
) -> tuple[httpx.Response, str]:
    """A request that meets ``behaviour``, and its outcome."""
    server.behave(good)
    three_in_a_row(lambda: front.complete().status_code == 200)  # closes the circuit breaker
    server.behave(behaviour)
    replies: list[httpx.Response] = []
    outcome = outcome_of(front, lambda: replies.append(front.complete(**fields)))
    return replies[0], outcome


@pytest.mark.parametrize("http2", [False, True])
def test_streams_to_clients_of_both_protocols(server: ModelServer, front: Gateway, http2: bool) -> None:
    server.behave(good)
    body = {"model": "m", "prompt": "p", "stream": True}
    with httpx.Client(base_url=front.url, http1=not http2, http2=http2, timeout=WAIT_S) as client:
        for _ in range(3):
            reply = client.post("/v1/completions", json=body)
            assert (reply.status_code, reply.content) == (200, TOKEN * 20 + DONE)
            assert reply.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
            via = dict(server.streams[-1].headers)[b"via"]
            assert via.startswith(b"2 penstock-" if http2 else b"1.1 penstock-")
    assert json.loads(server.streams[-1].body)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("behaviour", "status", "outcome"),
    [
        (good, 200, "ok"),
        (whole, 200, "ok"),
        (resets(2), 502, "model_server_error"),
        (resets(8), 502, "network_error"),
        (lost(), 502, "network_error"),
    ],
)
def test_outcomes_before_the_reply(
    server: ModelServer, front: Gateway, behaviour: Behaviour, status: int, outcome: str
) -> None:
    reply, seen = ask(front, server, behaviour, stream=behaviour is not whole)
    assert (reply.status_code, seen) == (status, outcome)


@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [(resets(2, after=TOKEN * 3), "model_server_error"), (lost(after=TOKEN * 3), "network_error")],
)
def test_a_stream_that_breaks_ends_with_an_error_event(
    server: ModelServer, front: Gateway, behaviour: Behaviour, outcome: str
) -> None:
    reply, seen = ask(front, server, behaviour)
    assert reply.content.startswith(TOKEN * 3)
    assert b"event: error" in reply.content
    assert b"upstream_broken" in reply.content
    assert seen == outcome


@pytest.mark.parametrize("code", [7, None])
def test_a_request_that_was_not_processed_is_sent_again(
    server: ModelServer, front: Gateway, code: int | None
) -> None:
    """``code``: of RST_STREAM; None: GOAWAY."""

    async def goaway(stream: Stream) -> None:
        stream.connection.transport.write(b"\0\0\x08\x07\0\0\0\0\0" + bytes(8))

    refusal = goaway if code is None else resets(code)
    before = len(server.streams)
    reply, outcome = ask(front, server, first(refusal, good))
    assert (reply.status_code, outcome) == (200, "ok")
    assert len(server.streams) >= before + 5  # three, and one twice


def test_a_client_that_leaves_cancels_its_stream_alone(server: ModelServer, front: Gateway) -> None:
    async def endless(stream: Stream) -> None:
        stream.send_head(EVENTS)
        while not stream.reset.is_set():
            await stream.send(TOKEN)
            await asyncio.sleep(0.002)

    ask(front, server, good)
    server.behave(endless)
    with httpx.Client(base_url=front.url, timeout=WAIT_S) as client:
        body = {"model": "m", "prompt": "p", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stays:
            events = stays.iter_raw()
            assert TOKEN in next(events)

            def leave() -> None:
                with front.client.stream("POST", "/v1/completions", json=body) as leaves:
                    assert TOKEN in next(leaves.iter_raw())

            before = front.counts().get("client_disconnect", 0)
            leave()
            eventually(lambda: front.counts().get("client_disconnect", 0) == before + 1)
            staying, left = server.streams[-2:]
            eventually(left.reset.is_set)
            assert not staying.reset.is_set()
            assert next(events)
            assert staying.connection is left.connection
        eventually(staying.reset.is_set)


def test_requests_that_are_reset_as_they_come_are_counted(front: Gateway) -> None:
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/v1/completions"),
        (b":authority", b"h"),
    ]
    head = frame(HEADERS, END_HEADERS, 1, encode_fields(fields))

    def leave() -> None:
        with socket.create_connection(address_of(front.url), timeout=WAIT_S) as connection:
            connection.sendall(PREFACE + settings_frame({}) + head + rst_stream(1, 8))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass

    assert outcome_of(front, leave) == "client_disconnect"


def test_a_server_of_http1_is_used_as_ever() -> None:
    def answer(call: Call) -> None:
        call.stream('{"choices":[{"index":0,"text":" a"}]}', "[DONE]")

    with Upstream(answer) as plain, gateway(plain) as each:
        assert each.complete().content == TOKEN + DONE
        assert any("speaks HTTP/1.1" in line for line in each.lines)
    with Upstream(answer) as plain, gateway(plain, options=("--upstream-http2", "require")) as each:
        reply = each.complete()
        assert reply.status_code == 502
        assert "--upstream-http2 require" in reply.json()["error"]["message"]
        assert not plain.calls


def test_scrapes_share_the_connections(server: ModelServer) -> None:
    async def both(stream: Stream) -> None:
        if dict(stream.headers)[b":path"] != b"/metrics":
            await good(stream)
            return
        stream.send_head()
        await stream.send(b"vllm:num_requests_waiting 3\n", end=True)

    server.behave(both)
    with gateway(server.url, options=("--scrape-interval", "0.05")) as each:
        eventually(lambda: 3.0 in each.counts("endpoint_waiting").values())
        assert each.complete().status_code == 200
