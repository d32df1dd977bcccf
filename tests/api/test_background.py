"""Responses in the background: their events are stored, whatever becomes of clients, store and engine."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from penstock.api.background import BackgroundResponses, BackgroundRun
from penstock.generation.replies.streamed import StreamedReply
from penstock.http.errors import ApiError
from penstock.metrics.store_metrics import StoreMetrics
from penstock.store.response_store import ResponseStore
from penstock.store.stored_response import StoredResponse
from penstock.streaming.stream import StreamError
from penstock.wire.frames import FinishReason
from tests.dialects.test_seam import NumberedReply
from tests.generation.planning import body, planners, tiny_tokenizer
from tests.generation.replying import Desk, tables_of
from tests.store.stores import entry, opened

PLANNER = planners()


class BackgroundReply(NumberedReply):
    """Events from number 0 on; the last one has the response."""

    def __init__(self, id: str) -> None:
        super().__init__(id, "")
        self._number = -1

    def _last(self, name: str, status: str) -> bytes:
        response = {"id": self.id, "status": status, "output": [{"id": "m", "text": self._text.decode()}]}
        return self._event(name, response=response)

    def end(self, usage: Any) -> bytes:
        return self._last("response.completed", "completed")

    def error(self, error: StreamError) -> bytes:
        return self._last("response.failed", "failed")


class Bench:
    """A store, replies without an engine, and the background responses of an API server."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self.desk = Desk(tables_of(tiny_tokenizer().raw))
        self.metrics = StoreMetrics()
        self.background = BackgroundResponses(store, self.metrics)
        self.ends = 0

    async def begin(self) -> BackgroundRun:
        stored = entry(self.store, status="in_progress")
        format = BackgroundReply(stored.id)
        run = await self.background.begin(stored, format, self._on_end)
        plan = PLANNER.completion(body(stream=True, max_tokens=1000))
        reply = StreamedReply(self.desk.context, plan, format, 0.0, sink=run, on_end=run.on_reply_end)
        run.listen(reply)
        self.desk.open(reply)
        return run

    def _on_end(self) -> None:
        self.ends += 1

    def deliver(self, handle: int, text: str, finish: FinishReason = FinishReason.NONE) -> None:
        tokens = tiny_tokenizer().encode(text, False)
        for token in tokens[:-1]:
            self.desk.deliver(self.desk.rows(handle, [[token]]))
        self.desk.deliver(self.desk.rows(handle, [[tokens[-1]]], finish))

    async def stored(self, run: BackgroundRun) -> tuple[StoredResponse | None, list[Any]]:
        """The entry and its events."""
        page = await self.store.page(run.entry.id, "", -1, 1 << 20)
        found = await self.store.get(run.entry.id, "")
        lines = [] if page is None else page.data.decode().split("\n\n")[:-1]
        return found, [json.loads(line.partition("data: ")[2]) for line in lines]


def with_bench(directory: Path, work: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        with opened(directory) as store:
            await work(Bench(store))

    asyncio.run(asyncio.wait_for(run(), 60))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the end of a commit
        await asyncio.sleep(0.001)


def test_events_and_end_are_stored(tmp_path: Path) -> None:
    async def work(bench: Bench) -> None:
        run = await bench.begin()
        assert bench.metrics.background == 1
        bench.deliver(0, "def main():")
        await until(lambda: not run._pending)
        found, events = await bench.stored(run)
        assert found is not None
        assert found.status == "in_progress"
        assert [event["type"] for event in events[:2]] == ["created", "in_progress"]
        bench.deliver(0, " pass", FinishReason.LENGTH)
        await until(lambda: bench.ends == 1)
        found, events = await bench.stored(run)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert "".join(event.get("text", "") for event in events[:-2]) == "def main(): pass"
        assert found is not None
        assert (found.status, json.loads(found.body)) == ("completed", events[-1]["response"])
        assert (bench.metrics.background, bench.desk.outcomes) == (0, ["length"])
        found_items = await bench.store.items(["m"], "")
        assert json.loads(found_items["m"]) == {"id": "m", "text": "def main(): pass"}

    with_bench(tmp_path, work)


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_it_stops_when_it_is_cancelled_or_deleted_elsewhere(tmp_path: Path, how: str) -> None:
    async def work(bench: Bench) -> None:
        run = await bench.begin()
        bench.deliver(0, "def main():")
        with opened(tmp_path) as other:
            if how == "cancel":
                await other.cancel(run.entry.id, "")
            else:
                assert await other.delete(run.entry.id, "")
            await until(lambda: bench.ends == 1)
        assert len(bench.desk.engine_client.aborted) == 1
        found, _ = await bench.stored(run)
        assert (found and found.status) == ("cancelled" if how == "cancel" else None)
        assert await bench.store.running() == set()
        entry = await bench.store.entry(run.entry.id, "")
        assert entry is None or entry.owner is None

    with_bench(tmp_path, work)


def test_a_failure_is_stored(tmp_path: Path) -> None:
    async def work(bench: Bench) -> None:
        runs = [await bench.begin() for _ in range(2)]
        bench.deliver(1, "def main():")
        for handle in (0, 1):
            bench.desk.streams.fail(0, handle, StreamError(503, "engine_died", "The engine is gone."))
        await until(lambda: bench.ends == 2)
        for run in runs:
            found, events = await bench.stored(run)
            assert found is not None
            assert found.status == "failed"
            assert events[-1]["type"] == "response.failed"
        assert bench.metrics.background == 0

    with_bench(tmp_path, work)


def test_it_ends_once_the_store_works_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.background.RETRY_S", 0.01)

    async def work(bench: Bench) -> None:
        run = await bench.begin()
        await bench.store._read(lambda database: database._run("PRAGMA query_only=1"))
        bench.deliver(0, "def main():")
        await until(lambda: bench.store._metrics.failures > 3)
        assert len(bench.desk.engine_client.aborted) == 1
        await bench.store._read(lambda database: database._run("PRAGMA query_only=0"))
        await until(lambda: bench.ends == 1)
        found, events = await bench.stored(run)
        assert found is not None
        assert found.status == "failed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))

    with_bench(tmp_path, work)


def test_they_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.background.MAX_RUNS", 1)

    async def work(bench: Bench) -> None:
        run = await bench.begin()
        with pytest.raises(ApiError, match="1 responses run in the background") as refused:
            await bench.begin()
        assert refused.value.status == 429
        run.abandon()
        await until(lambda: bench.metrics.background == 0)
        assert await bench.store.get(run.entry.id, "") is None

    with_bench(tmp_path, work)


def test_one_that_no_engine_takes_ends_though_the_store_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.response_store._log_failure", lambda *args: None)  # records keep them

    async def work(bench: Bench) -> None:
        unseen: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
        run = await bench.begin()
        await bench.store._read(lambda database: database._run("PRAGMA query_only=1"))
        run.abandon()
        await until(lambda: bench.ends == 1 and bench.store._metrics.failures == 1)
        for _ in range(2):  # the thread forgets the work before
            await bench.store._read(lambda database: database._run("PRAGMA query_only=0"))
        gc.collect()
        assert not unseen

    with_bench(tmp_path, work)


def test_events_of_one_response_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.api.background.MAX_EVENT_BYTES", 1000)

    async def work(bench: Bench) -> None:
        run = await bench.begin()
        tokens = tiny_tokenizer().encode("x", False)
        while not bench.ends:
            if bench.desk.streams:
                bench.desk.deliver(bench.desk.rows(0, [tokens]))
            await asyncio.sleep(0)
        found, _ = await bench.stored(run)
        assert found is not None
        assert found.status == "failed"

    with_bench(tmp_path, work)
