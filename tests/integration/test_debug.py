"""What operators look at when something is wrong."""

from pathlib import Path

import httpx

from .server import SYNTHETIC, Server, wait_until


def test_every_process_reports_its_garbage(tmp_path: Path) -> None:
    options = ("--data-parallel-size", "2", "--gc-pause-budget-ms", "2")
    with Server(*SYNTHETIC, *options, directory=tmp_path) as server:
        wait_until(lambda: not report(server)["failed"], 30, "connecting to both engines")
        server.complete(max_tokens=5)
        found = report(server)
        assert found["failed"] == {}
        assert set(found["processes"]) == {"api-server 0", "engine 0", "engine 1"}
        for process in found["processes"].values():
            assert process["policy"] == "idle"
            assert not process["enabled"]
            assert process["frozen"] > 1000
            assert process["types"][0]["objects"] > 0


def report(server: Server) -> dict[str, dict[str, dict[str, list[dict[str, int]]]]]:
    body: dict[str, dict[str, dict[str, list[dict[str, int]]]]] = (
        httpx.get(f"{server.url}/debug/gc", timeout=30).raise_for_status().json()
    )
    return body
