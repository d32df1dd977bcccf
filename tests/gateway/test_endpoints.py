"""The gateway as a process, in front of several servers, and as its operator meets it."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from penstock.supervisor.children.lifecycle import SIGNAL_DEBOUNCE_S
from tests.gateway.behaviours import DONE, TEXT, cut_head, good, stalled, stalled_in_stream
from tests.gateway.processes import (
    WAIT_S,
    Call,
    Gateway,
    Upstream,
    closed_port,
    eventually,
    gateway,
    refused_by,
)


def refuses_usage(call: Call) -> None:
    if "stream_options" in call.json:
        call.reply(400, b'{"error":{"message":"stream_options is not known"}}')
    else:
        call.stream(TEXT, DONE)


def test_a_server_that_refuses_include_usage_is_remembered() -> None:
    with Upstream(refuses_usage) as server, gateway(server) as front:
        assert front.complete().text == f"data: {TEXT}\n\ndata: {DONE}\n\n"
        assert len(server.calls) == 2
        front.complete()
        assert len(server.calls) == 3
        assert front.counts() == {"ok_without_usage": 2}
        assert front.counts("tokens_total") == {"output,events": 2}


def test_a_server_that_is_not_there_is_not_noticed() -> None:
    with Upstream(good) as server, gateway(closed_port(), server) as front:
        assert {front.complete().status_code for _ in range(8)} == {200}


def test_nobody_is_there() -> None:
    with gateway(closed_port(), options=("--scrape-interval", "0.05")) as front:
        refused = refused_by(front, "none_ready")
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert not is_ready(front)
        assert front.client.get("/health").status_code == 200, "it is alive"


def test_nobody_is_there_as_far_as_requests_show() -> None:
    """Without scrapes each of them tries."""
    with gateway(closed_port()) as front:
        assert {front.complete().status_code for _ in range(5)} == {502}
        assert front.counts() == {"network_error": 5}
        eventually(lambda: front.complete().status_code == 502 and not is_ready(front))


def is_ready(front: Gateway) -> bool:
    return front.client.get("/ready").status_code == 200


def test_a_fast_failing_server_does_not_attract_traffic() -> None:
    with (
        Upstream(lambda call: call.reply(500, b"{}")) as bad,
        Upstream(good) as one,
        Upstream(good) as other,
        gateway(bad, one, other) as front,
    ):
        statuses = [front.complete().status_code for _ in range(60)]
        assert statuses.count(500) == len(bad.calls) <= 10
        assert set(statuses[-30:]) <= {200, 500}


def test_sessions_stay_and_models_are_rewritten() -> None:
    options = ("--scorers", "session=1", "--model-rewrite", "chat=small")
    with Upstream(good) as one, Upstream(good) as other, gateway(one, other, options=options) as front:
        for _ in range(10):
            front.client.post(
                "/v1/completions", json={"model": "chat", "prompt": "p"}, headers={"x-session-id": "s"}
            )
        assert sorted([len(one.calls), len(other.calls)]) == [0, 10]
        [served] = [server for server in (one, other) if server.calls]
        assert {call.json["model"] for call in served.calls} == {"small"}


def test_a_session_that_is_given_twice_is_refused() -> None:
    options = ("--session-header", "X-Conversation")
    with Upstream(good) as server, gateway(server, options=options) as front:
        headers = [("x-conversation", "a"), ("X-Conversation", "b")]
        reply = front.client.post("/v1/completions", json={"prompt": "p"}, headers=headers)
        assert reply.status_code == 400
        assert "'x-conversation' is given more than once" in reply.json()["error"]["message"]
        assert not server.calls


def test_low_priority_is_shed_when_all_are_saturated() -> None:
    with Upstream(good) as full, gateway(full, options=("--scrape-interval", "0.05")) as front:
        full.metrics = b"vllm:num_requests_waiting 99\n"
        eventually(lambda: front.counts("endpoint_waiting") == {full.url: 99})
        refused = front.complete(priority=-1)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "saturated"
        assert "retry-after" in refused.headers
        assert front.complete(priority=0).status_code == 200
        assert front.counts() == {"rejected": 1, "ok": 1}
        assert front.counts("rejection_total") == {"saturated": 1}


@pytest.mark.parametrize("status", [200, 401, 404, 501])
def test_a_server_that_tells_no_load_is_up(status: int) -> None:
    with Upstream(good) as server:
        scrapes: list[Call] = []

        def on_metrics(call: Call) -> None:
            scrapes.append(call)
            call.reply(status, b"nothing", "text/plain")

        server.on_metrics = on_metrics
        with gateway(server, options=("--scrape-interval", "0.05")) as front:
            eventually(lambda: len(scrapes) > 3)
            assert front.complete().status_code == 200
            assert front.counts("endpoint_up") == {server.url: 1}
            eventually(lambda: sum("reports no load" in line for line in front.lines) == 1)


def test_a_server_whose_metrics_fail_is_used_without_a_better_one() -> None:
    def on_metrics(call: Call) -> None:
        call.reply(503, b"loading", "text/plain")

    with Upstream(good) as server, Upstream(good) as other:
        server.on_metrics = on_metrics
        with gateway(server, other, options=("--scrape-interval", "0.05")) as front:
            eventually(lambda: front.counts("endpoint_up") == {server.url: 0, other.url: 1})
            calls = len(server.calls)
            assert {front.complete().status_code for _ in range(10)} == {200}
            assert len(server.calls) == calls
            other.on_metrics = on_metrics
            eventually(lambda: set(front.counts("endpoint_up").values()) == {0})
            assert is_ready(front)
            assert {front.complete().status_code for _ in range(20)} == {200}
            assert len(server.calls) > calls


def test_metrics_that_take_long_are_late_and_no_sign_of_a_dead_server() -> None:
    """Those of a busy server take longer than others."""
    asked, held = threading.Semaphore(0), threading.Event()

    def on_metrics(call: Call) -> None:
        asked.release()
        held.wait(WAIT_S)
        call.reply(200, b"vllm:num_requests_waiting 7\n", "text/plain")

    with Upstream(good) as busy, Upstream(good) as other:
        busy.on_metrics = on_metrics
        with gateway(busy, other, options=("--scrape-interval", "0.05")) as front:
            assert asked.acquire(timeout=WAIT_S)
            assert not asked.acquire(timeout=1.2), "the scrape goes on"
            assert front.counts("endpoint_up") == {busy.url: 1, other.url: 1}
            held.set()
            eventually(lambda: front.counts("endpoint_waiting").get(busy.url) == 7)


def poisoned(call: Call) -> None:
    """One client's prompt makes it fail."""
    if call.json["prompt"] == "poison":
        call.reply(500, b"{}")
    else:
        good(call)


