"""Keys that are revoked, expire and are replaced while a gateway with several workers serves."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

from tests.gateway.behaviours import good
from tests.gateway.processes import Gateway, Upstream, eventually, gateway
from tests.gateway.test_flow_control import logged

BODY = {"model": "m", "prompt": "p", "stream": True}


def replace(path: Path, text: str) -> None:
    """Write the file as ``penstock keys`` does."""
    beside = path.with_suffix(".tmp")
    beside.write_text(text)
    beside.chmod(0o600)
    os.replace(beside, path)


def answers(front: Gateway, key: str) -> set[tuple[int, str]]:
    """Status and code on four new connections, which several workers get."""
    found = set()
    for _ in range(4):
        headers = {"authorization": f"Bearer {key}", "connection": "close"}
        reply = front.client.post("/v1/completions", json=BODY, headers=headers)
        code = "" if reply.status_code == 200 else reply.json()["error"]["code"]
        found.add((reply.status_code, code))
    return found


def test_every_worker_refuses_a_key_that_is_revoked_removed_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    replace(path, "keys:\n- {name: one, key: sk-one, team: a}\n- {name: two, key: sk-two}\n")
    options = ("--client-keys-file", str(path), "--workers", "2")
    with Upstream(good) as server, gateway(server, options=options) as front:
        assert answers(front, "sk-one") == answers(front, "sk-two") == {(200, "")}
        old = sha256(b"sk-two").hexdigest()
        replace(
            path,
            "keys:\n- {name: one, key: sk-one, team: a, revoked: true}\n"
            f"- {{name: two, key: sk-new, previous: [{{sha256: {old}, expires: 2020-01-01T00:00:00Z}}]}}\n",
        )
        eventually(lambda: answers(front, "sk-one") == {(401, "key_revoked")})
        eventually(lambda: answers(front, "sk-two") == {(401, "key_expired")})
        assert answers(front, "sk-new") == {(200, "")}
        replace(path, "keys:\n- {name: two, key: sk-new}\n")
        eventually(lambda: answers(front, "sk-one") == {(401, "invalid_api_key")})
        headers = {"x-api-key": "sk-old", "anthropic-version": "2023-06-01"}
        reply = front.client.post("/v1/messages", json=BODY, headers=headers)
        assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
        metrics = front.client.get("/metrics", headers={"authorization": "Bearer sk-new"}).text
        assert 'penstock_gateway_rejection_total{reason="key_revoked"}' in metrics
        entry = logged(front, 1)[0]
        assert (entry["key"], entry["team"]) == ("one", "a")
        assert "sk-" not in "".join(front.lines)
