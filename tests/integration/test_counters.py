"""No counter that a scraper has seen falls, whichever API server answers, and whatever is killed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.server import SYNTHETIC, Server, wait_until

Counts = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def counts_of(text: str) -> Counts:
    """Every sample of a counter or histogram, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


def fallen(before: Counts, after: Counts) -> list[str]:
    return [
        f"{name}{dict(labels)}: {value} to {after.get((name, labels))}"
        for (name, labels), value in before.items()
        if after.get((name, labels), 0.0) < value
    ]


def scrape(client: httpx.Client) -> Counts:
    return counts_of(client.get("/metrics").raise_for_status().text)


def test_scrapes_of_alternating_api_servers(tmp_path: Path) -> None:
    fleet = ("--api-server-count", "2", "--data-parallel-size", "2", "--synthetic-step-ms", "5")
    with Server(*SYNTHETIC, *fleet, directory=tmp_path) as server, ExitStack() as stack:
        wait_until(lambda: server.metric("penstock:engine_up") == 2, 60, "connecting to both engines")
        clients = [stack.enter_context(httpx.Client(base_url=server.url, timeout=30)) for _ in range(2)]
        for client in clients:  # each connects to another API server
            scrape(client)
        pool = stack.enter_context(ThreadPoolExecutor(4))
        running = [pool.submit(server.complete, max_tokens=500, ignore_eos=True, n=2) for _ in range(4)]
        seen: Counts = {}
        while not all(each.done() for each in running):
            for client in clients:
                found = scrape(client)
                assert fallen(seen, found) == []
                seen = found
        assert any(name == "penstock:tokens_delivered_total" for name, _ in seen)


def restart(server: Server, processes: list[psutil.Process]) -> None:
    again = server.log.count("is ready again") + len(processes)
    for process in processes:
        process.kill()
    wait_until(lambda: server.log.count("is ready again") == again, 60, "a restart")


@pytest.mark.parametrize("number", [1, 2])
def test_all_that_keep_metrics_are_killed_together(number: int, tmp_path: Path) -> None:
    """Sums over earlier starts of engines and API servers, too."""
    fleet = ("--api-server-count", str(number), "--data-parallel-size", str(number))
    with Server(*SYNTHETIC, *fleet, directory=tmp_path) as server:

        def until_complete() -> None:
            wait_until(lambda: server.metric("penstock:engine_up") == number, 60, "connecting to all engines")

        for _ in range(2):
            until_complete()
            server.complete(max_tokens=50, ignore_eos=True, n=4)
            wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 60, "the streams' end")
            restart(server, server.children("engine")[:1])
        until_complete()
        server.complete(max_tokens=50, ignore_eos=True)
        with httpx.Client(base_url=server.url, timeout=30) as client:
            before = scrape(client)
        restart(server, server.children("coordinator") + server.children("api-server"))
        with httpx.Client(base_url=server.url, timeout=30) as client:
            assert fallen(before, scrape(client)) == []
