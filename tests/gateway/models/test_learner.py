"""When endpoints are read, and what is made of their answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.gateway.models import learner as learner_module
from penstock.gateway.models.directory import ModelDirectory
from penstock.gateway.models.learner import DOUBT_S, RETRY_S, ModelLearner
from penstock.gateway.models.model_cards import MAX_LISTING_BYTES
from penstock.gateway.models.pools import Pool
from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.upstream.request_form import RequestForm
from penstock.gateway.upstream.upstream import Upstream
from penstock.http.errors import ApiError


class World:
    """A learner over one server, whose answer and clock a test sets."""

    def __init__(self) -> None:
        self.status = 200
        self.body = b""
        self.asked: list[bytes] = []
        self.now = 1000.0
        self.writers: list[asyncio.StreamWriter] = []
        self.lists("m")

    def lists(self, *names: str) -> None:
        self.body = json.dumps({"data": [{"id": name} for name in names]}).encode()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while True:
                self.asked.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (self.status, len(self.body)))
                writer.write(self.body)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    @asynccontextmanager
    async def learner(self, key: str = "") -> AsyncIterator[ModelLearner]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        form = RequestForm((b"authorization", f"Bearer {key}".encode()) if key else None)
        pool = EndpointPool(Upstream(http2="off", form=form), lambda endpoint: learner.forget(endpoint))
        learner = ModelLearner(pool, ModelDirectory(), lambda: self.now)
        pool.update([ResolvedEndpoint(f"http://127.0.0.1:{port}")])
        learner.directory.update(pool.endpoints)
        try:
            yield learner
        finally:
            pool.close()
            server.close()
            for writer in self.writers:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    async def after(self, learner: ModelLearner, seconds: float) -> int:
        """Readings within a tick that many seconds later."""
        self.now += seconds
        before = len(self.asked)
        learner._read_due()
        await asyncio.gather(*learner._reading.values())
        return len(self.asked) - before


def run(test: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test(World()))


@pytest.mark.parametrize(
    ("status", "said"),
    [(404, "any model: its /v1/models answered with status 404"), (200, "any model: it lists none")],
)
def test_the_log_says_why_nothing_is_listed(status: int, said: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World) -> None:
        world.status, world.body = status, b"{}"
        async with world.learner() as learner:
            await learner.read_all(5.0)

    caplog.set_level("INFO")
    run(test)
    assert [text.partition(" serves ")[2] for text in caplog.messages if " serves " in text] == [said]


def test_endpoints_are_read_seldom() -> None:
    async def test(world: World) -> None:
        async with world.learner("secret") as learner:
            [endpoint] = learner._pool.endpoints
            assert await world.after(learner, 0.0) == 1, "at once"
            assert b"authorization: Bearer secret" in world.asked[0]
            assert learner.directory.listing(endpoint) == {"m": {"id": "m"}}
            assert await world.after(learner, 50.0) == 0
            world.lists("n")
            assert await world.after(learner, 20.0) == 1
            assert learner.directory.listing(endpoint) == {"n": {"id": "n"}}

    run(test)


@pytest.mark.parametrize("status", [401, 403])
def test_an_endpoint_that_denies_its_listing_may_serve_what_nobody_lists(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be anybody's server, and deny generation as well: it gets no prompt that is for others."""

    async def test(world: World) -> None:
        async with world.learner() as learner:
            [denied] = learner._pool.endpoints
            lists = Endpoint("http://lists:1")
            learner.directory.update([denied, lists])
            learner.directory.learn(lists, {"m": {"id": "m"}})
            world.status = status
            assert await world.after(learner, 0.0) == 1
            assert await world.after(learner, 50.0) == 0
            assert await world.after(learner, 20.0) == 1
            assert [step.endpoints for step in learner.directory.steps("m")] == [(lists,)]
            assert [step.endpoints for step in learner.directory.steps("other")] == [(denied,)]
            world.status = 200
            assert await world.after(learner, 70.0) == 1
            world.status = status
            assert await world.after(learner, 70.0) == 1
            assert learner.directory.steps("m")[0].endpoints == (denied, lists), "what was known stays"

    run(test)
    denials = [text for text in caplog.messages if "denies" in text]
    assert len(denials) == 2, "once each time that it begins"
    assert f"status {status}" in denials[0]


@pytest.mark.parametrize("status", [404, 405, 501])
def test_an_endpoint_that_does_not_list(status: int) -> None:
    async def test(world: World) -> None:
        async with world.learner() as learner:
            world.status = status
            assert await world.after(learner, 0.0) == 1
            assert learner.directory.listing(learner._pool.endpoints[0]) == {}
            assert await world.after(learner, 50.0) == 0

    run(test)


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_an_endpoint_that_cannot_be_read_is_read_again_soon(status: int) -> None:
    async def test(world: World) -> None:
        async with world.learner() as learner:
            [endpoint] = learner._pool.endpoints
            world.status = status
            assert await world.after(learner, 0.0) == 1
            assert learner.directory.listing(endpoint) is None
            assert await world.after(learner, RETRY_S / 2) == 0
            world.status = 200
            assert await world.after(learner, RETRY_S) == 1
            world.status = status
            await world.after(learner, 70.0)
            assert learner.directory.listing(endpoint) == {"m": {"id": "m"}}, "what was known stays"

    run(test)


