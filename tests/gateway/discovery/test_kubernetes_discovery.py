"""Endpoints of InferencePools, as pools and pods change."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="needs the extra kubernetes")

from kubernetes.aio.config import incluster_config

from penstock.config.errors import ConfigError
from penstock.gateway.discovery import kubernetes_api
from penstock.gateway.discovery.kubernetes_discovery import KubernetesDiscovery
from penstock.gateway.metric_definitions import KUBERNETES_AGE, KUBERNETES_FAILURES
from penstock.gateway.models.model_routes import ModelRoute, ModelRouteTable
from penstock.gateway.models.pools import Pool
from tests import certificates
from tests.gateway.discovery.api_server import ApiServer
from tests.gateway.discovery.objects import (
    OBJECTIVES,
    OLD_OBJECTIVES,
    PODS,
    POOLS,
    REWRITES,
    kubeconfig,
    objective,
    pod,
    pool,
    rewrite,
)

WAIT_S = 90.0


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


def follow(
    server: ApiServer,
    folder: Path,
    test: Callable[[KubernetesDiscovery], Awaitable[None]],
    pools: tuple[str, ...] = ("llama",),
    **options: Any,
) -> None:
    async def run() -> None:
        discovery = KubernetesDiscovery(kubeconfig(folder, server), pools, **options)
        await discovery.connect()
        task = asyncio.ensure_future(discovery.run())
        try:
            await test(discovery)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


async def until(discovery: KubernetesDiscovery, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not (discovery.synced and condition()):
            discovery.news.clear()
            await discovery.news.wait()


async def until_at(discovery: KubernetesDiscovery, *destinations: str) -> None:
    await until(discovery, lambda: [each.destination for each in discovery.endpoints] == list(destinations))


def test_pods_come_and_go(server: ApiServer, tmp_path: Path) -> None:
    server.apply(POOLS, pool())
    server.apply(PODS, pod("a", "10.0.0.1"))
    server.apply(PODS, pod("other", "10.0.0.9", labels={"app": "qwen"}))

    async def test(discovery: KubernetesDiscovery) -> None:
        await until_at(discovery, "10.0.0.1:8000")
        server.apply(PODS, pod("b", "10.0.0.2", ready=False))
        server.apply(PODS, pod("b", "10.0.0.2"))
        await until_at(discovery, "10.0.0.1:8000", "10.0.0.2:8000")
        server.apply(PODS, pod("a", "10.0.0.1", terminating=True))
        await until_at(discovery, "10.0.0.2:8000")
        server.delete(PODS, "a")
        server.apply(PODS, pod("c", "10.0.0.3"))
        await until_at(discovery, "10.0.0.2:8000", "10.0.0.3:8000")

    follow(server, tmp_path, test)


def test_a_pool_may_come_later_change_and_go(
    server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.apply(PODS, pod("a", "10.0.0.1"))
    server.apply(PODS, pod("q", "10.0.0.2", labels={"app": "qwen"}))

    async def test(discovery: KubernetesDiscovery) -> None:
        await until_at(discovery)
        server.apply(POOLS, pool())
        await until_at(discovery, "10.0.0.1:8000")
        server.apply(POOLS, pool(ports=(8000, 8001)))
        await until_at(discovery, "10.0.0.1:8000", "10.0.0.1:8001")
        server.apply(POOLS, pool(labels={"app": "qwen"}))
        await until_at(discovery, "10.0.0.2:8000")
        server.delete(POOLS, "llama")
        await until_at(discovery)
        server.apply(POOLS, pool())
        await until_at(discovery, "10.0.0.1:8000")

    follow(server, tmp_path, test)
    assert caplog.text.count("default/llama does not exist") == 2


def test_pods_of_an_old_selector_stay_until_those_of_the_new_one_are_known(
    server: ApiServer, tmp_path: Path
) -> None:
    server.apply(POOLS, pool())
    server.apply(PODS, pod("a", "10.0.0.1"))
    server.apply(PODS, pod("q", "10.0.0.2", labels={"app": "qwen"}))

    async def test(discovery: KubernetesDiscovery) -> None:
        await until_at(discovery, "10.0.0.1:8000")
        server.refusal = lambda request: (
            (503, {}) if request.query.get("labelSelector") == "app=qwen" else None
        )
        server.apply(POOLS, pool(labels={"app": "qwen"}))
        await until_refused(server)
        server.apply(PODS, pod("b", "10.0.0.3"))
        await until_at(discovery, "10.0.0.1:8000", "10.0.0.3:8000")
        server.refusal = lambda request: None
        await until_at(discovery, "10.0.0.2:8000")

    async def until_refused(server: ApiServer) -> None:
        def refused() -> None:
            server.until(
                lambda: any(each.query.get("labelSelector") == "app=qwen" for each in server.requests)
            )

        await asyncio.to_thread(refused)

    follow(server, tmp_path, test)


def test_objectives_and_rewrites_of_both_groups(server: ApiServer, tmp_path: Path) -> None:
    server.apply(POOLS, pool())
    server.apply(OLD_OBJECTIVES, objective("chat", 1))
    server.apply(OLD_OBJECTIVES, objective("batch", -1))

    async def test(discovery: KubernetesDiscovery) -> None:
        held = discovery.priorities
        await until(discovery, lambda: held == {"chat": 1, "batch": -1})
        server.apply(OBJECTIVES, objective("chat", 7))
        await until(discovery, lambda: held == {"chat": 7, "batch": -1})
        server.apply(REWRITES, rewrite("r", (["food"], {"food-v1": 9, "food-v2": 1})))
        await until(discovery, lambda: discovery.rewrites == {"food": [("food-v1", 9.0), ("food-v2", 1.0)]})
        server.apply(REWRITES, rewrite("r", (["food", "f*"], {"v1": 9, "v2": 1}), ([], {"any": None})))
        await until(discovery, lambda: len(discovery.rewrites) == 3)
        first = {"food": ModelRoute(targets={"mine": 1.0}), "g*": ModelRoute()}
        routes = discovery.with_routes(first)
        assert list(routes) == ["food", "g*", "f[*]", "*"]
        assert routes["food"] == first["food"]
        assert ModelRouteTable(routes).find_route("f*") == ModelRoute(targets={"v1": 9.0, "v2": 1.0})
        assert ModelRouteTable(routes).find_route("fish") == ModelRoute(targets={"any": 1.0})
        server.delete(OBJECTIVES, "chat")
        await until(discovery, lambda: held == {"chat": 1, "batch": -1})

    follow(server, tmp_path, test)


def test_a_cluster_without_objectives_and_rewrites(server: ApiServer, tmp_path: Path) -> None:
    server.absent = {
        f"{plural}.{group}"
        for plural in ("inferenceobjectives", "inferencemodelrewrites")
        for group in ("llm-d.ai", "inference.networking.x-k8s.io")
    }
    server.apply(POOLS, pool())
    server.apply(PODS, pod("a", "10.0.0.1"))

    async def test(discovery: KubernetesDiscovery) -> None:
        await until_at(discovery, "10.0.0.1:8000")

    follow(server, tmp_path, test)


def test_several_pools(server: ApiServer, tmp_path: Path) -> None:
    server.apply(POOLS, pool())
    server.apply(POOLS.replace("/default/", "/team/"), pool("qwen", labels={"app": "qwen"}, ports=(9000,)))
    server.apply(PODS, pod("a", "10.0.0.1"))
    server.apply(PODS.replace("/default/", "/team/"), pod("q", "10.0.0.2", labels={"app": "qwen"}))

    async def test(discovery: KubernetesDiscovery) -> None:
        await until_at(discovery, "10.0.0.1:8000", "10.0.0.2:9000")
        assert [each.pool for each in discovery.endpoints] == ["llama", "qwen"]
        said = Pool(name="llama", fallback=["qwen"], role="decode")
        assert [each.role for each in discovery.endpoints_in([said])] == ["decode", "both"]
        assert discovery.with_pools([said]) == (said, Pool(name="qwen"))

    follow(server, tmp_path, test, pools=("llama", "team/qwen"))


def test_a_pool_that_it_may_not_see_keeps_no_other_one_away(server: ApiServer, tmp_path: Path) -> None:
    server.apply(POOLS, pool())
    server.apply(PODS, pod("a", "10.0.0.1"))
    server.refusal = lambda request: (403, {}) if "/team/" in request.path else None

    async def test(discovery: KubernetesDiscovery) -> None:
        async with asyncio.timeout(WAIT_S):
            while not discovery.endpoints:
                await discovery.news.wait()
                discovery.news.clear()
        assert [each.destination for each in discovery.endpoints] == ["10.0.0.1:8000"]
        assert not discovery.synced
        figures = {each.metric: each.value for each in discovery.figures()}
        assert figures == {KUBERNETES_AGE: math.inf, KUBERNETES_FAILURES: discovery._pools[1].failures}

    follow(server, tmp_path, test, pools=("llama", "team/qwen"))


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_pool_that_fails_open_lets_requests_without_a_key_pass(
    server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, has_keys: bool
) -> None:
    server.apply(POOLS, pool(failure_mode="FailOpen"))
    server.apply(PODS, pod("a", "10.0.0.1"))

    async def test(discovery: KubernetesDiscovery) -> None:
        await until_at(discovery, "10.0.0.1:8000")
        server.apply(PODS, pod("b", "10.0.0.2"))
        await until_at(discovery, "10.0.0.1:8000", "10.0.0.2:8000")

    follow(server, tmp_path, test, has_keys=has_keys)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["FailOpen" in warning.getMessage() for warning in warnings] == [True] * has_keys


def test_all_watches_go_on_with_new_credentials(server: ApiServer, tmp_path: Path) -> None:
    server.token = "first"
    server.apply(POOLS, pool())
    server.apply(PODS, pod("a", "10.0.0.1"))
    server.apply(OBJECTIVES, objective("chat", 1))

    async def test(discovery: KubernetesDiscovery) -> None:
        await until_at(discovery, "10.0.0.1:8000")
        await asyncio.to_thread(server.until_watched, 6)
        server.token = "second"
        kubeconfig(tmp_path, server)
        server.end_watches()
        server.apply(PODS, pod("b", "10.0.0.2"))
        server.apply(OBJECTIVES, objective("chat", 2))
        await until_at(discovery, "10.0.0.1:8000", "10.0.0.2:8000")
        await until(discovery, lambda: discovery.priorities == {"chat": 2})

    follow(server, tmp_path, test)


async def until_no_connection() -> None:
    """Until the server has answered the end of the TLS connections of cancelled requests: the client does not
    wait for it, and a loop that ends before leaves their sockets open."""
    descriptors = asyncio.get_running_loop()._selector.get_map()  # type: ignore[attr-defined]
    async with asyncio.timeout(WAIT_S):
        while len(descriptors) > 1:  # the loop's own  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.01)


def test_the_service_account_of_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = certificates.make(tmp_path)
    token, namespace = tmp_path / "token", tmp_path / "namespace"
    token.write_text("first")
    namespace.write_text("team")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", made.authority)
    monkeypatch.setattr(kubernetes_api, "SERVICE_ACCOUNT_NAMESPACE", namespace)

    async def run(server: ApiServer) -> None:
        discovery = KubernetesDiscovery(None, ["llama"])
        await discovery.connect()
        task = asyncio.ensure_future(discovery.run())
        await until_at(discovery, "10.0.0.1:8000")
        await asyncio.to_thread(server.until_watched, 6)
        token.write_text("second")  # as the kubelet does, before the first one expires
        server.token = "second"
        server.end_watches()
        server.apply(PODS.replace("/default/", "/team/"), pod("b", "10.0.0.2"))
        await until_at(discovery, "10.0.0.1:8000", "10.0.0.2:8000")
        await asyncio.to_thread(server.until_watched, 6)
        # At the end no watch is connecting: asyncio leaves a TLS connection whose task is cancelled then.
        server.refusal = lambda request: (503, {"retry-after": "60"})
        seen = len(server.requests)
        server.end_watches()
        await asyncio.to_thread(server.until, lambda: len(server.requests) == seen + 6)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until_no_connection()

    with ApiServer(made) as server:
        server.token = "first"
        server.apply(POOLS.replace("/default/", "/team/"), pool())
        server.apply(PODS.replace("/default/", "/team/"), pod("a", "10.0.0.1"))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        asyncio.run(run(server))


def test_credentials_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(kubeconfig: str | None) -> None:
        await KubernetesDiscovery(kubeconfig, ["llama"]).connect()

    missing, broken = tmp_path / "missing", tmp_path / "broken"
    broken.write_text("{")
    for path in (missing, broken):
        with pytest.raises(ConfigError, match=f"--kubernetes-config {path}: "):
            asyncio.run(connect(str(path)))
    monkeypatch.setenv("KUBECONFIG", str(missing))
    with pytest.raises(ConfigError, match=f"no pod of a cluster, and there is no {missing}"):
        asyncio.run(connect(None))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(ConfigError, match="--kubernetes-pool: Service token file"):
        asyncio.run(connect(None))
