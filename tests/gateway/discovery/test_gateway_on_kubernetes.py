"""A gateway that follows an InferencePool: requests go to the pods there are."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("kubernetes", reason="needs the extra kubernetes")

from penstock.config.gateway import GatewayConfig
from penstock.gateway.discovery.kubernetes_api import ApiServerError, KubernetesApi
from tests.gateway.behaviours import good
from tests.gateway.discovery.api_server import ApiServer
from tests.gateway.discovery.objects import (
    OBJECTIVES,
    PODS,
    POOLS,
    REWRITES,
    kubeconfig,
    objective,
    pod,
    pool,
    rewrite,
)
from tests.gateway.extproc.envoy import binary, envoy, ext_proc_port
from tests.gateway.processes import WAIT_S, Call, Gateway, Upstream, eventually, gateway


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


def apply_pod(server: ApiServer, name: str, upstream: Upstream, **state: bool) -> None:
    """A pod at the address of this machine, and the port of the model server."""
    port = upstream.url.rpartition(":")[2]
    server.apply(PODS, pod(name, "127.0.0.1", annotations={"llm-d.ai/active-ports": port}, **state))


def endpoints(front: Gateway) -> set[str]:
    return set(front.counts("endpoint_up"))


def test_a_rolling_update_of_the_pods_fails_no_request(server: ApiServer, tmp_path: Path) -> None:
    with Upstream(good) as old, Upstream(good) as new:
        server.apply(POOLS, pool(ports=[int(each.url.rpartition(":")[2]) for each in (old, new)]))
        apply_pod(server, "old", old)
        options = ("--kubernetes-pool", "default/llama", "--kubernetes-config", kubeconfig(tmp_path, server))
        with gateway(options=options) as front:
            assert endpoints(front) == {old.url}
            assert front.complete().status_code == 200
            # The first of two requests runs on while its pod terminates.
            held: list[Call] = []

            def hold(call: Call) -> None:
                held.append(call)
                assert stopped.wait(WAIT_S)
                good(call)

            stopped = threading.Event()
            old.behaviour = hold
            replies: list[int] = []
            running = threading.Thread(target=lambda: replies.append(front.complete().status_code))
            running.start()
            eventually(lambda: len(held) == 1)
            apply_pod(server, "new", new)
            eventually(lambda: endpoints(front) == {old.url, new.url})
            apply_pod(server, "old", old, terminating=True)
            eventually(lambda: endpoints(front) == {new.url})
            assert front.complete().status_code == 200
            server.end_watches()  # an outage of the API server changes nothing
            server.refusal = lambda request: (500, {})
            assert front.complete().status_code == 200
            eventually(lambda: front.counts("kubernetes_request_failures_total")[""] > 0)
            assert 0 < front.counts("kubernetes_age_seconds")[""] < WAIT_S
            stopped.set()
            running.join(WAIT_S)
            assert replies == [200]
            assert len(new.calls) == 2


def status(client: httpx.Client, header: str, objective: str) -> int:
    """Of the reply to a request of this objective."""
    body = {"model": "m", "prompt": "p"}
    return client.post("/v1/completions", json=body, headers={header: objective}).status_code


def gets_model(client: httpx.Client, upstream: Upstream, model: str) -> bool:
    """Whether a request for another model becomes one for this."""
    assert client.post("/v1/completions", json={"model": "m", "prompt": "p"}).status_code == 200
    return bool(upstream.calls[-1].json["model"] == model)


def is_refused(client: httpx.Client) -> bool:
    return status(client, "x-gateway-inference-objective", "batch") == 429


@pytest.mark.skipif(binary() is None, reason="there is no Envoy for this platform")
def test_the_picker_of_a_pool_for_its_own_clients_and_envoys(server: ApiServer, tmp_path: Path) -> None:
    with Upstream(good) as busy, Upstream(good) as other:
        busy.metrics = other.metrics = b"vllm:num_requests_waiting 99\n"
        server.apply(POOLS, pool(ports=[int(each.url.rpartition(":")[2]) for each in (busy, other)]))
        apply_pod(server, "a", busy)
        server.apply(OBJECTIVES, objective("batch", -1))
        kubernetes = ("--kubernetes-pool", "llama", "--kubernetes-config", kubeconfig(tmp_path, server))
        with (
            gateway(options=(*kubernetes, "--scrape-interval", "0.1", "--ext-proc-port", "0")) as front,
            envoy(busy.url, other.url, gateway_port=ext_proc_port(front)) as edge,
        ):
            for client in (front.client, edge.client):
                eventually(partial(is_refused, client))
                assert status(client, "X-LLM-D-Inference-Objective", "batch") == 429
                assert status(client, "x-gateway-inference-objective", "unknown") == 200
            assert len(busy.calls) == 2
            apply_pod(server, "a", busy, terminating=True)
            apply_pod(server, "b", other)
            eventually(lambda: endpoints(front) == {other.url})
            assert edge.complete().status_code == 200
            assert (len(busy.calls), len(other.calls)) == (2, 1)
            server.apply(REWRITES, rewrite("r", (["m"], {"big": None})))
            for client in (front.client, edge.client):
                eventually(partial(gets_model, client, other, "big"))


@pytest.mark.slow  # it waits for KUBERNETES_WAIT_S
def test_nothing_replaces_a_gateway_that_knows_the_pods_while_the_api_server_is_away(
    server: ApiServer, tmp_path: Path
) -> None:
    with Upstream(good) as upstream:
        server.apply(POOLS, pool(ports=[int(upstream.url.rpartition(":")[2])]))
        apply_pod(server, "a", upstream)
        options = ("--kubernetes-pool", "llama", "--kubernetes-config", kubeconfig(tmp_path, server))
        with gateway(options=options) as front:
            server.refusal = lambda request: (500, {})
            server.end_watches()
            front.process.send_signal(signal.SIGHUP)
            eventually(lambda: any("the rolling restart ends" in line for line in front.lines))
            assert front.complete().status_code == 200
            server.refusal = lambda request: None
            front.process.send_signal(signal.SIGHUP)
            eventually(lambda: any("is ready and replaces" in line for line in front.lines))
            assert front.complete().status_code == 200


@pytest.mark.slow
def test_endpoints_of_options_serve_while_the_api_server_is_away(server: ApiServer, tmp_path: Path) -> None:
    server.refusal = lambda request: (500, {})
    options = ("--kubernetes-pool", "llama", "--kubernetes-config", kubeconfig(tmp_path, server))
    with Upstream(good) as upstream, gateway(upstream, options=options) as front:
        assert front.complete().status_code == 200


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kubernetes_config": "f"}, "--kubernetes-config f: needs --kubernetes-pool"),
        (
            {"kubernetes_pool": ["a", "b"], "ext_proc_port": 0},
            "--kubernetes-pool a b: --ext-proc-port takes one pool",
        ),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GatewayConfig(**options)


@pytest.mark.parametrize("server", ["[https://u:secret@h", "https://u:secret@h:x"])
def test_errors_hide_what_a_kubeconfig_says(server: str, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    context = "{name: x, context: {cluster: c, user: u}}"
    path.write_text(
        f"current-context: x\ncontexts: [{context}]\nusers: [{{name: u, user: {{token: secret}}}}]\n"
        f"clusters: [{{name: c, cluster: {{server: {server}}}}}]\n"
    )

    async def get() -> None:
        api = KubernetesApi(str(path))
        try:
            await api.get("/api", {})
        finally:
            await api.close()

    with pytest.raises(ApiServerError) as caught:
        asyncio.run(get())
    assert "secret" not in str(caught.value)


def test_a_gateway_without_credentials_says_so() -> None:
    command = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "gateway",
        "--port",
        "0",
        "--kubernetes-pool",
        "llama",
    ]
    ended = subprocess.run(
        [*command, "--kubernetes-config", "/nonexistent"], capture_output=True, text=True, timeout=WAIT_S
    )
    assert ended.returncode == 2
    assert "error: --kubernetes-config /nonexistent: No such file" in ended.stderr
    assert "Traceback" not in ended.stderr
