"""The gateway as a process, in front of one server that does what servers do."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from tests.gateway.behaviours import (
    DONE,
    ERROR,
    LATIN_1,
    REPLY,
    TEXT,
    USAGE,
    broken_stream,
    cut_head,
    good,
    stalled,
    stalled_in_stream,
)
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
    """Of one endpoint, so that nothing is retried."""
    with gateway(upstream) as running:
        yield running


@pytest.mark.parametrize(
    ("behaviour", "stream", "outcome", "status"),
    [
        (good, True, "ok", 200),
        (good, False, "ok", 200),
        (lambda call: call.reply(400, b'{"error":{"message":"no"}}'), True, "client_error", 400),
        (lambda call: call.reply(500, b"{}"), True, "model_server_error", 500),
        (lambda call: call.stream(TEXT, ERROR), True, "model_server_error", 200),
        (broken_stream, True, "network_error", 200),
        (cut_head, True, "network_error", 502),
        (lambda call: call.stream(TEXT), True, "network_error", 200),
        (lambda call: call.stream("{", DONE), True, "content_error", 200),
        (lambda call: call.reply(200, REPLY[:-9]), False, "content_error", 200),
        (lambda call: call.reply(200, REPLY, "text/html"), True, "content_error", 200),
        (lambda call: call.reply(200, b"{}", LATIN_1), True, "content_error", 200),
        (lambda call: call.reply(307, b""), True, "content_error", 307),
        (lambda call: call.reply(301, b"moved", "text/html"), False, "content_error", 301),
    ],
)
def test_outcomes(
    upstream: Upstream, front: Gateway, behaviour: Behaviour, stream: bool, outcome: str, status: int
) -> None:
    upstream.behaviour = behaviour
    got = []
    # so that failures of other cases do not count against the endpoint
    eventually(lambda: front.client.get("/ready").status_code == 200)
    assert outcome_of(front, lambda: got.append(front.complete(stream=stream))) == outcome
    assert got[0].status_code == status
    upstream.behaviour = good
    front.complete()


def test_a_stream_is_what_the_client_asked_for(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = good
    assert front.complete().text == f"data: {TEXT}\n\ndata: {TEXT}\n\ndata: {DONE}\n\n"
    assert upstream.calls[-1].json["stream_options"] == {"include_usage": True}
    asked = front.complete(stream_options={"include_usage": True})
    assert USAGE in asked.text
    declined = front.complete(stream_options={"include_usage": False})
    assert upstream.calls[-1].json["stream_options"] == {"include_usage": False}
    assert USAGE not in declined.text


def test_a_broken_stream_ends_with_an_error_event(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = broken_stream
    text = front.complete().text
    assert text.startswith(f"data: {TEXT}\n\n")
    assert '\n\nevent: error\ndata: {"type":"error","error":{"message":"gateway: ' in text
    assert '"code":"upstream_broken"' in text
    assert DONE not in text
    upstream.behaviour = good
    front.complete()


@pytest.mark.parametrize("dialect", ["completions", "chat", "responses"])
def test_the_openai_client_raises_where_a_stream_breaks(
    upstream: Upstream, front: Gateway, dialect: str
) -> None:
    events = {
        "completions": TEXT,
        "chat": '{"choices":[{"index":0,"delta":{"content":"a"}}]}',
        "responses": '{"type":"response.output_text.delta","delta":"a"}',
    }

    def breaks(call: Call) -> None:
        call.stream(events[dialect], end=False)
        call.connection.shutdown(socket.SHUT_RDWR)

    upstream.behaviour = breaks
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        asks: dict[str, Callable[[], Iterator[object]]] = {
            "completions": lambda: client.completions.create(model="m", prompt="p", stream=True),
            "chat": lambda: client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "p"}], stream=True
            ),
            "responses": lambda: client.responses.create(model="m", input="p", stream=True),
        }
        stream = iter(asks[dialect]())
        assert next(stream)
        with pytest.raises(openai.APIError, match="the connection was closed"):
            next(stream)
    upstream.behaviour = good
    front.complete()


@pytest.mark.parametrize("behaviour", [stalled, stalled_in_stream])
def test_a_client_that_leaves(upstream: Upstream, front: Gateway, behaviour: Behaviour) -> None:
    upstream.behaviour = behaviour
    eventually(lambda: front.client.get("/ready").status_code == 200)
    count = len(upstream.calls)

    def leave() -> None:
        body = b'{"model":"m","prompt":"p","stream":true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body)
        host, port = front.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(head + body)
            eventually(lambda: len(upstream.calls) > count)
            if behaviour is stalled_in_stream:
                assert sock.recv(4096)

    assert outcome_of(front, leave) == "client_disconnect"
    assert upstream.calls[-1].gone.wait(WAIT_S), "the model server is told"
    upstream.behaviour = good
    front.complete()


def test_other_requests_are_relayed_as_they_are(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = lambda call: call.reply(200, b"\x00audio", "audio/wav")
    reply = front.client.post(
        "/v1/audio?x=1", content=b"\xff", headers={"x-mine": "1", "connection": "close"}
    )
    assert (reply.content, reply.headers["content-type"]) == (b"\x00audio", "audio/wav")
    call = upstream.calls[-1]
    assert (call.path, call.body, call.headers["x-mine"]) == ("/v1/audio?x=1", b"\xff", "1")
    assert "connection" not in call.headers
    assert re.fullmatch(r"1\.1 penstock-[0-9a-f]{16}", call.headers["via"])
    upstream.behaviour = good


@pytest.mark.parametrize(
    "path",
    [
        "/sleep?level=1",
        "/admin/engines/0/drain",
        "/%61dmin/engines",
        "/v1/load_lora_adapter",
        "/llm/sleep",
        "/foo/%61dmin/engines",
        "/pause",
        "/v1/files/%2E%2E/%2E%2E/sleep",
    ],
)
def test_administrative_requests_are_for_the_server_itself(
    upstream: Upstream, front: Gateway, path: str
) -> None:
    before = len(upstream.calls)
    reply = front.client.post(path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "administrative")
    assert len(upstream.calls) == before


def raw_exchange(front: Gateway, request: bytes) -> bytes:
    """What comes until the gateway closes the connection."""
    host, port = front.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock:
        sock.sendall(request)
        return b"".join(iter(lambda: sock.recv(65536), b""))


NO_CONTENT = b"HTTP/1.1 204 No Content\r\n\r\n"
ONLY_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"


@pytest.mark.parametrize(("method", "reply"), [("HEAD", ONLY_HEAD), ("DELETE", NO_CONTENT)])
def test_replies_without_a_body(upstream: Upstream, front: Gateway, method: str, reply: bytes) -> None:
    upstream.behaviour = lambda call: call.send(reply)
    request = f"{method} /v1/files/x HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
    head, _, body = raw_exchange(front, request.encode()).partition(b"\r\n\r\n")
    assert head.startswith(reply[:12])
    assert (b"content-length: 5" in head) == (method == "HEAD")
    assert b"transfer-encoding" not in head
    assert body == b""
    upstream.behaviour = good


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_of_http_1_0_gets_no_chunks(upstream: Upstream, front: Gateway, stream: str) -> None:
    upstream.behaviour = good
    asked = b'{"model":"m","prompt":"p","stream":%b}' % stream.encode()
    request = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(asked), asked)
    head, _, body = raw_exchange(front, request).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    streamed = f"data: {TEXT}\n\ndata: {TEXT}\n\ndata: {DONE}\n\n".encode()
    assert body == (streamed if stream == "true" else REPLY)


def test_a_client_that_waits_for_100_continue(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = good
    asked = b'{"model":"m","prompt":"p"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\nconnection: close\r\n"
    reply = raw_exchange(front, head + b"content-length: %d\r\n\r\n%b" % (len(asked), asked))
    assert b" 200 OK" in reply
    assert reply.endswith(REPLY)
    assert "expect" not in upstream.calls[-1].headers


@pytest.mark.parametrize("given", [None, "mine"])
def test_request_ids(upstream: Upstream, front: Gateway, given: str | None) -> None:
    """In what is relayed and in the gateway's own errors."""
    upstream.behaviour = good
    headers = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}
    headers |= {} if given is None else {"x-request-id": given}
    reply = front.client.post("/v1/completions", json={"model": "m", "prompt": "p"}, headers=headers)
    [request_id] = reply.headers.get_list("x-request-id")
    assert request_id == (given or request_id)
    assert len(request_id) == (16 if given is None else 4)
    sent = upstream.calls[-1].headers
    assert (sent["x-request-id"], sent["traceparent"]) == (request_id, headers["traceparent"])
    eventually(lambda: any(f'"request_id": "{request_id}"' in line for line in front.lines))
    refused = front.client.post("/v1/completions", content=b"{", headers=headers)
    assert refused.status_code == 400
    assert refused.headers["x-request-id"]
    assert (refused.headers["x-request-id"] == request_id) == (given is not None)


