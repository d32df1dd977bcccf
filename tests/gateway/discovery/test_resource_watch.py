"""A copy of the API server's objects: pages, events, resumption, versions that it forgot, and outages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes", reason="needs the extra kubernetes")

import aiohttp

from penstock.gateway.discovery import kubernetes_api
from penstock.gateway.discovery.kubernetes_api import KubernetesApi
from penstock.gateway.discovery.kubernetes_objects import OBJECTIVES, PODS, POOLS, Resource
from penstock.gateway.discovery.resource_watch import PAGE_OBJECTS, ResourceWatch
from tests.gateway.discovery import objects
from tests.gateway.discovery.api_server import ApiServer
from tests.gateway.discovery.objects import kubeconfig, pod, pool

WAIT_S = 90.0


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


class Following:
    """A watch that runs. Its waits are noted, and skipped."""

    def __init__(self, api: KubernetesApi, resource: Resource[Any], **options: Any) -> None:
        self.changed = asyncio.Event()
        self.waits: list[float] = []
        self.on_wait: Callable[[], None] = lambda: None
        self.watch = ResourceWatch(api, resource, "default", self.changed.set, sleep=self._sleep, **options)
        self.task = asyncio.ensure_future(self.watch.run())
        self.task.add_done_callback(lambda task: self.changed.set())

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                assert not self.task.done(), self.task
                self.changed.clear()
                await self.changed.wait()

    async def until_it_has(self, names: set[str]) -> None:
        await self.until(lambda: self.watch.synced and set(self.watch.objects) == names)

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.on_wait()
        self.changed.set()
        await asyncio.sleep(0)


def follow(
    server: ApiServer,
    folder: Path,
    test: Callable[[Following], Awaitable[None]],
    resource: Resource[Any] = PODS,
    **options: Any,
) -> None:
    async def run() -> None:
        api = KubernetesApi(kubeconfig(folder, server))
        following = Following(api, resource, **options)
        try:
            await test(following)
        finally:
            following.task.cancel()
            await asyncio.gather(following.task, return_exceptions=True)
            await api.close()

    asyncio.run(run())


async def watched(server: ApiServer) -> None:
    """Until a watch has begun: the end of watches is for those that have."""
    await asyncio.to_thread(server.until_watched, 1)


def test_a_list_of_several_pages_then_events(server: ApiServer, tmp_path: Path) -> None:
    names = {f"p{number}" for number in range(PAGE_OBJECTS + 20)}
    for name in names:
        server.apply(objects.PODS, pod(name, "10.0.0.1"))
    server.apply(objects.PODS, pod("other", labels={"app": "qwen"}))

    async def test(following: Following) -> None:
        await following.until_it_has(names)
        assert [request.query["limit"] for request in server.lists("pods")] == [str(PAGE_OBJECTS)] * 2
        server.apply(objects.PODS, pod("new", "10.0.0.2"))
        await following.until_it_has(names | {"new"})
        server.delete(objects.PODS, "p0")
        await following.until_it_has((names | {"new"}) - {"p0"})
        server.apply(objects.PODS, pod("p1", labels={"app": "qwen"}))  # not selected any more
        await following.until_it_has((names | {"new"}) - {"p0", "p1"})
        assert len(server.lists("pods")) == 2
        assert following.waits == []

    follow(server, tmp_path, test, selectors={"labelSelector": "app=llama"})


def test_a_watch_that_ends_resumes_where_it_was(server: ApiServer, tmp_path: Path) -> None:
    server.apply(objects.PODS, pod("a"))

    async def test(following: Following) -> None:
        await following.until_it_has({"a"})
        server.apply(objects.PODS, pod("b"))
        await following.until_it_has({"a", "b"})
        seen = following.watch.objects["b"].metadata.resource_version
        await watched(server)
        server.end_watches()
        server.apply(objects.PODS, pod("c"))
        await following.until_it_has({"a", "b", "c"})
        assert [request.query["resourceVersion"] for request in server.watches("pods")][1:] == [seen]
        assert len(server.lists("pods")) == 1

    follow(server, tmp_path, test)


def test_a_bookmark_moves_the_version(server: ApiServer, tmp_path: Path) -> None:
    server.apply(objects.PODS, pod("a"))

    async def test(following: Following) -> None:
        await following.until_it_has({"a"})
        server.apply(objects.POOLS, pool())  # not watched
        server.bookmark()
        await watched(server)
        server.end_watches()
        server.apply(objects.PODS, pod("b"))
        await following.until_it_has({"a", "b"})
        first, second = (int(request.query["resourceVersion"]) for request in server.watches("pods"))
        assert second > first + 1
        assert server.watches("pods")[0].query["allowWatchBookmarks"] == "true"

    follow(server, tmp_path, test)


@pytest.mark.parametrize("way", ["event", "status"])
def test_a_forgotten_version_is_listed_again(server: ApiServer, tmp_path: Path, way: str) -> None:
    server.apply(objects.PODS, pod("a"))
    server.apply(objects.PODS, pod("b"))

    async def test(following: Following) -> None:
        await following.until_it_has({"a", "b"})
        server.delete(objects.PODS, "a")
        await following.until_it_has({"b"})
        if way == "status":
            server.refusal = lambda request: (
                (410, {}) if request.is_watch and len(server.lists("pods")) == 1 else None
            )
        await watched(server)
        server.end_watches()
        server.apply(objects.PODS, pod("c"))
        server.delete(objects.PODS, "b")
        server.forget()
        await following.until_it_has({"c"})
        assert len(server.lists("pods")) == 2
        server.apply(objects.PODS, pod("d"))
        await following.until_it_has({"c", "d"})
        assert len(server.lists("pods")) == 2

    follow(server, tmp_path, test)


def test_during_an_outage_the_copy_stays(server: ApiServer, tmp_path: Path) -> None:
    server.apply(objects.PODS, pod("a"))

    async def test(following: Following) -> None:
        await following.until_it_has({"a"})
        await watched(server)
        server.refusal = lambda request: (503, {"retry-after": "7"} if len(following.waits) == 5 else {})
        server.end_watches()
        await following.until(lambda: len(following.waits) >= 8)
        assert set(following.watch.objects) == {"a"}
        assert following.waits[0] < 0.6
        assert 7.0 <= max(following.waits) <= 30.0
        server.apply(objects.PODS, pod("b"))
        server.refusal = lambda request: None
        await following.until_it_has({"a", "b"})
        assert len(server.lists("pods")) == 1

    follow(server, tmp_path, test)


def test_a_malformed_object_is_ignored(
    server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.apply(objects.PODS, pod("a"))
    server.apply(objects.PODS, {"metadata": {"name": "odd", "labels": {"app": "llama"}}, "status": []})

    async def test(following: Following) -> None:
        await following.until_it_has({"a"})
        server.apply(objects.PODS, pod("a") | {"status": 7})
        server.apply(objects.PODS, pod("b"))
        await following.until_it_has({"a", "b"})
        assert following.watch.objects["a"].status.phase == "Running"

    follow(server, tmp_path, test)
    assert "pods/odd" in caplog.text


def test_a_watch_that_ends_at_once_does_not_spin(server: ApiServer, tmp_path: Path) -> None:
    server.apply(objects.PODS, pod("a"))

    async def test(following: Following) -> None:
        server.refusal = lambda request: (200, {}) if request.is_watch else None
        await following.until_it_has({"a"})
        await following.until(lambda: len(following.waits) >= 4)
        assert following.waits[3] > following.waits[0]

    follow(server, tmp_path, test)


def test_new_credentials_are_read_when_the_old_ones_expire(server: ApiServer, tmp_path: Path) -> None:
    server.token = "first"
    server.apply(objects.POOLS, pool())

    async def test(following: Following) -> None:
        await following.until_it_has({"llama"})
        following.on_wait = lambda: kubeconfig(tmp_path, server)
        server.token = "second"
        await watched(server)
        server.end_watches()
        server.apply(objects.POOLS, pool("more"))
        await following.until_it_has({"llama", "more"})
        assert len(following.waits) <= 2

    follow(server, tmp_path, test, POOLS)


def test_a_watch_without_news_is_begun_again_at_once(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = aiohttp.ClientTimeout(total=None, sock_read=0.05)
    monkeypatch.setattr(kubernetes_api, "WATCH_LIMITS", limits)
    server.apply(objects.PODS, pod("a"))

    async def test(following: Following) -> None:
        await following.until_it_has({"a"})
        await asyncio.to_thread(server.until, lambda: len(server.watches("pods")) >= 3)
        server.apply(objects.PODS, pod("b"))
        await following.until_it_has({"a", "b"})
        assert following.waits == []
        assert len(server.lists("pods")) == 1

    follow(server, tmp_path, test)


def test_a_kind_that_is_not_installed_is_tried_seldom_and_silently(
    server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.absent = {f"{OBJECTIVES[0].plural}.{OBJECTIVES[0].group}"}

    async def test(following: Following) -> None:
        await following.until(lambda: len(following.waits) == 2)
        assert following.waits == [15.0, 15.0]
        server.absent.clear()
        await following.until_it_has(set())

    follow(server, tmp_path, test, OBJECTIVES[0], optional=True)
    assert not caplog.records


def test_what_it_may_not_see_is_logged_once(
    server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.refusal = lambda request: (403, {})

    async def test(following: Following) -> None:
        await following.until(lambda: len(following.waits) == 3)

    follow(server, tmp_path, test)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "status 403: refused by the test" in caplog.text
