"""How endpoints are, and what has failed there lately, of all workers: /status and penstock status."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from penstock.cli.main import main
from penstock.gateway.responses.endpoint_failure import MAX_FAILURES, EndpointFailure
from penstock.gateway.routing.endpoint import Endpoint
from tests.gateway.processes import Call, Gateway, Upstream, closed_port, eventually, gateway


def fail(call: Call) -> None:
    body = b'{"error": {"message": "prompt was: SECRET", "type": "server_error", "code": "boom"}}'
    call.reply(500, body)


def failures(front: Gateway, url: str) -> list[list[dict[str, Any]]]:
    """What each of some workers says, which connections of their own lead to."""
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=front.url, limits=limits) as client:
        replies = [client.get("/status").json() for _ in range(8)]
    return [each["failures"] for reply in replies for each in reply["endpoints"] if each["endpoint"] == url]


def test_the_latest_failures_of_all_workers(capsys: pytest.CaptureFixture[str]) -> None:
    away = closed_port()
    with Upstream(fail) as server, gateway(server, away, options=("--workers", "2")) as front:
        body = {"model": "m", "prompt": "p"}
        for number in range(12):
            headers = {"x-request-id": f"r{number}"}
            httpx.post(f"{front.url}/v1/completions", json=body, headers=headers)
        eventually(lambda: all(len(each) >= 1 for each in failures(front, server.url)))
        eventually(
            lambda: all(each == failures(front, server.url)[0] for each in failures(front, server.url))
        )
        told = failures(front, server.url)[0]
        assert 1 <= len(told) <= MAX_FAILURES
        last = told[-1]
        assert (last["outcome"], last["status"]) == ("model_server_error", 500)
        assert last["reason"] == "the model server sent an error server_error boom"
        assert re.fullmatch(r"r\d+", last["request_id"])
        assert re.match(r"20\d\d-\d\d-\d\dT.*\+00:00$", last["at"])
        eventually(lambda: bool(failures(front, away)[0]))
        unreached = failures(front, away)[0][-1]
        assert unreached["outcome"] == "network_error"
        assert "status" not in unreached
        text = httpx.get(f"{front.url}/status").text
        assert "SECRET" not in text
        front.workers[0].kill()
        eventually(lambda: any("is ready again" in line for line in front.lines))
        eventually(lambda: all(each == told for each in failures(front, server.url)))
        assert main(["status", "--url", front.url, "--interval", "0"]) == 0
        shown = capsys.readouterr().out
        assert "the model server sent an error server_error boom" in shown
        assert "state" in shown
        assert main(["status", "--url", front.url, "--interval", "0", "--json"]) == 0
        status = json.loads(capsys.readouterr().out)
        assert {row["endpoint"] for row in status["failures"]} == {server.url, away}
        assert {row["request_id"] for row in status["failures"]} >= {each["request_id"] for each in told}


def test_a_request_that_succeeds_notes_nothing_and_who_reads_it_needs_a_key() -> None:
    def answer(call: Call) -> None:
        call.stream('{"choices": [{"text": "x", "finish_reason": "stop"}]}', "[DONE]")

    key = {"authorization": "Bearer k"}
    with Upstream(answer) as server, gateway(server, options=("--api-key", "k")) as front:
        assert front.client.get("/status").status_code == 401
        front.client.headers.update(key)
        assert front.complete().status_code == 200
        [endpoint] = front.client.get("/status").json()["endpoints"]
    assert endpoint["failures"] == []
    assert (endpoint["ready"], endpoint["obstacles"]) == (True, [])


def test_what_is_kept_is_bounded_and_has_no_credentials() -> None:
    endpoint = Endpoint("http://a")
    told: list[EndpointFailure] = []
    endpoint.on_failure = told.append
    for number in range(9):
        endpoint.note_failure(
            "network_error", f"{number}: http://u:pw@h/?api-key=1 " + "x" * 9999, 0, "r" * 9999
        )
    assert len(endpoint.failures) == MAX_FAILURES
    assert len(told) == 9
    assert all(len(each.reason) <= 256 and len(each.request_id) <= 256 for each in endpoint.failures)
    assert not any("pw" in each.reason or "api-key" in each.reason for each in endpoint.failures)
    for each in told:
        endpoint.learn_failure(each)
    assert endpoint.failures == tuple(told[-MAX_FAILURES:])
