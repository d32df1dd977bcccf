"""A scrape after a reply has it, whichever API server is asked, and waits for no process that hangs."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.integration.server import SYNTHETIC, Server, total, wait_until

REQUESTS = 100
PATIENT = """
from penstock.coordinator import metrics_rounds
from penstock.dispatch.metrics_queries import MetricsQueries
metrics_rounds.ROUND_TIMEOUT_S = 60.0
MetricsQueries.__init__.__defaults__ = (60.0,)
"""
"""For all processes of a server: none is left out of a scrape because the machine is busy."""


class Connection:
    """A connection that stays with one API server."""

    def __init__(self, server: Server) -> None:
        self._http = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=90)
        self._http.connect()
        self._port = self._http.sock.getsockname()[1]

    def process(self, server: Server) -> psutil.Process | None:
        """The API server at the other end."""
        for process in server.children("api-server"):
            if any(each.raddr and each.raddr.port == self._port for each in process.net_connections("tcp")):
                return process
        return None

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        self._http.request(method, path, None if body is None else json.dumps(body))
        reply = self._http.getresponse()
        text = reply.read().decode()
        assert reply.status == 200, text
        return text

    def scrape(self) -> str:
        return self.ask("GET", "/metrics")

    def close(self) -> None:
        self._http.close()


@contextmanager
def serving(directory: Path, environ: Mapping[str, str] | None = None) -> Iterator[Server]:
    options = ("--api-server-count", "2", "--data-parallel-size", "2", "--log-interval", "0")
    with Server(*SYNTHETIC, *options, directory=directory, environ=environ) as running:
        wait_until(lambda: running.metric("penstock:engine_up") == 2, 90, "connecting to both engines")
        yield running


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("fleet")
    (directory / "sitecustomize.py").write_text(PATIENT)
    path = f"{directory}:{os.environ.get('PYTHONPATH', '')}"
    with serving(directory, os.environ | {"PYTHONPATH": path}) as running:
        yield running


@contextmanager
def one_to_each(fleet: Server) -> Iterator[list[Connection]]:
    """Two connections, one to each API server."""
    with ExitStack() as stack:
        found: dict[psutil.Process | None, Connection] = {}

        def one_more() -> bool:
            made = stack.enter_context(closing(Connection(fleet)))
            made.scrape()
            found.setdefault(made.process(fleet), made)
            return len(found) == 2

        wait_until(one_more, 90, "a connection to each API server")
        yield list(found.values())


@pytest.fixture
def connections(fleet: Server) -> Iterator[list[Connection]]:
    with one_to_each(fleet) as made:
        yield made


def test_every_scrape_has_every_reply_before_it(fleet: Server, connections: list[Connection]) -> None:
    drawn = random.Random(1)
    text = json.loads(
        connections[0].ask("POST", "/v1/completions", {"prompt": "a", "seed": 1, "max_tokens": 20})
    )
    kinds: list[tuple[int, dict[str, Any]]] = [
        (1, {"max_tokens": 20}),
        (1, {"max_tokens": 3, "stream": True}),
        (2, {"max_tokens": 5, "n": 2}),
        (1, {"max_tokens": 20, "seed": 1, "stop": [text["choices"][0]["text"][4:8]]}),
    ]
    before, streams, wrong = connections[0].scrape(), 0, []
    for number in range(1, REQUESTS + 1):
        count, body = drawn.choice(kinds)
        streams += count
        drawn.choice(connections).ask("POST", "/v1/completions", {"prompt": "a", **body})
        found = drawn.choice(connections).scrape()
        counted = {
            "vllm:request_success_total": streams,
            "vllm:time_to_first_token_seconds_count": streams,
            "vllm:e2e_request_latency_seconds_count": streams,
            "vllm:request_params_max_tokens_count": streams,
            "vllm:request_params_n_count": number,
            "penstock:requests_total": number,
            "penstock:client_request_latency_seconds_count": number,
        }
        wrong += [
            (number, body, name)
            for name, value in counted.items()
            if total(found, name) - total(before, name) != value
        ]
        if total(found, "vllm:generation_tokens_total") < total(found, "penstock:tokens_delivered_total"):
            wrong.append((number, body, "tokens"))
    assert not wrong, f"{len({each[0] for each in wrong})} of {REQUESTS} scrapes: {wrong[:5]}"
    assert total(found, "vllm:request_success_total", finished_reason="stop") > 0
    assert total(found, "vllm:iteration_tokens_total_sum") == total(
        found, "vllm:prompt_tokens_total"
    ) + total(found, "vllm:generation_tokens_total")


def test_a_step_is_counted_when_it_is_made(connections: list[Connection]) -> None:
    """However many tokens the engine puts into one row: a reply that is not streamed has few rows."""
    before = connections[0].scrape()
    connections[0].ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 100, "ignore_eos": True})
    after = connections[0].scrape()

    def more(name: str) -> float:
        return total(after, name) - total(before, name)

    assert more("vllm:iteration_tokens_total_count") == 100
    assert more("vllm:generation_tokens_total") == 100


@pytest.mark.parametrize("role", ["api-server", "engine"])
def test_a_stopped_process_keeps_no_scrape_from_its_end(role: str, tmp_path: Path) -> None:
    """It is left out, and counted again when it goes on."""
    with serving(tmp_path) as fleet, one_to_each(fleet) as (asked, other):
        stopped = other.process(fleet) if role == "api-server" else fleet.children("engine")[0]
        assert stopped is not None
        stopped.send_signal(signal.SIGSTOP)
        try:
            for _ in range(4):
                assert total(asked.scrape(), "penstock:engine_up") >= 1
        finally:
            stopped.send_signal(signal.SIGCONT)
        requests = total(asked.scrape(), "penstock:requests_total")
        for number in (1, 2):
            other.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2})
            wait_until(
                lambda number=number: (  # type: ignore[misc]
                    total(asked.scrape(), "penstock:requests_total") == requests + number
                ),
                90,
                "being asked again",
            )
