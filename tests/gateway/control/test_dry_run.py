"""Where a request would go, and why: as it does, and nothing comes of asking."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.main import main
from tests.gateway.processes import Call, Gateway, Upstream, closed_port, eventually, gateway

ADMIN = {"authorization": "Bearer admin-key"}
OPTIONS = ("--admin-api-key", "admin-key")
TWO = (*OPTIONS, "--workers", "2")


def answer(call: Call) -> None:
    call.stream('{"choices": [{"text": "x", "finish_reason": "stop"}]}', "[DONE]")


def listing(*models: str) -> Any:
    body = json.dumps(
        {"object": "list", "data": [{"id": each, "object": "model"} for each in models]}
    ).encode()
    return lambda call: call.reply(200, body)


def ask(front: Gateway, **fields: Any) -> dict[str, Any]:
    """Of any worker: each connection is its own."""
    reply = httpx.post(f"{front.url}/admin/route", json=fields, headers=ADMIN)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def endpoints(step: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["endpoint"]: each for each in step["endpoints"]}


def test_each_step_with_the_scores_and_obstacles_of_its_endpoints(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    with (
        Upstream(answer) as one,
        Upstream(answer) as two,
        Upstream(answer) as spare,
        Upstream(answer) as other,
    ):
        one.on_models = two.on_models = listing("big")
        spare.on_models, other.on_models = listing("small"), listing("else")
        fleet.write_text(
            f"pools: [{{name: own, endpoints: ['{one.url}', '{two.url}'], fallback: [spare]}},"
            f" {{name: spare, endpoints: ['{spare.url}']}}, {{name: far, endpoints: ['{other.url}']}}]\n"
            "models: {gpt-*: {targets: {big: 3, small: 1}}, fast: {targets: small}}\n"
        )
        options = (*TWO, "--endpoints-file", str(fleet), "--scorers", "queue=2,session=1")
        with gateway(options=options) as front:
            report = ask(front, model="gpt-4", session="s", api="completions")
            assert report["name"]["rule"] == "gpt-*"
            assert report["name"]["targets"] == {"big": 3, "small": 1}
            assert report["name"]["chosen_by"] == "weight, by the session"
            assert ask(front, model="fast")["endpoint"] == spare.url
            first, second = ask(front, model="big")["steps"]
            assert (first["model"], first["pools"], first["holds"]) == ("big", ["own"], True)
            assert (second["model"], second["pools"], second["holds"]) == ("small", ["spare"], False)
            rows = endpoints(first)
            assert rows.keys() == {one.url, two.url}
            assert rows[one.url]["scores"].keys() == {"queue", "session"}
            assert all(row["ready"] and not row["obstacles"] for row in rows.values())
            body = {"model": "big", "prompt": "p", "stream": True}
            for number in range(4):
                session = f"session {number}"
                told = {ask(front, model="big", session=session, api="completions")["endpoint"]}
                reply = httpx.post(
                    f"{front.url}/v1/completions", json=body, headers={"x-session-id": session, **ADMIN}
                )
                assert reply.status_code == 200
                [served] = [each.url for each in (one, two) if each.calls]
                assert told == {served}
                one.calls.clear()
                two.calls.clear()
            drain = {"url": one.url}
            httpx.post(f"{front.url}/admin/endpoints/drain", json=drain, headers=ADMIN)
            report = ask(front, model="big")
            assert report["endpoint"] == two.url
            assert endpoints(report["steps"][0])[one.url]["obstacles"] == ["drained"]
            assert endpoints(report["steps"][0])[one.url]["score"] is None
            httpx.post(f"{front.url}/admin/endpoints/drain", json={"url": two.url}, headers=ADMIN)
            report = ask(front, model="big")
            assert (report["endpoint"], report["steps"][1]["holds"]) == (spare.url, True)
            assert [each["endpoint"] for each in report["others"]] == [other.url]
            assert report["others"][0]["why"] == "it does not list the model"
            assert not spare.calls
            shown = ask(front, model="big", body={"messages": [{"content": "A" * 100_000}]})["request"]
            assert shown["prompt_tokens"] < 1000, "a picture counts as one, as in a request"
            refused = ask(front, model="none")["refused"]
            assert (refused["status"], refused["code"]) == (404, "model_not_found")


def test_nothing_comes_of_asking(tmp_path: Path) -> None:
    """No request, no count, no session, no test of a half-open endpoint, no budget."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: team, key: sk-team, budgets: {requests-per-day: 2}, models: [m]}]\n")
    keys.chmod(0o600)
    digest = hashlib.sha256(b"sk-team").hexdigest()
    with (
        Upstream(answer) as server,
        Upstream(answer) as other,
        gateway(
            server, other, options=(*OPTIONS, "--client-keys-file", str(keys), "--flow-control")
        ) as front,
    ):
        before = front.client.get("/metrics", headers=ADMIN).text
        for _ in range(5):
            report = ask(front, model="m", session="s", key_sha256=digest, body={"messages": []})
            assert report["budgets"] == [
                {"budget": "requests-per-day", "whose": "the key 'team'", "amount": "2", "left": "2"}
            ]
            assert report["request"]["client"] == "team"
            assert report["flow_control"] == {"waiting": 0, "waiting_bytes": 0, "would_wait": False}
        after = front.client.get("/metrics", headers=ADMIN).text
        assert [line for line in after.splitlines() if "request_total{" in line] == [
            line for line in before.splitlines() if "request_total{" in line
        ]
        assert not server.calls
        assert not other.calls
        refused = ask(front, model="secret", key_sha256=digest)["refused"]
        assert refused["code"] == "model_not_allowed"
        sent = {"model": "m", "messages": []}
        key = {"authorization": "Bearer sk-team"}
        statuses = [
            httpx.post(f"{front.url}/v1/chat/completions", json=sent, headers=key).status_code
            for _ in range(3)
        ]
        assert statuses == [200, 200, 429]
        assert ask(front, model="m", key_sha256=digest)["budgets"][0]["left"] == "0"


