"""What the gateway holds after many requests."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.gateway.processes import WAIT_S, Gateway, Upstream, gateway


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