def test_the_id_of_the_server_stays(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = lambda call: call.send(
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-request-id: theirs\r\n\r\n{}"
    )
    assert front.client.get("/v1/models").headers.get_list("x-request-id") == ["theirs"]
    upstream.behaviour = good


def test_half_a_request_goes_nowhere(upstream: Upstream, front: Gateway) -> None:
    upstream.behaviour = good
    count = len(upstream.calls)

    def leave() -> None:
        host, port = front.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(b"POST /v1/files HTTP/1.1\r\nhost: h\r\ncontent-length: 9\r\n\r\nhalf")

    assert outcome_of(front, leave) == "client_disconnect"
    assert len(upstream.calls) == count


def floods(call: Call) -> None:
    """Streams until the gateway hangs up."""
    call.stream(end=False)
    try:
        while True:
            call.chunk(f"data: {TEXT}\n\n".encode() * 1000)
    except OSError:
        call.gone.set()


def test_a_client_that_does_not_read_is_no_fault_of_the_server() -> None:
    body = {"model": "m", "prompt": "p", "stream": True}
    with (
        Upstream(floods) as server,
        gateway(server, options=("--event-timeout", "2")) as front,
        contextlib.ExitStack() as unread,
    ):
        for _ in range(4):  # more than would open the breaker
            reply = unread.enter_context(front.client.stream("POST", "/v1/completions", json=body))
            assert reply.status_code == 200
        for call in server.calls:
            assert call.gone.wait(WAIT_S)
        eventually(lambda: front.counts() == {"client_disconnect": 4})
        assert front.client.get("/ready").status_code == 200


BLOCKED_S = 0.3


def cuts_a_slow_reader(call: Call) -> None:
    """Streams until nobody reads on, then breaks, as servers do whose unread output exceeds a limit."""
    call.stream(end=False)
    call.connection.settimeout(BLOCKED_S)
    try:
        while True:
            call.chunk(f"data: {TEXT}\n\n".encode() * 1000)
    except TimeoutError:
        call.reset()
        call.gone.set()


def test_a_server_that_cuts_a_client_that_does_not_read_is_not_at_fault() -> None:
    body = {"model": "m", "prompt": "p", "stream": True}
    with (
        Upstream(cuts_a_slow_reader) as server,
        gateway(server) as front,
        contextlib.ExitStack() as opened,
    ):
        slow = [
            opened.enter_context(front.client.stream("POST", "/v1/completions", json=body)) for _ in range(4)
        ]
        for call in server.calls:
            assert call.gone.wait(WAIT_S)
        for reply in slow:
            with pytest.raises(httpx.TransportError):
                reply.read()
        eventually(lambda: front.counts() == {"client_disconnect": 4})
        assert front.client.get("/ready").status_code == 200


def test_a_body_that_is_no_json_is_refused_as_by_a_server(front: Gateway) -> None:
    reply = front.client.post("/v1/completions", content=b"{")
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("Bad Request", "body.1", 400)
    assert front.counts("rejection_total")["bad_body"]


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize(
    "framing",
    ["content-length: 5\r\n\r\nhello", "transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", "\r\n"],
)
def test_replies_whose_status_has_no_body(
    upstream: Upstream, front: Gateway, status: int, framing: str
) -> None:
    def answers(call: Call) -> None:
        call.send(f"HTTP/1.1 {status} X\r\netag: x\r\n{framing}".encode())
        call.connection.close()

    upstream.behaviour = answers
    request = b"GET /v1/files HTTP/1.1\r\nhost: h\r\n\r\n"
    reply = raw_exchange(front, request + request.replace(b"h\r\n\r\n", b"h\r\nconnection: close\r\n\r\n"))
    upstream.behaviour = good
    heads = reply.split(b"\r\n\r\n")
    assert len(heads) == 3
    assert heads[2] == b"", "no body follows a head"
    for head in heads[:2]:
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert b"etag: x" in head
        assert b"transfer-encoding" not in head
        assert status == 304 or b"content-length" not in head