def test_one_clients_errors_take_no_server_from_others() -> None:
    keys = ("--api-key", "good", "bad")
    with Upstream(poisoned) as one, Upstream(poisoned) as other, gateway(one, other, options=keys) as front:

        def ask(key: str, prompt: str) -> int:
            front.client.headers["authorization"] = f"Bearer {key}"
            return front.complete(prompt=prompt).status_code

        while not (one.calls and other.calls):  # equal endpoints are picked at random
            assert ask("good", "p") == 200
        for _ in range(5):
            assert [ask("bad", "poison") for _ in range(6)] == [500] * 6
            assert ask("good", "p") == 200
        assert front.counts("endpoint_up") == {one.url: 1, other.url: 1}


def crashed(call: Call) -> None:
    """One prompt makes it break the connection."""
    if call.json["prompt"] == "poison":
        call.reset()
    else:
        good(call)


def test_a_client_whose_prompts_break_servers_takes_none_from_others() -> None:
    """Six of them, of a client that nobody else is beside."""
    with Upstream(crashed) as one, Upstream(crashed) as other, gateway(one, other) as front:
        for _ in range(6):
            assert front.complete(prompt="poison").status_code == 502
        ups = front.counts("endpoint_up")
        assert sorted(ups.values()) != [0, 0]
        assert front.complete().status_code == 200
        eventually(
            lambda: front.complete().status_code == 200 and set(front.counts("endpoint_up").values()) == {1}
        )


