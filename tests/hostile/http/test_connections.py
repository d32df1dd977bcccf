"""Connections of hostile and of unusual clients: pipelines, slow senders, halves, floods."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.gateway.processes import Gateway, eventually
from tests.hostile.http.raw import HEAD, KEY, PROBE, RawClient, post
from tests.integration.server import SYNTHETIC, Server

MIB = 1 << 20
ROOM = 40 * MIB
"""What a process may grow while one client does what it likes."""


def url_and_process(front: Server | Gateway) -> tuple[str, psutil.Process]:
    if isinstance(front, Gateway):
        return front.url, psutil.Process(front.process.pid)
    (api,) = front.children("api-server")
    return front.url, api


@pytest.fixture(params=["server", "gateway"])
def front(request: pytest.FixtureRequest) -> tuple[str, psutil.Process]:
    return url_and_process(request.getfixturevalue(request.param))


def send_until(client: RawClient, data: bytes, seconds: float, most: int) -> int:
    """Send ``data`` over and over until it blocks for half a second, the time is over, or ``most`` bytes are
    sent. Returns the bytes sent."""
    client.socket.settimeout(0.5)
    sent, end = 0, time.monotonic() + seconds
    try:
        while time.monotonic() < end and sent < most:
            sent += client.socket.send(data)
    except (TimeoutError, ConnectionError):
        pass
    return sent


# -- pipelines


def test_endless_requests_whose_replies_nobody_reads_take_no_memory(
    front: tuple[str, psutil.Process],
) -> None:
    url, process = front
    base = process.memory_info().rss
    with RawClient(url, receive_buffer=4096) as client:
        sent = send_until(client, PROBE * 2000, 3.0, 100 * MIB)
        assert sent < 20 * MIB, "the server stops reading"
        assert process.memory_info().rss < base + ROOM
        with RawClient(url) as other:
            other.send(PROBE)
            assert other.reply().status == 200


def test_endless_requests_whose_replies_are_read_take_no_memory(front: tuple[str, psutil.Process]) -> None:
    url, process = front
    base = process.memory_info().rss
    with RawClient(url) as client:
        sender = threading.Thread(target=send_until, args=(client, PROBE * 2000, 1.5, 100 * MIB))
        sender.start()
        replies = b""
        while sender.is_alive():
            replies = client.socket.recv(1 << 16)
            assert process.memory_info().rss < base + ROOM
        assert replies
        sender.join()


def test_pipelined_requests_are_answered_each_once_and_in_order(front: tuple[str, psutil.Process]) -> None:
    url, _ = front
    stream = post({"prompt": "x", "max_tokens": 3, "stream": True})
    bad = post(b"{")
    with RawClient(url) as client:
        client.send((PROBE + stream + bad) * 20 + b"GET /version HTTP/1.1\r\nConnection: close\r\n" + HEAD)
        client.send(b"\r\n")
        for _ in range(20):
            assert client.reply().status == 200
            assert client.reply().body.endswith(b"data: [DONE]\n\n")
            assert client.reply().status == 400
        assert client.reply().closes
        assert client.rest() == b""


def test_a_pipeline_behind_a_stream_waits_and_holds_little(server: Server) -> None:
    url, process = url_and_process(server)
    base = process.memory_info().rss
    with ExitStack() as stack:
        for _ in range(50):
            client = stack.enter_context(RawClient(url))
            client.send(post({"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}))
            send_until(client, PROBE * 2000, 0.0, 1)
            client.socket.setblocking(False)
            for _ in range(40):
                try:
                    client.socket.send(PROBE * 2000)
                except BlockingIOError:
                    break
        with RawClient(url) as other:
            other.send(PROBE)
            assert other.reply().status == 200
        assert process.memory_info().rss < base + ROOM


# -- chunks


def test_trailers_and_extensions_without_end_are_cut(front: tuple[str, psutil.Process]) -> None:
    url, process = front
    base = process.memory_info().rss
    start = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    for endless in (b"0\r\n" + b"X: y\r\n" * 10_000, b"5;" + b"x" * 60_000, b"1;" + b"x" * 90 + b"\r\nx\r\n"):
        with RawClient(url) as client:
            client.send(start)
            send_until(client, endless, 3.0, 50 * MIB)
            assert client.reply().status == 400
            assert process.memory_info().rss < base + ROOM


def test_a_body_of_tiny_chunks_delays_nobody(server: Server) -> None:
    body = b"".join(
        b"1\r\n%c\r\n" % byte for byte in b'{"prompt": "' + b"x" * 40_000 + b'", "max_tokens": 1}'
    )
    start = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with RawClient(server.url) as client:
        client.send(start + body + b"0\r\n\r\n" + PROBE)
        assert client.reply().status in (200, 400)  # the prompt may be too long
        assert client.reply().status == 200


# -- the ends of requests and connections


def test_an_early_reply_to_half_a_body_is_the_only_one(front: tuple[str, psutil.Process]) -> None:
    """Also when the time for the request is over."""
    url, _ = front
    for length, closes in ((100, False), (10 * MIB, True)):
        sent = (
            post(b"x" * 20).replace(b"Length: 20", b"Length: %d" % length).replace(KEY.encode(), b"another")
        )
        with RawClient(url) as client:
            client.send(sent)
            reply = client.reply()
            assert (reply.status, reply.closes) == (401, closes)
            assert client.rest() == b""


def test_a_body_that_comes_after_its_early_reply_is_discarded(front: tuple[str, psutil.Process]) -> None:
    url, _ = front
    body = b"y" * 1000
    with RawClient(url) as client:
        client.send(post(body).replace(KEY.encode(), b"another")[: -len(body)])
        reply = client.reply()
        assert (reply.status, reply.closes) == (401, False)
        client.send(body + PROBE)
        assert client.reply().status == 200


def test_the_reply_to_a_body_that_is_too_large_arrives_whole(front: tuple[str, psutil.Process]) -> None:
    """While the client sends: a connection that closes with unread bytes would be reset."""
    url, _ = front
    with RawClient(url) as client:
        client.send(post(b"").replace(b"Length: 0", b"Length: %d" % (8 * MIB)))
        for _ in range(128):
            client.send(b"x" * (1 << 16))
        reply = client.reply()
        assert (reply.status, reply.closes) == (413, True)
        assert client.rest() == b""


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_sending_side_gets_its_whole_reply(
    front: tuple[str, psutil.Process], stream: bool
) -> None:
    url, _ = front
    with RawClient(url) as client:
        client.send(post({"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": stream}))
        client.end_sending()
        reply = client.reply()
        assert reply.status == 200
        if stream:
            assert reply.body.endswith(b"data: [DONE]\n\n")
        assert client.rest() == b""


def test_a_client_that_ends_its_sending_side_gets_the_replies_to_its_pipeline(
    front: tuple[str, psutil.Process],
) -> None:
    url, _ = front
    with RawClient(url) as client:
        client.send((post({"prompt": "x", "max_tokens": 2}) + PROBE) * 3)
        client.end_sending()
        assert [client.reply().status for _ in range(6)] == [200] * 6
        assert client.rest() == b""


def test_http_1_0_without_an_end_of_sending_and_with_it(front: tuple[str, psutil.Process]) -> None:
    url, _ = front
    for ends in (False, True):
        with RawClient(url) as client:
            client.send(post({"prompt": "x", "max_tokens": 50, "stream": True}).replace(b"/1.1", b"/1.0"))
            if ends:
                client.end_sending()
            assert client.rest().endswith(b"data: [DONE]\n\n")


def test_http_1_0_keeps_its_connection_if_asked_to(front: tuple[str, psutil.Process]) -> None:
    """Where the length of the reply is known: chunks are not for HTTP/1.0."""
    url, _ = front
    asks = b"Connection: Keep-Alive"

    def old(request: bytes) -> bytes:
        return request.replace(b"HTTP/1.1", b"HTTP/1.0")

    whole = old(post({"prompt": "x", "max_tokens": 2}, asks))
    probe = old(PROBE[:-2] + asks + b"\r\n\r\n")
    with RawClient(url) as client:
        for request in (probe, whole, probe.replace(b"GET /version", b"HEAD /health"), whole + probe):
            client.send(request)
            reply = client.reply(bodyless=request.startswith(b"HEAD"))
            assert (reply.status, reply.headers["connection"]) == (200, "keep-alive")
            assert "transfer-encoding" not in reply.headers
        assert client.reply().status == 200
        client.send(old(post({"prompt": "x", "max_tokens": 2, "stream": True}, asks)))
        reply = client.reply()
        assert reply.closes
        assert reply.body.endswith(b"data: [DONE]\n\n")
    for more in (b"", b"Connection: close\r\n", b"Connection: keep-alive, close\r\n"):
        with RawClient(url) as client:
            client.send(old(PROBE[:-2] + more + b"\r\n"))
            assert client.reply().closes
            assert client.rest() == b""


@pytest.mark.parametrize("size", [0, 10, 60, -5], ids=["nothing", "method", "headers", "body"])
def test_a_client_that_ends_its_sending_side_within_a_request_is_closed(
    front: tuple[str, psutil.Process], size: int
) -> None:
    url, _ = front
    with RawClient(url) as client:
        client.send(post({"prompt": "x"})[:size])
        client.end_sending()
        assert client.rest() == b""


@pytest.mark.parametrize("sent", [PROBE[:20], post(b"{}")[:-1], post(b"{}", b"Expect: 100-continue")[:-2]])
def test_a_slow_sender_gets_408_once(server: Server, sent: bytes) -> None:
    with RawClient(server.url) as client:
        client.send(sent)
        reply = client.reply()
        assert (reply.status, reply.closes) == (408, True)
        assert "--header-timeout" in reply.message
        assert client.rest() == b""


def send_slowly(client: RawClient, data: bytes, piece: int) -> None:
    """``piece`` bytes each tenth of a second, until all are sent or the server replies."""
    client.socket.settimeout(0.1)
    for at in range(0, len(data), piece):
        client.socket.send(data[at : at + piece])
        try:
            client.socket.recv(1, socket.MSG_PEEK)
            break
        except TimeoutError:
            pass
    client.socket.settimeout(20.0)


def test_a_body_that_comes_slowly_but_steadily_is_not_late(server: Server) -> None:
    """Twice as long as --header-timeout."""
    body = b'{"prompt": "x", "max_tokens": 1' + b" " * 20_000 + b"}"
    with RawClient(server.url) as client:
        send_slowly(client, post(body), len(body) // 40)
        assert client.reply().status == 200


def test_a_body_that_trickles_gets_408(server: Server) -> None:
    with RawClient(server.url) as client:
        request = post(b"x" * 1000)
        client.send(request[:-1000])
        send_slowly(client, request[-1000:], 2)
        reply = client.reply()
        assert (reply.status, reply.closes) == (408, True)
        assert "1024 bytes per second" in reply.message


def test_a_gateway_counts_what_its_connections_refuse(gateway: Gateway) -> None:
    gateway.client.headers["authorization"] = f"Bearer {KEY}"
    requests, reasons = gateway.counts(), gateway.counts("rejection_total")
    bad_chunk = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"nonsense\r\n"
    sent_and_reasons = (
        (b"nonsense\r\n\r\n", "malformed"),
        (bad_chunk, "malformed"),
        (PROBE[:-2] + b"x: " + b"y" * 70_000, "headers_too_large"),
        (PROBE[:-1], "late"),
        (post(b"{}")[:-1], "late"),
    )
    for sent, reason in sent_and_reasons:
        with RawClient(gateway.url) as client:
            client.send(sent)
            assert client.reply().status in (400, 408, 431)
        reasons[reason] = reasons.get(reason, 0) + 1
        requests["rejected"] = requests.get("rejected", 0) + 1
    eventually(lambda: gateway.counts("rejection_total") == reasons)
    assert gateway.counts() == requests, "each request counts once"
    assert gateway.counts("request_error_total")["rejected,408"]
    eventually(lambda: any('"reason": "headers_too_large"' in line for line in gateway.lines))


# -- many connections


@pytest.mark.slow
def test_the_bodies_of_all_connections_are_bounded_together(tmp_path: Path) -> None:
    """The largest incomplete one is refused, and small ones go on."""
    options = ("--max-request-bytes", str(16 * MIB), "--api-key", KEY)
    with Server(*SYNTHETIC, *options, directory=tmp_path) as server, ExitStack() as stack:
        url, process = url_and_process(server)
        base = process.memory_info().rss
        small = stack.enter_context(RawClient(url))
        whole = post({"prompt": "x" * 1000, "max_tokens": 1})
        small.send(whole[:500])
        large = [stack.enter_context(RawClient(url)) for _ in range(24)]
        refused = 0
        for client in large:
            client.send(post(b"").replace(b"Length: 0", b"Length: %d" % (16 * MIB)))
            for _ in range(15 * 16):
                client.send(b" " * (1 << 16))
        for client in large:
            client.socket.settimeout(0.2)
            try:
                reply = client.reply()
            except TimeoutError:
                continue
            assert (reply.status, reply.closes) == (503, True)
            assert "too_many_bytes" in reply.body.decode()
            refused += 1
        assert 12 <= refused < 24
        assert process.memory_info().rss < base + 2.5 * (128 * MIB)
        small.send(whole[500:])
        assert small.reply().status == 200


@pytest.mark.slow
def test_connections_beyond_the_limit_get_one_503_each(tmp_path: Path) -> None:
    with (
        Server(*SYNTHETIC, "--max-connections", "20", directory=tmp_path) as server,
        ExitStack() as stack,
    ):
        kept = [stack.enter_context(RawClient(server.url)) for _ in range(20)]
        for client in kept:
            client.send(PROBE)
            assert client.reply().status == 200
        for _ in range(50):
            with RawClient(server.url) as refused:
                refused.send(PROBE)
                reply = refused.reply()
                assert (reply.status, reply.closes) == (503, True)
                assert "Too many connections" in reply.message
                assert refused.rest() == b""
        for client in kept:
            client.send(PROBE)
            assert client.reply().status == 200


@pytest.mark.slow
def test_more_clients_than_open_files_wait_and_running_streams_go_on(tmp_path: Path) -> None:
    limited = ("bash", "-c", 'ulimit -n 60; exec "$@"', "limited")
    paced = (*SYNTHETIC, "--synthetic-step-ms", "10")
    with Server(*paced, directory=tmp_path, within=limited) as server, ExitStack() as stack:
        assert "open files (ulimit -n) leaves room for" in server.log
        streams = [stack.enter_context(RawClient(server.url)) for _ in range(3)]
        for client in streams:
            client.send(post({"prompt": "x", "max_tokens": 600, "ignore_eos": True, "stream": True}))
            client.socket.recv(1, 2)  # MSG_PEEK: it has begun
        others = [stack.enter_context(RawClient(server.url)) for _ in range(200)]
        for client in others:
            client.send(PROBE)
        # None of them closes its connection: the server does, so that those that wait are served.
        replies = [client.reply() for client in others]
        assert {reply.status for reply in replies} == {200}
        assert sum(reply.closes for reply in replies) > 100
        for client in streams:
            assert client.reply().body.endswith(b"data: [DONE]\n\n")
