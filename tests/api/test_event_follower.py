"""Clients that follow a background response: slow ones, those that leave, and a store that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.api.api_request import ApiRequest
from penstock.api.event_follower import follow
from penstock.http.errors import ApiError
from penstock.http.sink import Listener
from penstock.store.response_store import ResponseStore
from tests.api.requests import api_request
from tests.generation.replying import MemorySink
from tests.http.requests import http_request
from tests.store.stores import entry, opened

EVENT = b'event: e\ndata: {"sequence_number":0}\n\n'


class Client(MemorySink):
    reads = True
    """Whether the client reads from the start."""

    def listen(self, listener: Listener) -> None:
        super().listen(listener)
        if not self.reads:
            listener.on_pause()


def request_of(sink: MemorySink) -> ApiRequest:
    return api_request(http_request(sink=cast(Any, sink)))


class Follower:
    """A client of a response of which one event is stored."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self.sink = Client()
        self.id = ""

    async def begin(self) -> asyncio.Task[None]:
        response = entry(self.store, status="in_progress")
        self.id = response.id
        await self.store.put(response)
        await self.store.append(self.id, 0, 1, EVENT)
        running = asyncio.ensure_future(follow(request_of(self.sink), self.store, self.id, "", -1, 0.0))
        while not self.sink.starts:  # noqa: ASYNC110 - the first event
            await asyncio.sleep(0.001)
        return running

    async def finish(self) -> None:
        assert await self.store.finish(self.id, "completed", b"{}", 1, 1, EVENT)


def with_follower(directory: Path, work: Callable[[Follower], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        with opened(directory) as store:
            await work(Follower(store))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_it_ends_with_the_response(tmp_path: Path) -> None:
    async def work(follower: Follower) -> None:
        running = await follower.begin()
        await follower.finish()
        await running
        assert (follower.sink.data, follower.sink.ended) == (EVENT * 2, "finish")

    with_follower(tmp_path, work)


def test_it_ends_when_the_response_is_deleted(tmp_path: Path) -> None:
    async def work(follower: Follower) -> None:
        running = await follower.begin()
        await follower.store.delete(follower.id, "")
        await running
        assert (follower.sink.data, follower.sink.ended) == (EVENT, "finish")

    with_follower(tmp_path, work)


def test_nothing_is_written_while_the_client_does_not_read(tmp_path: Path) -> None:
    async def work(follower: Follower) -> None:
        follower.sink.reads = False
        running = await follower.begin()
        version = follower.store.version
        await follower.finish()
        await follower.store.changed_since(version, 10.0)
        for _ in range(3):  # time in which it would read the event, and write it
            await follower.store.running()
        assert follower.sink.data == EVENT
        assert follower.sink.listener is not None
        follower.sink.listener.on_resume()
        await running
        assert follower.sink.data == EVENT * 2

    with_follower(tmp_path, work)


def test_a_client_that_never_reads_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.event_follower.NOT_READING_S", 0.01)

    async def work(follower: Follower) -> None:
        follower.sink.reads = False
        await (await follower.begin())
        assert follower.sink.ended == "cut"

    with_follower(tmp_path, work)


def test_a_client_that_leaves_is_not_written_to(tmp_path: Path) -> None:
    async def work(follower: Follower) -> None:
        running = await follower.begin()
        assert follower.sink.listener is not None
        follower.sink.listener.on_disconnect()
        await follower.finish()
        await running
        assert (follower.sink.data, follower.sink.ended) == (EVENT, "")

    with_follower(tmp_path, work)


def test_a_failing_store_cuts_a_reply_that_has_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.event_follower.LOOK_S", 0.01)

    async def work(follower: Follower) -> None:
        running = await follower.begin()
        follower.store.close()
        await running
        assert follower.sink.ended == "cut"
        unbegun = request_of(MemorySink())
        with pytest.raises(ApiError):
            await follow(unbegun, follower.store, follower.id, "", -1, 0.0)

    with_follower(tmp_path, work)
