"""What operators look at when something is wrong."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server import SYNTHETIC, Server, wait_until


def test_every_process_reports_its_garbage(tmp_path: Path) -> None:
    options = ("--data-parallel-size", "2")
    with Server(*SYNTHETIC, *options, directory=tmp_path) as server:
        wait_until(lambda: not report(server)["failed"], 90, "connecting to both engines")
        server.complete(max_tokens=5)
        found = report(server)
        assert found["failed"] == {}
        assert set(found["processes"]) == {"api-server 0", "engine 0", "engine 1"}
        for process in found["processes"].values():
            assert process["policy"] == "idle"
            assert not process["enabled"]
            assert process["frozen"] > 1000
            assert process["types"][0]["objects"] > 0


def report(server: Server) -> dict[str, Any]:
    body: dict[str, Any] = httpx.get(f"{server.url}/debug/gc", timeout=30).raise_for_status().json()
    return body


@pytest.mark.parametrize("streamed", [False, True])
def test_clients_that_leave_leave_no_garbage(tmp_path: Path, streamed: bool) -> None:
    """Nothing is collected, so what a reference cycle holds stays."""
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": streamed}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    count = 5
    with Server(*SYNTHETIC, "--synthetic-step-ms", "50", "--gc-policy", "off", directory=tmp_path) as server:
        report(server)
        for _ in range(count):
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
                client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
                wait_until(lambda: server.metric("penstock:streams") == 1, 90, "starting the stream")
            wait_until(lambda: server.metric("penstock:streams") == 0, 90, "freeing the stream")
        grown = {
            each["type"]: each["growth"] for each in report(server)["processes"]["api-server 0"]["types"]
        }
        assert all(growth < count for name, growth in grown.items() if ".api." in name), grown