def test_a_request_that_continues_a_stored_response_goes_to_its_owner() -> None:
    def respond(call: Call) -> None:
        call.reply(200, b'{"id": "resp_1", "object": "response", "status": "completed", "output": []}')

    with Upstream(respond) as one, Upstream(respond) as two, gateway(one, two, options=OPTIONS) as front:
        made = front.client.post("/v1/responses", json={"model": "m", "input": "x"}, headers=ADMIN)
        assert made.status_code == 200
        owner, other = (one, two) if one.calls else (two, one)
        body = {"model": "m", "input": "x", "previous_response_id": "resp_1"}
        for _ in range(4):
            report = ask(front, api="responses", body=body)
            assert report["endpoint"] == owner.url
            assert report["stored_response"] == {"id": "resp_1", "known_at": [owner.url]}
        rows = endpoints(report["steps"][0])
        assert rows[other.url]["obstacles"] == ["it does not have the stored response"]


def test_an_api_that_the_endpoint_does_not_speak(tmp_path: Path) -> None:
    """It is refused, or translated, as a request is."""
    fleet = tmp_path / "fleet.yaml"
    with Upstream(answer) as server:
        server.on_models = listing("m")
        fleet.write_text(f"pools: [{{name: own, apis: [chat], endpoints: ['{server.url}']}}]\n")
        with gateway(options=(*OPTIONS, "--endpoints-file", str(fleet))) as front:
            sent = front.client.post("/v1/completions", json={"model": "m", "prompt": "x"}, headers=ADMIN)
            report = ask(front, model="m", api="completions")
            assert (report["refused"]["status"], report["refused"]["code"]) == (404, "api_not_served")
            assert sent.json()["error"]["message"] == report["refused"]["message"]
            assert report["endpoint"] is None
            for api, translated in (("chat", False), ("messages", True), ("responses", True)):
                report = ask(front, model="m", api=api)
                assert (report["refused"], report["translated"]) == (None, translated)
                assert report["endpoint"] == server.url
            body = {"model": "m", "input": "x", "background": True}
            assert front.client.post("/v1/responses", json=body, headers=ADMIN).status_code == 400
            refused = ask(front, api="responses", body=body)["refused"]
            assert refused["status"] == 400
            assert "background" in refused["message"]
        assert not server.calls