def test_a_listing_without_end_is_none(caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World) -> None:
        async with world.learner() as learner:
            [endpoint] = learner._pool.endpoints
            world.body = b" " * (MAX_LISTING_BYTES + 1)
            for seconds in (0.0, 10.0, 10.0, 60.0):
                learner.on_unknown_model(endpoint)
                assert await world.after(learner, seconds) == 1
            assert learner.directory.listing(endpoint) == {}

    run(test)
    lines = [text for text in caplog.messages if "lists no models: its reply is larger" in text]
    assert [text.partition(" bytes")[2] for text in lines] == [
        "",
        " (and 2 more like it since the last line)",
    ]


def test_doubt_has_an_endpoint_read_but_not_all_the_time() -> None:
    async def test(world: World) -> None:
        async with world.learner() as learner:
            [endpoint] = learner._pool.endpoints
            await world.after(learner, 0.0)
            for _ in range(3):
                learner.on_unknown_model(endpoint)
                assert await world.after(learner, 0.1) == 0
            assert await world.after(learner, DOUBT_S) == 1
            assert await world.after(learner, DOUBT_S) == 0

    run(test)


def test_adapters_of_metrics_are_served_at_once_and_read_soon() -> None:
    async def test(world: World) -> None:
        async with world.learner() as learner:
            [endpoint] = learner._pool.endpoints
            await world.after(learner, 0.0)
            endpoint.load = EndpointLoad(adapters=frozenset({"sql"}))
            await world.after(learner, DOUBT_S / 2)
            assert learner.directory.steps("sql")[0].listed == {endpoint}
            world.lists("m", "sql")
            assert await world.after(learner, DOUBT_S) == 1
            assert set(learner.directory.models()) == {"m", "sql"}

    run(test)


def test_an_unknown_model_is_looked_for_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        async with world.learner() as learner:
            learner.directory._unknown = "refuse"
            await world.after(learner, 0.0)
            world.lists("m", "loaded")
            found = await asyncio.gather(*(learner.find_steps("loaded", None) for _ in range(50)))
            assert {steps[0].model for steps in found} == {"loaded"}, "all wait for the same reading"
            assert len(world.asked) == 2
            for _ in range(50):
                with pytest.raises(ApiError):
                    await learner.find_steps("invented", None)
            assert len(world.asked) == 2
            world.now += DOUBT_S
            with pytest.raises(ApiError):
                await learner.find_steps("invented", None)
            assert len(world.asked) == 3

    monkeypatch.setattr(learner_module, "PATIENCE_S", 20.0)
    run(test)


def test_a_model_that_was_loaded_since_the_last_reading_is_found() -> None:
    """However lately another unknown name has had the endpoints read."""

    async def test(world: World) -> None:
        async with world.learner() as learner:
            learner._clock = time.monotonic
            learner.directory._unknown = "refuse"
            await world.after(learner, 0.0)
            with pytest.raises(ApiError):
                await learner.find_steps("invented", None)
            world.lists("m", "loaded")
            read = len(world.asked)
            found = await asyncio.gather(*(learner.find_steps("loaded", None) for _ in range(50)))
            assert {steps[0].model for steps in found} == {"loaded"}
            assert len(world.asked) == read + 1

    run(test)


def test_with_many_endpoints_clients_wait_for_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        async with world.learner() as learner:
            learner.directory._unknown = "refuse"
            await world.after(learner, 0.0)
            for seconds in (0.0, 1.0, 1.0):
                world.now += seconds
                with pytest.raises(ApiError):
                    await learner.find_steps("invented", None)
            assert len(world.asked) == 2
            world.now += 4.0
            with pytest.raises(ApiError):
                await learner.find_steps("invented", None)
            assert len(world.asked) == 3

    monkeypatch.setattr(learner_module, "MAX_DOUBTED_PER_S", 0.2)
    run(test)


def test_names_that_nobody_serves_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test(world: World) -> None:
        async with world.learner() as learner:
            pools = [Pool(name="spare", fallback=["n"])]
            learner.directory.update(learner._pool.endpoints, pools)
            learner._warn_of_unserved()
            assert not caplog.text, "the endpoint was not read yet"
            await world.after(learner, 0.0)
            for _ in range(2):
                learner._warn_of_unserved()
                learner.directory.update(learner._pool.endpoints, pools)
            assert caplog.messages == [
                "fallback 'n' of pool spare: no pool has this name, and no endpoint serves such a model"
            ]
            learner.directory.update(learner._pool.endpoints, [Pool(name="spare", fallback=["k", "m"])])
            learner._warn_of_unserved()
            assert caplog.text.count("no pool has this name") == 2

    run(test)


def test_an_endpoint_that_has_left_is_forgotten() -> None:
    async def test(world: World) -> None:
        async with world.learner() as learner:
            [endpoint] = learner._pool.endpoints
            await world.after(learner, 0.0)
            learner._pool.update([])
            learner.directory.update([])
            learner.on_unknown_model(endpoint)  # a request that it still had
            assert not learner._due_at
            assert not learner._read_at
            assert not learner.directory._listings
            assert await world.after(learner, 100.0) == 0

    run(test)
