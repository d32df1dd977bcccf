"""Budgets in money at a real gateway: over its workers, their deaths, and its restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gateway.behaviours import good
from tests.gateway.processes import Gateway, Upstream, eventually, gateway
from tests.gateway.redis_server import redis_server

KEYS = """
keys:
  - {name: a, key: sk-a-0123456789abcdef, team: t}
  - {name: b, key: sk-b-0123456789abcdef, team: t}
teams:
  - {name: t, budgets: {cost-per-month: 0.0000034}}
"""


def ask(front: Gateway, key: str) -> tuple[int, str]:
    """Status, and what is left in the team's budget, or why not."""
    headers = {"authorization": f"Bearer sk-{key}-0123456789abcdef"}
    body = {"model": "m", "prompt": "p", "max_tokens": 1}
    reply = front.client.post("/v1/completions", json=body, headers=headers)
    if reply.status_code == 429:
        return 429, reply.json()["error"]["message"].split(". Try")[0]
    return reply.status_code, reply.headers["x-ratelimit-limit-cost"]


@pytest.mark.parametrize("store", ["memory", "redis"])
def test_a_team_s_month(store: str, tmp_path: Path) -> None:
    """Each request costs 3 x 0.1 + 2 x 0.25 millionths, 0.8, so four leave too little for a fifth."""
    if store == "redis":
        with redis_server(tmp_path) as url:
            _month_of_a_team(tmp_path, ("--budget-store", url, "--budget-store-timeout", "60"))
    else:
        _month_of_a_team(tmp_path, ("--budget-state-file", str(tmp_path / "budgets.json")))


def _month_of_a_team(tmp_path: Path, options: tuple[str, ...]) -> None:
    keys, endpoints = tmp_path / "keys.yaml", tmp_path / "endpoints.yaml"
    keys.write_text(KEYS)
    refused = (429, "Rate limit reached for the team 't': 0.0000034 cost-per-month")
    with Upstream(good) as server:
        prices = {"m": {"prices": {"input": 0.1, "output": 0.25}}}
        endpoints.write_text(json.dumps({"endpoints": [server.url], "currency": "USD", "models": prices}))
        options = (*options, "--endpoints-file", str(endpoints), "--client-keys-file", str(keys))
        with gateway(options=(*options, "--workers", "2")) as front:
            for key in "abab":
                assert ask(front, key) == (200, "0.0000034")
            eventually(lambda: ask(front, "a") == refused)
            assert ask(front, "b") == refused
            for worker in front.workers:
                worker.kill()
            eventually(lambda: _answers(front))
            assert ask(front, "b") == refused
        with gateway(options=options) as front:
            assert ask(front, "a") == refused
    assert len([call for call in server.calls if call.path == "/v1/completions"]) == 4


def _answers(front: Gateway) -> bool:
    try:
        return front.client.get("/health").status_code == 200 and len(front.workers) == 2
    except Exception:  # noqa: BLE001 - whatever a client sees while no worker is there
        return False
