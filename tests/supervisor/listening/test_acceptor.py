"""The acceptor with a real listener; API servers are ends of handovers in this process."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from penstock.http.sockets import accepting
from penstock.http.sockets.listener import listen
from penstock.logging_setup import RateLimitedLog
from penstock.supervisor.listening import acceptor as module
from penstock.supervisor.listening import least_connections
from penstock.supervisor.listening.acceptor import Acceptor
from penstock.wire.handover import HandoverReceiver

PATIENCE_S = 60.0


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll what another thread does, for which there is nothing to wait on."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.001)):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError(f"{what} did not happen")


def test_a_failed_acceptor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the supervisor, which ends with the exit code of a failure."""

    def fail(*arguments: object) -> None:
        raise RuntimeError("broken")

    listener = listen("127.0.0.1", 0).socket
    with listener, Acceptor(listener) as acceptor:
        assert select.select([acceptor.failure], [], [], 0)[0] == []
        monkeypatch.setattr(acceptor, "_apply_changes", fail)
        acceptor._wake_up()
        assert select.select([acceptor.failure], [], [], PATIENCE_S)[0] == [acceptor.failure]
        monkeypatch.undo()


class Server:
    """What an API server does with its end, step by step."""

    def __init__(self, acceptor: Acceptor) -> None:
        self.target = acceptor.add_target("it")
        self.taker = HandoverReceiver(os.dup(self.target.sender.server_end))
        self.connections: list[socket.socket] = []
        self.dead = False

    def die(self) -> None:
        self.dead = True
        self.target.remove()

    def report(self, *, accepts: bool = True) -> None:
        """Until the acceptor has read it: what connects later is spread by it."""
        assert self.taker.report(len(self.connections), accepts=accepts)
        wait_until(
            lambda: not select.select([self.target.sender], [], [], 0)[0], PATIENCE_S, "reading a report"
        )

    def wait(self) -> None:
        assert select.select([self.taker], [], [], PATIENCE_S)[0], "nothing came"

    def take(self, count: int) -> None:
        """Waits for so many connections, takes them, and reports."""
        wanted = len(self.connections) + count
        while len(self.connections) < wanted:
            self.wait()
            self.connections += self.taker.receive()
            self.report()
        assert len(self.connections) == wanted

    def answer(self, text: bytes) -> None:
        for connection in self.connections:
            connection.sendall(text)

    def close_all(self) -> None:
        for connection in self.connections:
            connection.close()
        self.connections.clear()

    def close(self) -> None:
        self.close_all()
        self.taker.close()
        if not self.dead:
            self.die()


class Site:
    """A listener, its acceptor, and whoever is at either side."""

    def __init__(self, stack: ExitStack, listener: socket.socket, acceptor: Acceptor) -> None:
        self._stack = stack
        self._address = listener.getsockname()
        self._acceptor = acceptor

    def server(self, *, accepts: bool = True) -> Server:
        server = Server(self._acceptor)
        self._stack.callback(server.close)
        if accepts:
            server.report()
        return server

    def connect(self, count: int) -> list[socket.socket]:
        return [
            self._stack.enter_context(socket.create_connection(self._address, timeout=PATIENCE_S))
            for _ in range(count)
        ]

    def connect_until_there_is_one_for(self, server: Server) -> None:
        """What a server reports may be read after some connections that come later."""
        while not select.select([server.taker], [], [], 0.01)[0]:
            self.connect(1)


