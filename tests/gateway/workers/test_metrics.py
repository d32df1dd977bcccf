"""/metrics is that of all workers, the dead included, whichever answers."""

from __future__ import annotations

import signal

import httpx
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.gateway.behaviours import good
from tests.gateway.processes import WAIT_S, Gateway, Upstream, eventually, gateway


def request(front: Gateway) -> None:
    """On a connection of its own, so that all workers get some."""
    body = {"model": "m", "prompt": "p", "stream": True}
    assert httpx.post(front.url + "/v1/completions", json=body, timeout=WAIT_S).status_code == 200


def values(front: Gateway) -> dict[str, float]:
    """Sums of a counter, a histogram's observations and its sum of bytes, and a gauge of the host."""
    text = httpx.get(front.url + "/metrics", timeout=WAIT_S).text
    found: dict[str, float] = {}
    for family in parse(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    names = ("request_total", "request_size_bytes_count", "request_size_bytes_sum", "ready_endpoints")
    return {name: found.get(f"penstock_gateway_{name}", 0.0) for name in names}


def test_metrics_are_those_of_all_workers() -> None:
    with Upstream(good) as server, gateway(server, options=("--workers", "2")) as front:
        for _ in range(6):
            request(front)
        size = values(front)["request_size_bytes_sum"] / 6
        expected = {
            "request_total": 6,
            "request_size_bytes_count": 6,
            "request_size_bytes_sum": 6 * size,
            "ready_endpoints": 1,
        }
        assert [values(front) for _ in range(4)] == [expected] * 4
        front.workers[0].kill()
        eventually(lambda: any("gateway 0 is ready again" in line for line in front.lines))
        assert [values(front) for _ in range(4)] == [expected] * 4
        front.process.send_signal(signal.SIGHUP)
        for _ in range(6):
            request(front)
        eventually(lambda: sum("has served all it had" in line for line in front.lines) == 2)
        expected |= {
            "request_total": 12,
            "request_size_bytes_count": 12,
            "request_size_bytes_sum": 12 * size,
        }
        assert [values(front) for _ in range(4)] == [expected] * 4


def test_a_worker_that_hangs_delays_no_scrape_for_long() -> None:
    with (
        Upstream(good) as server,
        gateway(server, options=("--workers", "2")) as front,
        httpx.Client(base_url=front.url, timeout=WAIT_S) as one,
        httpx.Client(base_url=front.url, timeout=WAIT_S) as other,
    ):
        port_of = {
            client: client.get("/version").extensions["network_stream"].get_extra_info("client_addr")[1]
            for client in (one, other)
        }
        hung = front.workers[0]
        its_ports = {each.raddr.port for each in hung.net_connections("tcp") if each.raddr}
        [client] = [client for client, port in port_of.items() if port not in its_ports]
        hung.suspend()
        try:
            assert client.get("/metrics", timeout=WAIT_S / 3).status_code == 200
        finally:
            hung.resume()
