"""Draining one endpoint: it gets nothing more, from no worker; what runs ends."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.main import main
from tests.gateway.processes import Call, Gateway, Upstream, eventually, gateway

ADMIN = {"authorization": "Bearer admin-key"}
USAGE = '"usage": {"prompt_tokens": 1, "completion_tokens": 1}'
EVENT = f'{{"choices": [{{"text": "x", "finish_reason": "stop"}}], {USAGE}}}'
OPTIONS = ("--admin-api-key", "admin-key", "--scorers", "session=1")
TWO = (*OPTIONS, "--workers", "2")


def answer(call: Call) -> None:
    if call.method == "GET":
        call.reply(200 if call.path.endswith("resp_1") else 404, b'{"id": "resp_1", "object": "response"}')
    elif call.path == "/v1/responses":
        call.reply(200, b'{"id": "resp_1", "object": "response", "status": "completed", "output": []}')
    else:
        call.stream(EVENT, "[DONE]")


def change(front: Gateway, operation: str, url: str, **more: Any) -> httpx.Response:
    fields = {"url": url, **more}
    return front.client.post(f"/admin/endpoints/{operation}", json=fields, headers=ADMIN)


def burst(front: Gateway, count: int = 16) -> None:
    """Requests over connections of their own, which the supervisor spreads over the workers."""
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=front.url, headers=ADMIN, limits=limits) as client:
        for _ in range(count):
            body = {"model": "m", "prompt": "p", "stream": True}
            reply = client.post("/v1/completions", json=body, headers={"x-session-id": "s"})
            assert reply.status_code == 200


def generated(server: Upstream) -> int:
    return sum(call.method == "POST" for call in server.calls)


def test_no_worker_sends_a_drained_endpoint_anything(tmp_path: Path) -> None:
    """Also not the session that it served, nor a worker that starts later."""
    with Upstream(answer) as one, Upstream(answer) as two, gateway(one, two, options=TWO) as front:
        burst(front)
        drained, other = (one, two) if one.calls else (two, one)
        first = change(front, "drain", drained.url)
        assert (first.status_code, first.json()) == (
            200,
            {"endpoint": drained.url, "drained": True, "running": 0},
        )
        before = generated(drained)
        burst(front)
        front.workers[0].kill()
        eventually(lambda: any("is ready again" in line for line in front.lines))
        burst(front)
        assert change(front, "drain", drained.url).json()["drained"]
        assert generated(drained) == before
        counts = front.counts("endpoint_drained")
        assert counts == {drained.url: 1.0}
        assert change(front, "undrain", drained.url).json() == {
            "endpoint": drained.url,
            "drained": False,
            "running": 0,
        }
        assert front.counts("endpoint_drained") == {}
        change(front, "drain", other.url)
        burst(front, 2)
        assert generated(drained) == before + 2
        assert change(front, "drain", drained.url).status_code == 200
        refused = front.client.post("/v1/completions", json={"model": "m", "prompt": "p"}, headers=ADMIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "none_ready")
        assert front.client.get("/ready").status_code == 503


def test_the_call_tells_and_waits_for_what_runs() -> None:
    go_on = threading.Event()

    def slow(call: Call) -> None:
        call.stream('{"choices": [{"text": "x"}]}', end=False)
        go_on.wait()
        call.chunk(f"data: {EVENT}\n\ndata: [DONE]\n\n".encode())
        call.send(b"0\r\n\r\n")

    with (
        Upstream(slow) as server,
        gateway(server, options=TWO) as front,
        front.client.stream(
            "POST",
            "/v1/completions",
            json={"model": "m", "prompt": "p", "stream": True},
            headers=ADMIN,
        ) as reply,
    ):
        assert change(front, "drain", server.url).json()["running"] == 1
        assert change(front, "drain", server.url, wait=0.2).json()["running"] == 1
        replies = []
        waiting = threading.Thread(
            target=lambda: replies.append(
                httpx.post(
                    f"{front.url}/admin/endpoints/drain",
                    json={"url": server.url, "wait": 60},
                    headers=ADMIN,
                    timeout=60,
                )
            )
        )
        waiting.start()
        go_on.set()
        assert "[DONE]" in "".join(reply.iter_text())
        waiting.join()
        assert replies[0].json()["running"] == 0


def test_stored_responses_of_a_drained_endpoint_can_be_read_but_not_continued() -> None:
    def none(call: Call) -> None:
        call.reply(404 if call.method == "GET" else 200, b'{"id": "resp_2", "object": "response"}')

    with Upstream(answer) as one, Upstream(none) as two, gateway(one, two, options=OPTIONS) as front:
        change(front, "drain", two.url)
        made = front.client.post("/v1/responses", json={"model": "m", "input": "x"}, headers=ADMIN)
        assert made.json()["id"] == "resp_1"
        change(front, "undrain", two.url)
        change(front, "drain", one.url)
        for _ in range(6):
            read = httpx.get(f"{front.url}/v1/responses/resp_1", headers=ADMIN)
            assert read.status_code == 200
        continued = {"model": "m", "input": "x", "previous_response_id": "resp_1"}
        for _ in range(6):
            reply = httpx.post(f"{front.url}/v1/responses", json=continued, headers=ADMIN)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "owner_unavailable")
        assert generated(one) == 1
        assert generated(two) == 0


def test_who_may_drain_what() -> None:
    with Upstream(answer) as server, gateway(server, options=(*OPTIONS, "--api-key", "client")) as front:
        path = "/admin/endpoints/drain"
        replies = {
            "no key": front.client.post(path, json={"url": server.url}),
            "client": front.client.post(
                path, json={"url": server.url}, headers={"authorization": "Bearer client"}
            ),
            "unknown": change(front, "drain", "http://other:1"),
            "none": change(front, "drain", ""),
            "name": change(front, "drain", server.url, force=1),
            "wait": change(front, "drain", server.url, wait=-1),
            "undrain waits": change(front, "undrain", server.url, wait=1),
            "get": front.client.get(path, headers=ADMIN),
        }
        statuses = {name: reply.status_code for name, reply in replies.items()}
        assert statuses == {
            "no key": 401,
            "client": 403,
            "unknown": 404,
            "none": 400,
            "name": 400,
            "wait": 400,
            "undrain waits": 400,
            "get": 405,
        }
        told = replies["unknown"].json()["error"]["message"]
        assert told == f"url 'http://other:1' is no endpoint of this gateway; its endpoints are {server.url}."
        assert "wait is '-1', not 0 to 3600 seconds." in replies["wait"].text
        assert front.counts("endpoint_drained") == {}
    with Upstream(answer) as server, gateway(server) as front:
        refused = front.client.post("/admin/endpoints/drain", json={"url": server.url})
        assert refused.json()["error"]["code"] == "administrative"


def test_the_mark_goes_with_the_endpoint(tmp_path: Path) -> None:
    """One that comes later with the same URL is another server."""
    fleet = tmp_path / "fleet"

    def name(*servers: Upstream) -> None:
        new = tmp_path / "new"
        new.write_text("".join(f"{each.url}\n" for each in servers))
        new.replace(fleet)

    def endpoints(front: Gateway) -> int:
        return len(front.counts("endpoint_up"))

    with Upstream(answer) as one, Upstream(answer) as two:
        name(one, two)
        with gateway(options=(*TWO, "--endpoints-file", str(fleet))) as front:
            change(front, "drain", one.url)
            name(two)
            eventually(lambda: all(endpoints(front) == 1 for _ in range(4)))
            name(one, two)
            eventually(lambda: endpoints(front) == 2)
            assert front.counts("endpoint_drained") == {}


def test_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with Upstream(answer) as server, gateway(server, options=OPTIONS) as front:
        to = ("--url", front.url, "--api-key", "admin-key")
        assert main(["drain", server.url, *to, "--wait", "5"]) == 0
        assert capsys.readouterr().out == f"{server.url} gets no new requests; 0 still run\n"
        assert main(["undrain", server.url, *to]) == 0
        assert capsys.readouterr().out == f"{server.url} gets requests\n"
        assert main(["drain", "http://other:1", *to]) == 1
        assert "is no endpoint of this gateway" in capsys.readouterr().err
        assert main(["drain", *to]) == 2
        assert Counter(capsys.readouterr().err.split())["ENDPOINT"]