def test_a_pool_that_overflows_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = tmp_path / "fleet.yaml"
    with Upstream(answer) as own, Upstream(answer) as spare:
        own.on_models, spare.on_models = listing("big"), listing("small")
        own.metrics = (
            b"vllm:num_requests_waiting 7\nvllm:num_requests_running 4\nvllm:kv_cache_usage_perc 0.1\n"
        )
        fleet.write_text(
            f"pools: [{{name: own, endpoints: ['{own.url}'], fallback: [spare], overflow: {{waiting: 3}}}},"
            f" {{name: spare, endpoints: ['{spare.url}']}}]\n"
        )
        with gateway(options=(*OPTIONS, "--endpoints-file", str(fleet), "--scrape-interval", "0.1")) as front:
            eventually(lambda: ask(front, model="big")["endpoint"] == spare.url)
            first, second = ask(front, model="big")["steps"]
            assert (first["overflow"], first["overflows"], first["holds"]) == (3, True, False)
            assert (second["overflow"], second["overflows"], second["holds"]) == (None, False, True)
            assert first["endpoints"][0]["waiting"] == 7
            assert main(["route", "--model", "big", "--url", front.url, "--api-key", "admin-key"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step 1: model big, pools own  (overflows: more than 3 requests wait at each endpoint)" in lines
    assert f"  {own.url}  ready, 0 in flight, 7 waiting" in lines


def test_what_is_refused() -> None:
    with Upstream(answer) as server, gateway(server, options=(*OPTIONS, "--api-key", "client")) as front:
        path = "/admin/route"
        for fields, told in (
            ({}, "model is missing"),
            ({"model": ""}, "model"),
            ({"model": "m", "api": "x"}, "api"),
            ({"model": "m", "force": 1}, "force"),
            ({"model": "m", "body": []}, "body"),
        ):
            reply = front.client.post(path, json=fields, headers=ADMIN)
            assert reply.status_code == 400
            assert told in reply.json()["error"]["message"]
        unknown = front.client.post(path, json={"model": "m", "key_sha256": "0" * 64}, headers=ADMIN)
        assert unknown.status_code == 401
        for key, status in (({}, 401), ({"authorization": "Bearer client"}, 403)):
            assert front.client.post(path, json={"model": "m"}, headers=key).status_code == status
        assert front.client.get(path, headers=ADMIN).status_code == 405


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body, away = tmp_path / "body.json", closed_port()
    body.write_text('{"model": "m", "messages": [{"role": "user", "content": "hello"}]}')
    key = tmp_path / "key"
    key.write_text("sk-team\n")
    with (
        Upstream(answer) as server,
        gateway(server, away, options=(*OPTIONS, "--api-key", "sk-team")) as front,
    ):
        to = ("--url", front.url, "--api-key", "admin-key")
        httpx.post(f"{front.url}/admin/endpoints/drain", json={"url": away}, headers=ADMIN)
        assert main(["route", *to, "--body", str(body), "--key-file", str(key)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[:3] == [
            f"endpoint  {server.url}",
            "retries   none",
            "name      m -> m (no rule; by its own name)",
        ]
        assert any(
            line.startswith(f"  {server.url}  score ") and ", ready, 0 in flight" in line for line in lines
        )
        assert any(line.startswith(f"  {away}  drained") for line in lines)
        assert main(["route", *to, "--model", "x", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["endpoint"] == server.url
        httpx.post(f"{front.url}/admin/endpoints/drain", json={"url": server.url}, headers=ADMIN)
        assert main(["route", *to, "--model", "x"]) == 1
        assert capsys.readouterr().out.startswith("refused: 503 none_ready: ")
        assert main(["route", *to]) == 2
        assert main(["route", *to, "--body", str(tmp_path / "none")]) == 2
