"""Three model servers under load, as processes: one is killed, is slow, stalls, fails, comes and goes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import pytest

from tests.gateway.model_server import ModelServer, model_server
from tests.gateway.processes import WAIT_S, Gateway, eventually, gateway

CLIENTS = 6
BODY = {"model": "m", "prompt": "p", "stream": True}
OPTIONS = ("--first-token-timeout", "10", "--access-log", "none", "--scrape-interval", "0.5")


@dataclass
class Load:
    """What became of each request of several clients that ask again and again."""

    replies: list[str] = field(default_factory=list)
    """``whole``, ``broken`` within the stream, or the status."""

    def more(self, count: int) -> None:
        """Waits until ``count`` more requests have ended."""
        wanted = len(self.replies) + count
        eventually(lambda: len(self.replies) >= wanted)

    def since(self, index: int) -> set[str]:
        return set(self.replies[index:])


@contextlib.contextmanager
def load(front: Gateway) -> Iterator[Load]:
    found, stop = Load(), threading.Event()

    def client() -> None:
        with httpx.Client(base_url=front.url, timeout=WAIT_S) as http:
            while not stop.is_set():
                reply = http.post("/v1/completions", json=BODY)
                told = "whole" if reply.text.endswith("data: [DONE]\n\n") else "broken"
                found.replies.append(told if reply.status_code == 200 else str(reply.status_code))

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def three() -> Iterator[tuple[list[ModelServer], Gateway]]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(model_server()) for _ in range(3)]
        urls = [server.url for server in servers]
        yield servers, stack.enter_context(gateway(*urls, options=OPTIONS))


def kill(server: ModelServer) -> None:
    server.process.kill()
    server.process.wait()


def attempts(front: Gateway, server: ModelServer) -> float:
    """Requests sent to a server that may be dead: those it failed were sent elsewhere as well."""
    if server.process.poll() is None:
        return server.count()
    return front.counts("retry_total")[""]


def leaves(front: Gateway, load: Load, server: ModelServer) -> None:
    """Waits until hardly any of 150 requests goes to a server; an even share would be a third."""

    def hardly_any() -> bool:
        before, index = attempts(front, server), len(load.replies)
        load.more(150)
        return attempts(front, server) - before < 0.1 * (len(load.replies) - index)

    eventually(hardly_any)


FAULTS: dict[str, tuple[Callable[[ModelServer], None], set[str]]] = {
    "killed": (kill, {"whole", "broken", "502"}),
    "late": (lambda server: server.behave("late"), {"whole"}),
    "stalled": (lambda server: server.behave("stalled"), {"whole", "504"}),
    "failing": (lambda server: server.behave("failing"), {"whole", "500"}),
    "unready": (lambda server: server.behave("unready"), {"whole"}),
}
"""What happens to one of three servers, and what its clients may see: what a server may have begun is not
sent to another one, nor is its own 500 replaced."""


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[] if name == "killed" else [pytest.mark.slow]) for name in FAULTS]
)
def test_traffic_leaves_a_bad_server(fault: str) -> None:
    act, allowed = FAULTS[fault]
    with three() as (servers, front), load(front) as running:
        running.more(60)
        assert running.since(0) == {"whole"}
        assert all(server.count() for server in servers)
        act(servers[0])
        leaves(front, running, servers[0])
        assert running.since(0) <= allowed
        under_way = sum(map(running.replies.count, ("broken", "502", "504")))
        assert under_way <= CLIENTS, "those that were under way"
        assert running.replies.count("500") <= 3 + 2 * CLIENTS, "until the breaker opens, and its probes"


def ups(front: Gateway) -> list[float]:
    """Which endpoints are up, 0 or 1 each."""
    return list(front.counts("endpoint_up").values())


def test_one_killed_one_slow_one_failing() -> None:
    """The slow one is all there is; it answers everyone."""
    with three() as (servers, front), load(front) as running:
        killed, slow, failing = servers
        running.more(60)
        slow.behave("late")
        failing.behave("failing")
        kill(killed)

        def counts() -> tuple[float, float]:
            return slow.count(), failing.count() + attempts(front, killed)

        def only_probed() -> bool:
            """What the others get are probes, one at a time."""
            answered, others = counts()
            running.more(4 * CLIENTS)
            more = counts()
            return more[0] - answered > 2 * (more[1] - others)

        eventually(only_probed)
        assert running.since(0) <= {"whole", "broken", "500", "502"}
        assert running.replies.count("broken") + running.replies.count("502") <= CLIENTS


def test_a_server_that_comes_and_goes() -> None:
    with three() as (servers, front), load(front) as running:
        for behaviour in ("unready", "good") * 5:
            servers[0].behave(behaviour)
            running.more(15)
        assert running.since(0) == {"whole"}


def test_all_bad_then_well_again() -> None:
    """Their own answers are relayed; and the first good reply of each brings its traffic back."""
    with three() as (servers, front):
        for server in servers:
            server.behave("unready")
        eventually(lambda: front.complete().status_code == 503 and not any(ups(front)))
        assert front.complete().json()["error"]["message"] == "loading"
        for server in servers:
            server.behave("good")
        before = [server.count() for server in servers]
        assert front.client.get("/ready").status_code == 200
        with load(front) as running:
            eventually(
                lambda: all(
                    server.count() > count + 10 for server, count in zip(servers, before, strict=True)
                )
            )
            assert "broken" not in running.replies


def test_a_killed_server_is_taken_back_when_it_is_started_again() -> None:
    with three() as (servers, front), load(front) as running:
        kill(servers[0])
        running.more(30)
        with model_server(urlsplit(servers[0].url).port or 0) as again:
            eventually(lambda: again.count() > 10)
