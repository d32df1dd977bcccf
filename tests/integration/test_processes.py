"""Parts that end, by order or by force."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.server import SYNTHETIC, Server, data_of
from tests.integration.test_connections import connect, read_until, request

LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 150, "ignore_eos": True, "seed": 1}
PACED = (*SYNTHETIC, "--synthetic-step-ms", "5")


def tokens_of(events: list[str]) -> list[int]:
    """Token ids of a one-choice stream's events."""
    decoded = [json.loads(event) for event in events if event != "[DONE]"]
    return [token for event in decoded for token in event.get("choices", [{}])[0].get("token_ids") or []]


@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGINT])
def test_an_ordered_end_lets_running_streams_finish(tmp_path: Path, order: signal.Signals) -> None:
    arguments = (*PACED, "--drain-timeout", "60")
    with Server(*arguments, directory=tmp_path) as server, connect(server) as connection:
        connection.sendall(request(LONG | {"stream": True, "return_token_ids": True}))
        data = read_until(connection, b"data: {", 1)
        server.process.send_signal(order)
        data += read_until(connection, b"0\r\n\r\n", 1)
        events = re.findall(r"^data: (.*)$", data.decode(), re.MULTILINE)
        assert len(tokens_of(events)) == LONG["max_tokens"]
        assert events[-1] == "[DONE]"
        assert server.process.wait(60) == 0


def test_streams_that_take_too_long_end_with_an_error(tmp_path: Path) -> None:
    arguments = (*PACED, "--drain-timeout", "0.3")
    with Server(*arguments, directory=tmp_path) as server, connect(server) as connection:
        connection.sendall(request(LONG | {"stream": True, "max_tokens": 1900}))
        data = read_until(connection, b"data: {", 1)
        server.process.send_signal(signal.SIGTERM)
        while more := connection.recv(65536):
            data += more
        assert b'data: {"error"' in data
        assert b"[DONE]" not in data
        assert server.process.wait(60) == 0


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with Server(*PACED, directory=tmp_path) as server:
        children = [*server.children("api-server"), *server.children("engine")]
        assert len(children) == 2
        server.process.kill()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive


def test_titles_name_the_processes(tmp_path: Path) -> None:
    arguments = ("--api-server-count", "2", "--data-parallel-size", "2")
    with Server(*SYNTHETIC, *arguments, directory=tmp_path) as server:
        titles = {
            " ".join(child.cmdline()).strip()
            for child in [*server.children("api-server"), *server.children("engine")]
        }
        assert titles == {
            f"penstock: {role} {index}" for role in ("api-server", "engine") for index in (0, 1)
        }
        assert psutil.Process(server.process.pid).cmdline()[0].startswith("penstock: supervisor")
        with ThreadPoolExecutor(16) as pool:
            replies = list(pool.map(lambda seed: server.complete(max_tokens=30, seed=seed), range(64)))
        assert all(reply["usage"]["completion_tokens"] == 30 for reply in replies)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(*PACED, directory=tmp_path_factory.mktemp("killed")) as server:
        yield server


def test_a_killed_api_server_comes_back_on_the_same_port(killed: Server) -> None:
    (api,) = killed.children("api-server")
    api.kill()
    psutil.wait_procs([api], timeout=30)
    assert (
        killed.complete(max_tokens=2)["usage"]["completion_tokens"] == 2
    )  # it waits in the socket's backlog
    assert [child.pid for child in killed.children("api-server")] != [api.pid]


@pytest.mark.parametrize(
    ("fault", "interval"),
    [("error@7", 1), ("error@7", 4), ("stream-error@7", 1), ("stream-error@7", 10)],
)
def test_every_token_before_a_fault_is_delivered(tmp_path: Path, fault: str, interval: int) -> None:
    arguments = [*SYNTHETIC, "--synthetic-fault", fault, "--resume-timeout", "0"]
    with Server(*arguments, directory=tmp_path) as server:
        body = LONG | {"stream": True, "return_token_ids": True, "stream_interval": interval}
        reply = server.post("/v1/completions", body)
        assert reply.status_code == 200
        events = data_of(reply.text)
        error = json.loads(events[-1])["error"]
        expected = "ended: it failed" if fault.startswith("error") else "injected"
        assert expected in error["message"]
        assert "InjectedFault" not in reply.text, "the class of an error is for the operator"
        assert len(tokens_of(events[:-1])) == (7 if fault.startswith("error") else 8)
        assert "[DONE]" not in events


def test_a_port_in_use_names_its_holder(server: Server) -> None:
    port = str(httpx.URL(server.url).port)
    command = [sys.executable, "-m", "penstock.cli.main", "serve", *SYNTHETIC, "--port", port]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 1
    assert f"process {server.process.pid}" in ended.stderr
    assert "--port" in ended.stderr


def test_the_terminal_clients(server: Server) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "penstock.cli.main", *arguments, "--url", server.url]
        return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)

    completed = run("complete", "hello", "--max-tokens", "5", "--seed", "1", "--stats")
    assert server.complete("hello", max_tokens=5, seed=1)["choices"][0]["text"] in completed.stdout
    assert "tokens/s" in completed.stderr
    assert run("chat", "-q", "hello", "--max-tokens", "5").stdout.strip()