def test_the_first_token_after_an_outage_takes_a_server_back() -> None:
    """Long before the reply ends: all clients are served at once."""
    body = {"model": "m", "prompt": "p", "stream": True}

    def first_line(client: httpx.Client, gone: threading.Barrier) -> str:
        with client.stream("POST", "/v1/completions", json=body) as reply:
            line = next(reply.iter_lines())
            gone.wait(WAIT_S)
            return line

    with Upstream(cut_head) as server, gateway(server) as front:
        assert {front.complete().status_code for _ in range(8)} == {502}
        assert front.counts("endpoint_up") == {server.url: 0}
        server.behaviour = stalled_in_stream
        gone = threading.Barrier(13)
        with ThreadPoolExecutor(12) as pool, httpx.Client(base_url=front.url, timeout=WAIT_S) as client:
            lines = [pool.submit(first_line, client, gone) for _ in range(12)]
            eventually(lambda: gone.n_waiting == 12)
            assert front.counts("endpoint_up") == {server.url: 1}
            gone.wait(WAIT_S)
            assert {line.result() for line in lines} == {f"data: {TEXT}"}


def test_servers_that_all_answer_with_errors_are_asked_nevertheless() -> None:
    with Upstream(poisoned) as one, Upstream(poisoned) as other, gateway(one, other) as front:
        assert {front.complete(prompt="poison").status_code for _ in range(20)} == {500}
        assert set(front.counts("endpoint_up").values()) == {0, 1}, "one client takes no second one out"
        assert is_ready(front)
        assert front.complete().status_code == 200


def test_loads_are_read_with_the_key() -> None:
    """A Penstock server with keys shows its metrics to those who have one."""
    with Upstream(good) as server:
        loaded = b"vllm:num_requests_waiting 7\n"
        server.on_metrics = lambda call: (
            call.reply(200, loaded)
            if call.headers.get("authorization") == "Bearer k"
            else call.reply(401, b"")
        )
        options = ("--scrape-interval", "0.05", "--endpoint-api-key", "k")
        with gateway(server, options=options) as front:
            eventually(lambda: front.counts("endpoint_waiting") == {server.url: 7})


def test_names_of_other_pickers() -> None:
    options = ("--metrics-compat", "llm-d", "--model-rewrite", "m=small")
    with Upstream(good) as server, gateway(server, options=options) as front:
        front.complete()
        text = front.client.get("/metrics").text
    labels = 'fairness_id="default-flow",model_name="m",priority="0",target_model_name="small"'
    assert f"llm_d_epp_request_total{{{labels}}} 1.0" in text
    assert f"llm_d_epp_request_output_tokens_sum{{{labels}}} 2.0" in text
    assert 'llm_d_epp_ready_endpoints{name="penstock"} 1.0' in text
    assert "llm_d_epp_scheduler_e2e_duration_seconds_count 1.0" in text
    labels = 'api="completions",model="m",outcome="ok",pool="penstock",target_model="small"'
    assert f"penstock_gateway_request_total{{{labels}}} 1.0" in text


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of Anthropic's clients\nother\n")
    options = ("--api-key", "k", "--api-key-file", str(file), "--endpoint-api-key", "upstream-key")
    with Upstream(good) as server, gateway(server, options=options) as front:
        assert front.complete().status_code == 401
        assert front.client.get("/health").status_code == 200
        assert front.client.get("/metrics").status_code == 401
        front.client.headers["authorization"] = "Bearer k"
        assert front.complete().status_code == 200
        assert server.calls[-1].headers["authorization"] == "Bearer upstream-key"
        del front.client.headers["authorization"]
        for name in ("x-api-key", "api-key"):
            front.client.headers[name] = "other"
            assert front.complete().status_code == 200
            assert server.calls[-1].headers["authorization"] == "Bearer upstream-key"
            assert name not in server.calls[-1].headers
            del front.client.headers[name]
        front.client.headers["authorization"] = "Bearer k"
        assert front.counts() == {"ok": 3, "rejected": 1}


