"""Connections over several API servers: who gets them, also when one of them dies, hangs or is left."""

from __future__ import annotations

import json
import re
import selectors
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Self

import httpx
import psutil
import pytest

from tests.integration.server import SYNTHETIC, Server, all_up, wait_until

SERVERS, ENGINES = 4, 4
WAIT_S = 90
BODY = json.dumps({"prompt": "hello", "max_tokens": 800, "ignore_eos": True}).encode()
"""Long enough for all requests of a round to run at the same time, so that loads can be compared."""
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n")


class Pool:
    """Connections that are kept open, each with one request at a time."""

    def __init__(self, server: Server) -> None:
        url = httpx.URL(server.url)
        self._address = (url.host, url.port)
        self.connections: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self.connections:
            connection.close()

    def open(self, count: int) -> None:
        for _ in range(count):
            self.connections.append(socket.create_connection(self._address, timeout=WAIT_S))

    def ask(self) -> None:
        """A request on every connection at the same time; waits for the replies, which must be good."""
        with selectors.DefaultSelector() as selector:
            for connection in self.connections:
                connection.sendall(REQUEST)
                selector.register(connection, selectors.EVENT_READ, bytearray())
            while selector.get_map():
                ready = selector.select(WAIT_S)
                assert ready, f"{len(selector.get_map())} replies did not come"
                for key, _ in ready:
                    assert isinstance(key.fileobj, socket.socket)
                    data = key.fileobj.recv(65536)
                    assert data, "closed"
                    key.data.extend(data)
                    if is_whole(key.data):
                        assert key.data.startswith(b"HTTP/1.1 200 ")
                        selector.unregister(key.fileobj)

    def to(self, process: psutil.Process) -> list[socket.socket]:
        """The connections to a process. One that has had a reply is sure to be with one."""
        ports = {each.raddr.port for each in process.net_connections(kind="tcp") if each.raddr}
        return [connection for connection in self.connections if connection.getsockname()[1] in ports]

    def by_server(self, fleet: Server) -> Counter[str]:
        """How many connections each API server has."""
        return Counter({title(process): len(self.to(process)) for process in fleet.children("api-server")})

    def leave(self, process: psutil.Process) -> int:
        """Close the connections to a process; returns how many."""
        left = self.to(process)
        self.connections = [connection for connection in self.connections if connection not in left]
        for connection in left:
            connection.close()
        return len(left)

    def drop_broken(self) -> int:
        """Close the connections that the server has closed; returns how many."""
        with selectors.DefaultSelector() as selector:
            for connection in self.connections:
                selector.register(connection, selectors.EVENT_READ)
            broken = [key.fileobj for key, _ in selector.select(0)]
        for connection in broken:
            assert isinstance(connection, socket.socket)
            self.connections.remove(connection)
            connection.close()
        return len(broken)


def is_whole(reply: bytearray) -> bool:
    head, end, body = reply.partition(b"\r\n\r\n")
    length = LENGTH.search(head.lower() + b"\r\n")
    return bool(end) and length is not None and len(body) == int(length[1])


def per(text: str, metric: str, label: str) -> Counter[str]:
    """A metric's values by one label, summed over the others."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if line.startswith(f"{metric}{{") and (value := re.search(rf'{label}="([^"]*)".* (\S+)$', line)):
            found[value[1]] += int(float(value[2]))
    return found


def counts(fleet: Server) -> tuple[Counter[str], Counter[str]]:
    """Requests per API server and per engine, as one API server knows them at one time."""
    text = fleet.metrics()
    servers = per(text, "penstock:requests_total", "server")
    return servers, per(text, "vllm:request_success_total", "engine")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--api-server-count", str(SERVERS), "--data-parallel-size", str(ENGINES))
    with Server(*SYNTHETIC, *options, directory=tmp_path_factory.mktemp("fleet")) as running:
        wait_until(lambda: all_up(running, ENGINES, SERVERS), WAIT_S, "connecting to all engines")
        yield running


def title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).strip().removeprefix("penstock: ")


def settle(fleet: Server, connections: int = 0) -> None:
    """Until all API servers know that only so many connections are open, and so of all requests on others.
    Each of them may count the one on which its metrics were asked for."""
    wait_until(
        lambda: all(
            per(fleet.metrics(), "penstock:connections", "server").total() <= connections + SERVERS
            for _ in range(SERVERS)
        ),
        WAIT_S,
        "the end of all connections",
    )


def check(fleet: Server, pool: Pool) -> None:
    """Every API server has its share of a request on every connection, and every engine. After settling."""
    servers, engines = counts(fleet)
    pool.ask()
    total = len(pool.connections)
    after: list[tuple[Counter[str], Counter[str]]] = []

    def counted() -> bool:
        now_servers, now_engines = counts(fleet)
        after[:] = [(now_servers - servers, now_engines - engines)]
        return all(counter.total() == total for counter in after[0])

    wait_until(counted, WAIT_S, "the metrics of all requests")
    [(servers, engines)] = after
    assert_even(servers)
    assert len(engines) == ENGINES
    assert min(engines.values()) > total / (ENGINES + 1)


def assert_even(servers: Counter[str]) -> None:
    """No API server has more than 1.25 times the share that is fair."""
    assert len(servers) == SERVERS
    assert max(servers.values()) <= 1.25 * servers.total() / SERVERS


def test_connections_are_even_and_stay_so_when_one_server_is_left(fleet: Server) -> None:
    settle(fleet)
    with Pool(fleet) as pool:
        pool.open(400)
        check(fleet, pool)
        left = pool.leave(fleet.children("api-server")[1])
        assert 90 <= left <= 110
        settle(fleet, len(pool.connections))
        pool.open(left)
        pool.ask()
        assert_even(pool.by_server(fleet))


def test_a_killed_api_server_s_connections_are_opened_anew_and_even(fleet: Server) -> None:
    settle(fleet)
    with Pool(fleet) as pool:
        pool.open(80)
        pool.ask()
        victim = fleet.children("api-server")[0]
        name = title(victim)
        victim.kill()
        victim.wait(WAIT_S)  # what it took until then was its own
        for _ in range(50):  # no connection is lost, whatever the dead one's was to be
            assert fleet.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
        wait_until(lambda: f"{name} is ready again" in fleet.log, WAIT_S, "the restart")
        wait_until(lambda: all_up(fleet, ENGINES, SERVERS), WAIT_S, "connecting to all engines")
        broken = pool.drop_broken()
        assert 10 <= broken <= 30
        settle(fleet, len(pool.connections))
        pool.open(broken)
        pool.ask()
        assert_even(pool.by_server(fleet))


@pytest.mark.slow
def test_an_api_server_that_hangs_delays_its_connections_and_breaks_none(fleet: Server) -> None:
    victim = fleet.children("api-server")[2]
    settle(fleet)
    with Pool(fleet) as pool:
        victim.suspend()
        try:
            pool.open(40)
            pool.ask()
        finally:
            victim.resume()
    assert f"{title(victim)} takes no connections" in fleet.log
    wait_until(lambda: all_up(fleet, ENGINES, SERVERS), WAIT_S, "its return")
