"""A kept connection that breaks: the request is sent again only if it was closed while idle."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.processes import Call, Upstream, eventually, gateway

SLOW_S = 0.4
"""Clearly more than a closed connection takes to answer with a reset."""
PATIENT = """
from penstock.gateway.upstream import http1_connection
http1_connection.IDLE_CLOSE_S = 60.0
"""
"""For the gateway, which otherwise takes a reset that a busy machine delays for a later one."""


def closes_at_once(call: Call) -> None:
    """As a server that closed the idle connection: the request is answered by a reset."""
    call.reset()


def dies_later(call: Call) -> None:
    time.sleep(SLOW_S)
    call.reset()


def fields_of(lines: list[str], request_id: str) -> dict[str, Any]:
    """The request's entry of the access log."""
    found: list[dict[str, Any]] = []

    def logged() -> bool:
        found.extend(json.loads(line[line.index("{") :]) for line in lines if f'"{request_id}"' in line)
        return bool(found)

    eventually(logged)
    return found[0]


@pytest.mark.parametrize(
    ("method", "breaks", "status", "sent", "attempts"),
    [
        ("GET", closes_at_once, 200, 2, 2),
        ("GET", dies_later, 502, 1, 1),
        ("POST", closes_at_once, 502, 1, 1),
        ("DELETE", closes_at_once, 502, 1, 1),
    ],
)
def test_a_request_on_a_kept_connection_that_breaks(
    method: str,
    breaks: Callable[[Call], None],
    status: int,
    sent: int,
    attempts: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server has read it, and may have run it."""
    if breaks is closes_at_once:
        (tmp_path / "sitecustomize.py").write_text(PATIENT)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    def behaviour(call: Call) -> None:
        if len(server.calls) == 2:
            breaks(call)
        else:
            call.reply(200, b'{"choices":[{"text":"x"}]}')

    with Upstream(behaviour) as server, gateway(server, options=("--max-attempts", "1")) as front:
        assert front.complete(stream=False).status_code == 200
        path = "/v1/completions" if method == "POST" else "/v1/files/f"
        body = b'{"model":"m","prompt":"p"}' if method == "POST" else None
        reply = front.client.request(method, path, content=body, headers={"x-request-id": "second"})
        assert reply.status_code == status
        assert len(server.calls) - 1 == sent
        logged = fields_of(front.lines, "second")
        assert logged["attempts"] == attempts
        assert len(logged.get("failures", ())) == attempts - 1
        assert front.counts("retry_total") == {"": attempts - 1}