@pytest.fixture(autouse=True)
def nobody_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the test is."""
    monkeypatch.setattr(least_connections, "STALL_S", 3600.0)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    made, _ = listen("127.0.0.1", 0)
    with made:
        yield made


@pytest.fixture
def site(listener: socket.socket) -> Iterator[Site]:
    with Acceptor(listener) as acceptor, ExitStack() as stack:
        yield Site(stack, listener, acceptor)


def answers(clients: list[socket.socket]) -> list[bytes]:
    return sorted(client.recv(1) for client in clients)


def test_connections_are_spread_evenly(site: Site) -> None:
    servers = [site.server() for _ in range(3)]
    clients = site.connect(90)
    for name, server in zip((b"a", b"b", b"c"), servers, strict=True):
        server.take(30)
        server.answer(name)
    assert answers(clients) == [b"a"] * 30 + [b"b"] * 30 + [b"c"] * 30


def test_one_whose_connections_were_closed_gets_the_next(site: Site) -> None:
    first, second = site.server(), site.server()
    site.connect(20)
    first.take(10)
    second.take(10)
    second.close_all()
    second.report()
    site.connect_until_there_is_one_for(second)


def test_connections_wait_while_nobody_takes_any(site: Site) -> None:
    late = site.server(accepts=False)
    clients = site.connect(5)
    assert late.taker.receive() == []
    late.report()
    late.take(5)
    late.answer(b"x")
    assert answers(clients) == [b"x"] * 5


def test_what_a_dead_server_has_not_taken_goes_to_another(site: Site) -> None:
    dead, alive = site.server(), site.server()
    clients = site.connect(10)
    alive.take(5)
    dead.die()
    alive.take(5)
    alive.answer(b"x")
    assert answers(clients) == [b"x"] * 10


def test_what_a_server_that_leaves_off_has_not_taken_goes_to_another(site: Site) -> None:
    retiring, other = site.server(), site.server()
    site.connect(10)
    other.take(5)
    retiring.report(accepts=False)
    other.take(5)
    site.connect(3)
    other.take(3)
    assert retiring.taker.receive() == []


def test_a_server_that_hangs_loses_what_waits_for_it_until_it_is_back(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, other = site.server(), site.server()
    site.connect(8)
    other.take(4)
    # For a moment only: nobody takes what is given to it within no time at all.
    monkeypatch.setattr(least_connections, "STALL_S", 0.0)
    site.connect(1)
    wait_until(lambda: "takes no connections" in caplog.text, PATIENCE_S, "noticing the one that hangs")
    monkeypatch.setattr(least_connections, "STALL_S", 3600.0)
    site.connect(1)
    other.take(6)
    site.connect(2)
    other.take(2)
    hanging.wait()
    assert hanging.taker.receive() == []  # it was asked for a report
    hanging.report()
    site.connect_until_there_is_one_for(hanging)


def test_more_connections_than_have_room_on_their_way(site: Site) -> None:
    """The way to one API server has room for some hundred connections."""
    server = site.server()
    clients = site.connect(600)
    server.take(600)
    server.answer(b"x")
    assert answers(clients) == [b"x"] * 600


class Exhausted(socket.socket):
    """A listener whose first accepts fail."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(fileno=os.dup(listener.fileno()))
        self.failures = [errno.ECONNABORTED, errno.EMFILE, errno.ENFILE]

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            raise OSError(self.failures.pop(), "")
        return super().accept()


def test_accepting_goes_on_after_failures(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    monkeypatch.setattr(accepting, "_rarely", RateLimitedLog(accepting.log, logging.ERROR))
    with Exhausted(listener) as exhausted, Acceptor(exhausted) as acceptor, ExitStack() as stack:
        site = Site(stack, listener, acceptor)
        server = site.server()
        site.connect(1)
        server.take(1)
        assert exhausted.failures == []
    assert caplog.text.count("cannot accept connections") == 1, "once a minute"


def test_connections_that_nobody_took_are_closed_at_the_end(listener: socket.socket) -> None:
    with ExitStack() as stack:
        with Acceptor(listener) as acceptor:
            site = Site(stack, listener, acceptor)
            server = site.server()
            [client] = site.connect(1)
            server.wait()
            server.die()
        assert client.recv(1) == b""


@pytest.mark.parametrize(
    "message",
    [b"", b"x", b"x" * 12, b"x" * 14, b"x" * 4096, b"\xff" * 13],
    ids=lambda message: str(len(message)),
)
def test_a_server_whose_report_is_nonsense_gets_no_more_and_the_others_do(
    message: bytes, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    broken, other = site.server(), site.server()
    site.connect(4)
    other.take(2)
    with socket.socket(fileno=os.dup(broken.target.sender.server_end)) as raw:
        raw.send(message)
    other.take(2)
    site.connect(4)
    other.take(4)
    assert caplog.text.count("gets no more connections") == 1


def test_a_server_that_shuts_its_socket_leaves_its_connections_to_others(site: Site) -> None:
    broken, other = site.server(), site.server()
    with socket.socket(fileno=os.dup(broken.target.sender.server_end)) as raw:
        raw.shutdown(socket.SHUT_RDWR)
    site.connect(4)
    other.take(4)
    broken.die()
    site.connect(2)
    other.take(2)


def test_the_first_connections_wait_until_every_api_server_takes_some() -> None:
    """The first one to start would get a whole burst otherwise."""
    with ExitStack() as ends:
        listener = listen("127.0.0.1", 0)
        acceptor = ends.enter_context(Acceptor(ends.enter_context(listener.socket)))
        first, second = Server(acceptor), Server(acceptor)
        for server in (first, second):
            ends.callback(server.close)
            ends.callback(server.die)
        first.report()
        clients = [socket.create_connection(listener.address, PATIENCE_S) for _ in range(4)]
        for client in clients:
            ends.callback(client.close)
        second.report()
        first.take(2)
        second.take(2)
