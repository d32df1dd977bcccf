"""Connections over several API servers: who gets them, also when one of them dies, hangs or is left."""

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

from .server import SYNTHETIC, Server, all_up, wait_until

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

    def leave(self, process: psutil.Process) -> int:
        """Close the connections to a process; returns how many."""
        ports = {each.raddr.port for each in process.net_connections(kind="tcp") if each.raddr}
        left = [connection for connection in self.connections if connection.getsockname()[1] in ports]
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


def per(fleet: Server, metric: str, label: str) -> Counter[str]:
    """A metric's values by one label, summed over the others."""
    found: Counter[str] = Counter()
    text = httpx.get(f"{fleet.url}/metrics", timeout=30).raise_for_status().text
    for line in text.splitlines():
        if line.startswith(f"{metric}{{") and (value := re.search(rf'{label}="([^"]*)".* (\S+)$', line)):
            found[value[1]] += int(float(value[2]))
    return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--api-server-count", str(SERVERS), "--data-parallel-size", str(ENGINES))
    with Server(*SYNTHETIC, *options, directory=tmp_path_factory.mktemp("fleet")) as running:
        wait_until(lambda: all_up(running, ENGINES, SERVERS), WAIT_S, "connecting to all engines")
        yield running


def title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).strip().removeprefix("penstock: ")


def settle(fleet: Server) -> None:
    """Until no connections of earlier tests are left, as every API server knows."""
    wait_until(
        lambda: all(per(fleet, "penstock:connections", "server").total() < SERVERS for _ in range(SERVERS)),
        WAIT_S,
        "the end of all connections",
    )


def asked(fleet: Server, pool: Pool, times: int) -> tuple[Counter[str], Counter[str]]:
    """Ask so often on every connection; requests per API server and per engine."""
    servers = per(fleet, "penstock:requests_total", "server")
    engines = per(fleet, "vllm:request_success_total", "engine")
    for _ in range(times):
        pool.ask()
    total = times * len(pool.connections)

    def counted() -> bool:
        return (per(fleet, "penstock:requests_total", "server") - servers).total() == total and (
            per(fleet, "vllm:request_success_total", "engine") - engines
        ).total() == total

    wait_until(counted, WAIT_S, "the metrics of all requests")
    return (
        per(fleet, "penstock:requests_total", "server") - servers,
        per(fleet, "vllm:request_success_total", "engine") - engines,
    )


def check(fleet: Server, pool: Pool, times: int) -> None:
    """Every API server has its share, and every engine."""
    servers, engines = asked(fleet, pool, times)
    total = times * len(pool.connections)
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
        check(fleet, pool, times=1)
        left = pool.leave(fleet.children("api-server")[1])
        assert 90 <= left <= 110
        pool.open(left)
        servers, _ = asked(fleet, pool, times=1)
        assert_even(servers)


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
        pool.open(broken)
        servers, _ = asked(fleet, pool, times=1)
        assert_even(servers)


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
