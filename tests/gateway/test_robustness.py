"""Three model servers under load, one of which dies, one stalls and one fails at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.gateway.processes import WAIT_S, Call, Gateway, Upstream, gateway
from tests.gateway.test_gateway import eventually, good, stalled

CLIENTS = 8
BODY = {"model": "m", "prompt": "p", "stream": True}


def killed(call: Call) -> None:
    """As a process that ends while it has requests."""
    call.reset()


def fails(call: Call) -> None:
    call.reply(500, b'{"error":{"message":"out of memory"}}')


def load(front: Gateway, each: int) -> list[int]:
    """Statuses of ``each`` requests of each of several clients at once; -1: the stream was not whole."""

    def client(number: int) -> list[int]:
        with httpx.Client(base_url=front.url, timeout=WAIT_S) as http:
            replies = [http.post("/v1/completions", json=BODY) for _ in range(each)]
        return [reply.status_code if "[DONE]" in reply.text else -reply.status_code for reply in replies]

    with ThreadPoolExecutor(CLIENTS) as threads:
        return [status for statuses in threads.map(client, range(CLIENTS)) for status in statuses]


def test_bad_servers_among_good_ones() -> None:
    """Requests that are under way when a server goes bad may meet it; after that it gets probes alone. What
    a retry cannot hide is the 500, which is the server's answer."""
    options = ("--first-token-timeout", "1", "--scorers", "running=1", "--scrape-interval", "0")
    with (
        Upstream(good) as dying,
        Upstream(good) as slow,
        Upstream(good) as failing,
        Upstream(good) as well,
        gateway(dying, slow, failing, well, options=options) as front,
    ):
        bad = (dying, slow, failing)
        assert set(load(front, 5)) == {200}
        dying.behaviour, slow.behaviour, failing.behaviour = killed, stalled, fails
        statuses = load(front, 20)
        assert set(statuses) <= {200, -500}
        assert statuses.count(-500) <= 3 + 2 * CLIENTS
        # From here on the breakers are open.
        before = [len(server.calls) for server in (*bad, well)]
        statuses = load(front, 40)
        after = [len(server.calls) for server in (*bad, well)]
        probes = [late - early for early, late in zip(before, after, strict=True)]
        assert set(statuses) <= {200, -500}
        assert max(probes[:3]) < CLIENTS * 40 / 10, "an even share would be a quarter"
        assert probes[3] >= CLIENTS * 40 * 0.9
        eventually(lambda: in_flight(front) == 0)


def in_flight(front: Gateway) -> float:
    """Everything that counts requests under way."""
    return sum(front.counts("requests_in_flight").values()) + sum(front.counts("endpoint_in_flight").values())


def resident(front: Gateway) -> int:
    """Bytes of memory of the gateway."""
    return int(psutil.Process(front.process.pid).memory_info().rss)


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_memory_stays_flat(count: int) -> None:
    """Clients make up a thousand model names. What remembers by request, the prefix index and sessions, is
    bounded by number, and knows these after the first half."""
    with Upstream(lambda call: call.reply(404, b"{}")) as server, gateway(server) as front:
        numbers = iter(range(2 * count))
        lock = threading.Lock()

        def ask(times: int) -> None:
            with httpx.Client(base_url=front.url, timeout=WAIT_S) as http:
                for _ in range(times):
                    with lock:
                        name = f"model-{next(numbers) % 1000}"
                    http.post("/v1/completions", json={"model": name, "prompt": "p" * 300})

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(ask, [count // 8] * 4))
            server.calls.clear()
            warm = resident(front)
            list(threads.map(ask, [count // 8] * 4))
            server.calls.clear()
        assert resident(front) - warm < 8 << 20
        assert in_flight(front) == 0
        assert len(front.client.get("/metrics").text) < 64 << 10, "made-up models have no series"
