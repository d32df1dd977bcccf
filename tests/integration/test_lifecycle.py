"""Servers that are ended, replaced or killed while streams run."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.supervisor.children.lifecycle import SIGNAL_DEBOUNCE_S
from tests.integration.clients import Streams, texts_of
from tests.integration.server import SYNTHETIC, Server, wait_until

PACED = (*SYNTHETIC, "--synthetic-step-ms", "5")
SLOW_STEPS = ("--synthetic-step-ms", "25")
"""For hundreds of streams, of which the first must still run when the last has begun."""
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 500, "ignore_eos": True}


def bodies_of(count: int) -> list[dict[str, Any]]:
    return [BODY | {"seed": seed} for seed in range(count)]


def drained(server: Server, directory: Path, count: int) -> None:
    """SIGTERM under ``count`` streams of two API servers."""
    bodies = [
        body | {"max_tokens": 1200} for body in bodies_of(count)
    ]  # they outlast what is asked meanwhile
    undisturbed = texts_of(server.url, bodies)
    arguments = (*PACED, "--api-server-count", "2", "--drain-timeout", "300")
    with Server(*arguments, directory=directory) as pair, Streams(pair.url, bodies) as streams:
        streams.until_each_has(1)
        pair.process.send_signal(signal.SIGTERM)
        wait_until(lambda: pair.get("/ready").status_code == 503, 90, "refusing work")
        refused = pair.post("/v1/completions", BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.headers["connection"] == "close"
        with httpx.Client(http1=False, http2=True, timeout=60) as client:
            refused = client.post(f"{pair.url}/v1/completions", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        assert pair.process.wait(60) == 0


def test_a_drain_finishes_what_runs_and_refuses_the_rest(server: Server, tmp_path: Path) -> None:
    drained(server, tmp_path, 16)


@pytest.mark.slow
def test_a_drain_of_256_streams(server: Server, tmp_path: Path) -> None:
    drained(server, tmp_path, 256)


def test_a_second_signal_ends_streams_truthfully(server: Server, tmp_path: Path) -> None:
    bodies = [body | {"max_tokens": 1900} for body in bodies_of(4)]
    undisturbed = texts_of(server.url, bodies)
    with Server(*PACED, "--drain-timeout", "300", directory=tmp_path) as alone:
        with Streams(alone.url, bodies) as streams:
            streams.until_each_has(1)
            alone.process.send_signal(signal.SIGTERM)
            wait_until(lambda: "SIGTERM: shutting down" in alone.log, 90, "noticing the signal")
            threading.Event().wait(3 * SIGNAL_DEBOUNCE_S)  # what comes sooner is taken for the same signal
            alone.process.send_signal(signal.SIGTERM)
            streams.until_all_ended()
        assert [code for code, _ in streams.failures] == ["server_stopped"] * 4
        for text, whole in zip(streams.texts, undisturbed, strict=True):
            assert 0 < len(text) < len(whole)
            assert whole.startswith(text)
        assert alone.process.wait(60) == 128 + signal.SIGTERM


class Pool:
    """A client that keeps its connections and asks again and again, until it leaves the context."""

    def __init__(self, url: str) -> None:
        self.replies: list[int] = []
        self._client = httpx.Client(base_url=url, timeout=60)
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Pool:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._leaving.set()
        self._thread.join(60)
        self._client.close()

    def _ask(self) -> None:
        while not self._leaving.wait(0.01):
            try:
                reply = self._client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
                self.replies.append(reply.status_code)
            except httpx.HTTPError:
                self.replies.append(0)


def test_sighup_replaces_api_servers_without_dropping_a_stream(server: Server, tmp_path: Path) -> None:
    bodies = bodies_of(16)
    undisturbed = texts_of(server.url, bodies)
    arguments = (*PACED, "--api-server-count", "2")
    with Server(*arguments, directory=tmp_path) as pair:
        before = {child.pid for child in pair.children("api-server")}
        with Streams(pair.url, bodies) as streams, Pool(pair.url) as pool:
            streams.until_each_has(1)
            pair.process.send_signal(signal.SIGHUP)
            streams.until_all_ended()
            wait_until(lambda: pair.log.count("has served all it had") == 2, 90, "the end of both old ones")
        assert (streams.failures, streams.texts) == ([], undisturbed)
        assert set(pool.replies) == {200}
        wait_until(lambda: not {child.pid for child in pair.children("api-server")} & before, 90, "their end")
        assert len(pair.children("api-server")) == 2
        assert pair.complete(max_tokens=3)["usage"]["completion_tokens"] == 3


def killed_api_server(server: Server, directory: Path, api_servers: int, count: int, *options: str) -> None:
    """One of several API servers dies under ``count`` streams, of which it has its even share."""
    bodies = bodies_of(count)
    undisturbed = texts_of(server.url, bodies)
    arguments = (*PACED, "--api-server-count", str(api_servers), *options)
    with Server(*arguments, directory=directory) as several:
        with Streams(several.url, bodies) as streams:
            streams.until_each_has(1)
            victim = several.children("api-server")[0]
            victim.kill()
            while "is ready again" not in several.log:  # each over a connection of its own
                assert several.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
            streams.until_all_ended()
        assert {code for code, _ in streams.failures} <= {"truncated", "connection"}
        assert abs(streams.broken_connections - streams.connections / api_servers) <= 1
        for text, whole, failure in zip(streams.texts, undisturbed, streams.outcomes, strict=True):
            assert whole.startswith(text) if failure else text == whole
        assert len(several.children("api-server")) == api_servers
        assert not psutil.pid_exists(victim.pid) or victim.status() == psutil.STATUS_ZOMBIE


def test_a_killed_api_server_takes_only_its_connections_along(server: Server, tmp_path: Path) -> None:
    killed_api_server(server, tmp_path, 2, 24)


@pytest.mark.slow
def test_an_api_server_killed_beside_512_streams_of_others(server: Server, tmp_path: Path) -> None:
    killed_api_server(server, tmp_path, 3, 768, *SLOW_STEPS)


def test_drained_engines_finish_what_they_run_and_get_nothing_new(server: Server, tmp_path: Path) -> None:
    bodies = bodies_of(8)
    undisturbed = texts_of(server.url, bodies)
    arguments = (*PACED, "--api-server-count", "2", "--data-parallel-size", "2")
    with Server(*arguments, directory=tmp_path) as pair:
        with Streams(pair.url, bodies) as streams:
            streams.until_each_has(1)
            assert pair.post("/admin/engines/0/drain", {}).json()["draining"] is True
            states = pair.get("/admin/engines").json()["engines"]
            assert [(state["rank"], state["up"]) for state in states] == [(0, True), (1, True)]
            assert pair.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
            pair.post("/admin/engines/1/drain", {}).raise_for_status()
            # The API server that answered knows at once, the other one soon.
            wait_until(
                lambda: all(pair.get("/ready").status_code == 503 for _ in range(20)), 90, "both to know"
            )
            refused = pair.post("/v1/completions", BODY)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert pair.metric("penstock:engine_draining") == 2
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        assert pair.post("/admin/engines/1/resume", {}).json()["draining"] is False
        wait_until(lambda: all(pair.get("/ready").status_code == 200 for _ in range(20)), 90, "both to know")
        assert pair.complete(max_tokens=3)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "path", ["/admin/engines/1/drain", "/admin/engines/0/stop", "/admin/engines/x/drain"]
)
def test_engines_and_orders_that_do_not_exist(server: Server, path: str) -> None:
    assert server.post(path, {}).status_code == 404