def test_a_body_that_is_too_large() -> None:
    with Upstream(good) as server, gateway(server, options=("--max-request-bytes", "2000")) as front:
        refused = front.complete(prompt="p" * 2000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_large")
        assert front.counts("rejection_total") == {"too_large": 1}
        assert not server.calls


def test_clients_name_no_hosts_from_which_caches_are_fetched() -> None:
    """A client would so read what is cached for others, and have the server connect wherever it likes."""
    transfer = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_block_ids": [1]}
    with Upstream(good) as server:
        with gateway(server) as front:
            for field, value in (("kv_transfer_params", transfer), ("bootstrap_host", "10.0.0.9")):
                refused = front.complete(**{field: value})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
            assert front.complete(kv_transfer_params=None).status_code == 200
            assert len(server.calls) == 1
        with gateway(server, options=("--allow-kv-transfer-params",)) as front:
            assert front.complete(kv_transfer_params=transfer).status_code == 200
            assert server.calls[-1].json["kv_transfer_params"] == transfer


def test_sigterm_drains() -> None:
    with Upstream(stalled_in_stream) as server, gateway(server) as front:
        with front.client.stream(
            "POST", "/v1/completions", json={"model": "m", "prompt": "p", "stream": True}
        ) as reply:
            lines = reply.iter_lines()
            assert next(lines) == f"data: {TEXT}"
            front.process.terminate()
            eventually(lambda: not is_ready(front))
            refused = httpx.post(front.url + "/v1/completions", json={"model": "m"}, timeout=WAIT_S)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
            assert front.client.get("/health").status_code == 200
            server.calls[-1].chunk(f"data: {DONE}\n\n".encode())
            server.calls[-1].send(b"0\r\n\r\n")
            assert f"data: {DONE}" in list(lines)
        assert front.process.wait(WAIT_S) == 0


def test_what_outlives_the_drain_ends_with_an_error() -> None:
    options = ("--drain-timeout", "0.5")
    body = {"model": "m", "prompt": "p", "stream": True}
    with Upstream(stalled_in_stream) as server, gateway(server, options=options) as front:
        with front.client.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert next(lines) == f"data: {TEXT}"
            server.behaviour = stalled
            with ThreadPoolExecutor() as pool:
                unanswered = pool.submit(front.complete)
                eventually(lambda: len(server.calls) == 2)
                front.process.terminate()
                event = json.loads([line for line in lines if line][-1].removeprefix("data: "))
                refused = unanswered.result(WAIT_S)
        assert event["error"]["code"] == "server_stopped"
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert front.process.wait(WAIT_S) == 0
        eventually(lambda: "".join(front.lines).count('"outcome": "rejected", "reason": "draining"') == 2)
    assert "2 requests still run" in "".join(front.lines)


def test_sigterm_is_announced_before_the_drain() -> None:
    """Load balancers need a moment to notice; what they send meanwhile is relayed."""
    with Upstream(good) as server, gateway(server, options=("--drain-grace", "300")) as front:
        front.process.terminate()
        eventually(lambda: not is_ready(front))
        state = front.client.get("/ready").json()
        assert (state["phase"], state["model_servers_ready"]) == ("draining", 1)
        assert front.client.get("/health").status_code == 200
        assert front.complete().status_code == 200
        time.sleep(SIGNAL_DEBOUNCE_S)  # an earlier signal counts as the same one
        front.process.terminate()
        assert front.process.wait(WAIT_S) == 0
