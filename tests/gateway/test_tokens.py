"""Tokens of an issuer as keys, through a gateway with several workers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx

from tests.gateway.behaviours import good
from tests.gateway.processes import Call, Gateway, Upstream, eventually, gateway
from tests.gateway.test_flow_control import logged
from tests.gateway.token_issuer import EC, OTHER_RSA, RSA, issuer, public_jwk, signed

BODY = {"model": "m", "prompt": "p", "stream": True}


def ask(front: Gateway, token: str, path: str = "/v1/completions", **body: Any) -> list[httpx.Response]:
    """On four new connections, which several workers get."""
    headers = {"authorization": f"Bearer {token}", "connection": "close"}
    return [front.client.post(path, json=BODY | body, headers=headers) for _ in range(4)]


def codes(front: Gateway, token: str, path: str = "/v1/completions", **body: Any) -> set[tuple[int, str]]:
    return {
        (reply.status_code, "" if reply.status_code == 200 else reply.json()["error"]["code"])
        for reply in ask(front, token, path, **body)
    }


def test_tokens_and_keys_side_by_side(tmp_path: Path) -> None:
    seen = []

    def server_behaviour(call: Call) -> None:
        seen.append(call.headers["authorization"])
        good(call)

    path, local_keys = tmp_path / "keys.yaml", tmp_path / "local.json"
    local_keys.write_text(json.dumps({"keys": [public_jwk(EC, kid="one")]}))
    with issuer(tmp_path) as (served, authority), Upstream(server_behaviour) as server:
        path.write_text(f"""
keys:
  - {{name: search, key: sk-search}}
issuers:
  - issuer: {served.url}
    audience: penstock
    ca-file: {authority}
    prefix: "sso:"
    claims: {{team: team, models: models, budgets: budgets}}
  - {{issuer: local, audience: penstock, jwks: {local_keys}, prefix: "local:"}}
""")
        path.chmod(0o600)
        options = ("--client-keys-file", str(path), "--workers", "2", "--endpoint-api-key", "sk-server")
        with gateway(server, options=options) as front:
            alice = served.token(team="research", models=["m"], budgets={"requests-per-day": 100})
            replies = ask(front, alice)
            assert {reply.status_code for reply in replies} == {200}
            left = sorted(int(reply.headers["x-ratelimit-remaining-requests"]) for reply in replies)
            assert left == list(range(96, 100)), "workers share the budget of a client"
            assert codes(front, alice, model="dear") == {(403, "model_not_allowed")}
            assert codes(front, "sk-search") == {(200, "")}
            expired = served.token(exp=int(time.time()) - 60)
            assert codes(front, expired) == {(401, "token_expired")}
            assert codes(front, signed(served.claims(), OTHER_RSA, kid="first")) == {(401, "token_signature")}
            assert codes(front, "eyJ.no.token") == {(401, "token_malformed")}
            assert codes(front, "not-a-token") == {(401, "invalid_api_key")}
            reply = ask(front, expired)[0]
            challenge = 'Bearer error="invalid_token", error_description="The token has expired."'
            assert reply.headers["www-authenticate"] == challenge
            headers = {"authorization": f"Bearer {expired}", "anthropic-version": "2023-06-01"}
            reply = front.client.post("/v1/messages", json=BODY, headers=headers)
            assert (reply.status_code, reply.json()["type"]) == (401, "error")
            assert reply.json()["error"] == {
                "type": "authentication_error",
                "message": "The token has expired.",
            }

            now = int(time.time())
            local = {"iss": "local", "aud": "penstock", "sub": "job", "exp": now + 600}
            assert codes(front, signed(local, EC, "ES256", kid="one")) == {(200, "")}
            assert codes(front, signed(local, RSA, kid="two")) == {(401, "token_unknown_key")}
            local_keys.write_text(json.dumps({"keys": [public_jwk(RSA, kid="two")]}))
            eventually(lambda: codes(front, signed(local, RSA, kid="two")) == {(200, "")})
            assert codes(front, signed(local, EC, "ES256", kid="one")) == {(401, "token_unknown_key")}

            fresh = served.token(sub="zoe")
            metrics = front.client.get("/metrics", headers={"authorization": f"Bearer {fresh}"}).text
            assert 'penstock_gateway_rejection_total{reason="token_signature"} 4.0' in metrics
            assert 'penstock_gateway_key_request_total{key="sso:alice",outcome="ok"} 4.0' in metrics
            entry = logged(front, 1)[0]
            assert (entry["key"], entry["team"]) == ("sso:alice", "research")
            path.write_text("keys:\n  - {name: search, key: sk-search}\n")
            eventually(lambda: codes(front, alice) == {(401, "token_issuer")})
            said = "".join(front.lines)
            for token in (alice, expired, fresh):
                assert not any(part in said for part in token.split("."))
        assert set(seen) == {"Bearer sk-server"}
