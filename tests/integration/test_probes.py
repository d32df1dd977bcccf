"""Probes of a real server over its life: while it starts, without engines, and after SIGTERM."""

from __future__ import annotations

import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx

from penstock.supervisor.children.lifecycle import SIGNAL_DEBOUNCE_S
from tests.integration.server import Server, wait_until

ARGUMENTS = ("--engine", "synthetic", "--served-model-name", "m")
BODY: dict[str, Any] = {"model": "m", "prompt": "x", "max_tokens": 2}


def start_is_seen(path: str, found: list[tuple[str, int, dict[str, Any]]]) -> None:
    """Asks in turn whether the server lives and is ready, until it is, and sends a request at once."""
    transport = httpx.HTTPTransport(uds=path)
    with httpx.Client(transport=transport, base_url="http://x", timeout=30) as client:
        wait_until(lambda: Path(path).exists(), 60, "listening")
        while True:
            try:
                for probe in ("/health", "/ready"):
                    reply = client.get(probe)
                    found.append((probe, reply.status_code, reply.json()))
            except httpx.ConnectError:
                continue  # the path is bound before it listens
            if reply.status_code == 200:
                break
        for probe in ("/v1/completions", "/ready") * 5:
            reply = client.request("GET" if probe == "/ready" else "POST", probe, json=BODY)
            found.append((probe, reply.status_code, reply.json()))


def answers_to_probes(directory: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """What a server that starts says, until it serves."""
    found: list[tuple[str, int, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory(prefix="run-", dir="/tmp") as short:
        path = f"{short}/http"
        asker = threading.Thread(target=start_is_seen, args=(path, found))
        asker.start()
        options = ("--uds", path, "--api-server-count", "2", "--data-parallel-size", "2")
        with Server(*ARGUMENTS, *options, directory=directory):
            asker.join(60)
    return found


def test_no_probe_waits_for_the_start_and_ready_means_ready(tmp_path: Path) -> None:
    for _ in range(10):  # on a busy machine the first question may come after the start
        found = answers_to_probes(tmp_path)
        if found[1][1] != 200:
            break
    assert {status for probe, status, _ in found if probe == "/health"} == {200}
    states = [(status, body) for probe, status, body in found if probe == "/ready"]
    first = states[0][1]
    assert states[0][0] == 503
    assert first["ready"] is False
    assert first["engines"] == 2
    assert 0 <= first["engines_ready"] <= 2
    statuses = [status for status, _ in states]
    assert statuses == sorted(statuses, reverse=True), "it never goes back"
    last = states[-1][1]
    assert last == {"ready": True, "phase": "serving", "engines_ready": 2, "engines": 2}
    assert [status for probe, status, _ in found if probe == "/v1/completions"] == [200] * 5


def test_a_server_without_engines_lives_and_one_that_leaves_serves(tmp_path: Path) -> None:
    with Server(*ARGUMENTS, "--drain-grace", "300", directory=tmp_path) as server:
        server.post("/admin/engines/0/drain", {}).raise_for_status()
        assert server.get("/health").status_code == 200
        reply = server.get("/ready")
        assert reply.status_code == 503
        assert reply.json()["phase"] == "waiting for an engine"
        server.post("/admin/engines/0/resume", {}).raise_for_status()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready").status_code == 503, 90, "leaving")
        reply = server.get("/ready")
        assert (reply.json()["phase"], reply.json()["error"]["code"]) == ("draining", "draining")
        assert "connection" not in reply.headers
        assert server.get("/health").status_code == 200
        assert server.post("/v1/completions", BODY).status_code == 200
        assert "penstock:requests_refused_total" in server.metrics()
        assert server.metric("penstock:requests_refused_total") == 0, "probes are no requests"
        threading.Event().wait(2 * SIGNAL_DEBOUNCE_S)  # what comes sooner is taken for the same signal
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
