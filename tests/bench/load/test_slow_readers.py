"""Slow readers read little, and notice when they are cut."""

from __future__ import annotations

import socket
import threading
from functools import partial

import h2.connection

from penstock.bench.load.messages import LoadPlan
from penstock.bench.load.slow_readers import READ_BYTES, TURN_S, WINDOW_BYTES, SlowReaders
from tests.bench.load.http2_server import HEAD, Scripted2

PATIENCE_S = 90.0


def plan_for(listener: socket.socket) -> LoadPlan:
    host, port = listener.getsockname()
    return LoadPlan(host, port, "/v1/completions", [], connections=0, in_flight=0, requests=0, api_key="k")


def test_they_send_their_request_and_leave_most_of_the_reply_unread() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with SlowReaders(plan_for(listener), '{"a": 1}', 3) as readers:
            connections = [listener.accept()[0] for _ in range(3)]
            for connection in connections:
                connection.settimeout(PATIENCE_S)
                request = connection.recv(65536)
                assert request.startswith(b"POST /v1/completions HTTP/1.1\r\n")
                assert request.endswith(b'\r\n\r\n{"a": 1}')
            taken = send_until_full(connections[0])
            assert taken < 64 * 1024 * 1024
            assert readers.cut == 0
        for connection in connections:
            connection.close()


def send_until_full(connection: socket.socket) -> int:
    """Bytes that go out before the other side and the kernel take no more for ten reads of a slow reader."""
    connection.settimeout(10 * TURN_S)
    taken = 0
    try:
        while True:
            taken += connection.send(b"x" * 65536)
            assert taken < 1 << 30
    except TimeoutError:
        return taken


def test_a_connection_that_the_server_ends_is_counted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        SlowReaders(plan_for(listener), "{}", 2) as readers,
    ):
        listener.accept()[0].close()
        kept, _ = listener.accept()
        assert cut_in_time(readers, 1)
        kept.close()


def cut_in_time(readers: SlowReaders, count: int) -> bool:
    done = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if readers.cut == count:
            return True
        done.wait(0.01)
    return False


def test_over_http2_half_are_unread_and_half_have_windows_of_one_byte(scripted2: Scripted2) -> None:
    large: list[int] = []
    small: list[int] = []

    def begin(request: int, connection: h2.connection.H2Connection, number: int) -> None:
        narrow = connection.local_flow_control_window(number) == 1
        (small if narrow else large).append(request)
        connection.send_headers(number, HEAD)
        connection.send_data(number, b"d")

    def go_on(connection: h2.connection.H2Connection, number: int) -> None:
        small.append(connection.local_flow_control_window(number))
        connection.send_data(number, b"a")
        if len(small) == 4:
            connection.reset_stream(number)

    scripted2.reply = lambda request: partial(begin, request)
    scripted2.granted = go_on
    scripted2.closing = lambda request: request in large[1:2]
    plan = LoadPlan("127.0.0.1", scripted2.port, "/", [], 1, 1, 1, http2=True)
    with SlowReaders(plan, "{}", 3) as readers:
        assert cut_in_time(readers, 3)
    assert scripted2.connections == 2
    assert (len(large), small[1:]) == (2, [1, 1, 1])


def test_a_slow_reader_is_slower_than_a_stream() -> None:
    assert READ_BYTES / TURN_S < WINDOW_BYTES
