"""What tests of operations on all engines have in common."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil

from tests.integration.server import SYNTHETIC, Server

SERVERS, ENGINES = 2, 2
WAIT_S = 90
PACED = (*SYNTHETIC, "--synthetic-step-ms", "5", "--engine-hang-timeout", "0")
FLEET = (*PACED, "--api-server-count", str(SERVERS), "--data-parallel-size", str(ENGINES))
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
SHORT = BODY | {"max_tokens": 4}
FOREVER = BODY | {"max_tokens": 2000}


def call(client: httpx.Client, path: str, body: Any = None, key: str | None = None) -> dict[str, Any]:
    """The reply, with its status."""
    headers = {} if key is None else {"idempotency-key": key}
    reply = client.post(path, headers=headers, json={} if body is None else body)
    found: dict[str, Any] = reply.json()
    return found | {"status": reply.status_code}


def of_all(body: dict[str, Any], field: str) -> list[Any]:
    assert [receipt["rank"] for receipt in body["engines"]] == list(range(ENGINES))
    return [receipt[field] for receipt in body["engines"]]


def served(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    reply = client.post("/v1/completions", json=SHORT | fields)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def engine_process(fleet: Server, rank: int) -> psutil.Process:
    [process] = [each for each in fleet.children("engine") if f"engine {rank}" in " ".join(each.cmdline())]
    return process


@contextlib.contextmanager
def stopped(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
