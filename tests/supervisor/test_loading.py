"""`penstock serve` while its processes start: probes get replies, other requests are refused."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.exit_codes import EXIT_FAILED, EXIT_OK
from tests.supervisor.harness import PATIENCE_S, Serve

KEY = {"authorization": "Bearer k"}


@contextmanager
def client_of(path: Path) -> Iterator[httpx.Client]:
    """A client of the socket, as soon as it listens."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                break
        assert time.monotonic() < deadline
        time.sleep(0.005)
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://x", timeout=PATIENCE_S) as client:
        yield client


def readiness_until(client: httpx.Client, phase: str) -> dict[str, Any]:
    """Asks /ready until it is in a phase."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        reply = client.get("/ready")
        assert reply.status_code == 503
        body: dict[str, Any] = reply.json()
        if body["phase"] == phase:
            return body
    raise AssertionError(f"never in the phase {phase}: {body}")


@pytest.mark.parametrize("api_servers", [1, 2])
def test_probes_are_answered_while_the_model_loads(serve: Serve, short_dir: Path, api_servers: int) -> None:
    path = short_dir / "http"
    running = serve(
        {"engine": ["hang"]},
        uds=str(path),
        api_key=["k"],
        api_server_count=api_servers,
        root_path="/llm",
        data_parallel_size=2,
    )
    with client_of(path) as client:
        for probe in ("/health", "/llm/health"):
            assert client.get(probe).status_code == 200
            assert client.head(probe).status_code == 200
        assert client.post("/ping").status_code == client.get("/ping").status_code == 503
        assert client.delete("/health").status_code == 405
        page = client.get("/llm/", headers={"Accept": "text/html"})  # it shows what /ready says
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert client.get("/page/fleet.js").status_code == 200
        body = readiness_until(client, "loading weights")
        assert body["ready"] is False
        assert body["progress"] == 0.5
        assert (body["engines_ready"], body["engines"]) == (0, 2)
        assert 0 < body["elapsed_s"] < PATIENCE_S
        assert body["error"]["code"] == "loading"
        head = client.head("/ready")
        assert (head.status_code, head.content) == (503, b"")
        http2 = httpx.HTTPTransport(uds=str(path), http1=False, http2=True)
        with httpx.Client(transport=http2, base_url="http://x", timeout=PATIENCE_S) as other:
            assert other.get("/health").status_code == 200
            assert other.post("/v1/chat/completions", json={}, headers=KEY).status_code == 503
        assert client.post("/v1/chat/completions", json={}).status_code == 401
        refusal = client.post("/v1/chat/completions", json={}, headers=KEY)
        assert refusal.status_code == 503
        assert int(refusal.headers["retry-after"]) >= 1
        assert refusal.json()["error"]["code"] == "loading"
        assert "loading weights" in refusal.json()["error"]["message"]
        other_shape = client.post("/llm/v1/messages", json={}, headers=KEY)
        assert other_shape.json()["error"]["type"] == "overloaded_error"
        assert other_shape.json()["request_id"] == other_shape.headers["request-id"]
        ollama = client.post("/llm/api/chat", json={}, headers=KEY).json()
        assert "loading weights" in ollama["error"]
        gemini = client.post("/v1beta/models/m:generateContent", json={}, headers=KEY).json()
        assert (gemini["error"]["code"], gemini["error"]["status"]) == (503, "UNAVAILABLE")
        unauthorized = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert unauthorized.json()["error"]["type"] == "authentication_error"
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == EXIT_OK
    assert "killing" not in running.text


def test_api_servers_get_connections_once_all_have_started(serve: Serve, short_dir: Path) -> None:
    """The engine is late: it loads until the test has seen that nobody is told that the server is ready."""
    path = short_dir / "http"
    running = serve({"engine": ["until told"]}, uds=str(path))
    with client_of(path) as client, socket.socket(socket.AF_UNIX) as early:
        early.settimeout(PATIENCE_S)
        early.connect(str(path))  # accepted before the next request is answered
        readiness_until(client, "loading weights")
        running.until("runs as process")
        (running.run_dir() / "go").touch()
        running.until_ready()
        early.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        refusal = b"".join(iter(lambda: early.recv(4096), b""))
        assert refusal.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in refusal
        assert b"The server is ready, on new connections" in refusal
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            assert connection.recv(64).startswith(b"api-server 0 0 ")
        running.process.send_signal(signal.SIGTERM)
        assert running.exit_code() == EXIT_OK


def test_a_failed_load_ends_the_server(serve: Serve, short_dir: Path) -> None:
    running = serve({"engine": ["fatal"]}, uds=str(short_dir / "http"))
    assert running.exit_code() == EXIT_FAILED
    assert not (short_dir / "http").exists()
