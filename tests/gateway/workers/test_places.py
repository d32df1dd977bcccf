"""The workers of a gateway share the places of --max-requests-per-endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from penstock.gateway.admission.flow_control import MAX_YIELD_S, FlowControl, FlowLimits, FlowRequest
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_capacity import CandidateCapacity, EndpointCapacity
from penstock.gateway.workers import scoreboard
from tests.gateway.behaviours import good
from tests.gateway.processes import WAIT_S, Call, Upstream, eventually, gateway
from tests.gateway.workers.linked import Gateway, gateway_of, know_each_other

WORKERS, PLACES, CLIENTS = 3, 4, 24


class Peak:
    """Counts the requests that a server has at a time, while ``clients`` come at once."""

    def __init__(self) -> None:
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()
        self.enough = threading.Event()

    def __call__(self, call: Call) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self.enough.wait(0.15)
        with self._lock:
            self._now -= 1
        good(call)


def test_a_burst_at_all_workers_fills_a_server_to_its_limit() -> None:
    peak, barrier = Peak(), threading.Barrier(CLIENTS)
    options = (
        *("--workers", str(WORKERS), "--flow-control", "--max-requests-per-endpoint", str(PLACES)),
        *("--access-log", "none"),
    )

    def ask(client: httpx.Client) -> int:
        barrier.wait()
        return client.post("/v1/completions", json={"model": "m", "prompt": "p"}).status_code

    with (
        Upstream(peak) as server,
        gateway(server, options=options) as front,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        clients = [httpx.Client(base_url=front.url, timeout=WAIT_S, verify=False) for _ in range(CLIENTS)]
        for client in clients:  # each has a connection
            assert client.get("/health").status_code == 200
        assert set(pool.map(ask, clients)) == {200}
        for client in clients:
            client.close()
    assert PLACES <= peak.most <= PLACES + WORKERS - 1, "those that decide in the same moment"


def test_a_killed_worker_s_requests_hold_no_places() -> None:
    held = threading.Event()

    def first_waits(call: Call) -> None:
        if len(server.calls) == 1:
            held.set()
            call.wait_until_gone()
        else:
            good(call)

    options = ("--workers", "2", "--flow-control", "--max-requests-per-endpoint", "1")
    with (
        Upstream(first_waits) as server,
        gateway(server, options=options) as front,
        ThreadPoolExecutor(2) as pool,
        httpx.Client(base_url=front.url, timeout=WAIT_S, verify=False) as one,
        httpx.Client(base_url=front.url, timeout=WAIT_S, verify=False) as other,
    ):
        for client in (one, other):  # each worker has one of them
            assert client.get("/health").status_code == 200
        body = {"model": "m", "prompt": "p"}
        broken = pool.submit(one.post, "/v1/completions", json=body)
        assert held.wait(WAIT_S)
        waiting = pool.submit(other.post, "/v1/completions", json=body)
        eventually(lambda: 'queued_requests{priority="0"} 1' in front.client.get("/metrics").text)
        peer = server.calls[0].connection.getpeername()[1]
        [victim] = [
            worker
            for worker in front.workers
            if any(each.laddr and each.laddr.port == peer for each in worker.net_connections("tcp"))
        ]
        victim.kill()
        assert isinstance(broken.exception(), httpx.RemoteProtocolError | httpx.ReadError)
        assert waiting.result().status_code == 200


class Worker:
    """One worker's queue, before a server that has one place."""

    def __init__(self, gateway: Gateway, number: int, clock: list[float]) -> None:
        self.link, self.shared = gateway.link(number)
        self.endpoint = Endpoint("http://a")
        self.shared.follow([self.endpoint])
        self._places = EndpointCapacity(1, scraping=False, elsewhere=self.shared.in_flight_elsewhere)
        self._clock = clock
        self.flow = FlowControl(FlowLimits(), lambda: clock[0], self.shared)
        self.shared.on_wake = self.flow.fill_places

    async def run(self, priority: int) -> FlowRequest:
        request = FlowRequest("f", priority=priority)
        places = CandidateCapacity(self._places, lambda: [self.endpoint])
        await self.flow.enter(request, (None, ("m", ("pool",))), places.have_free)
        self.flow.sent(request)
        self.endpoint.request_sent(1, self._clock[0])
        return request

    async def start(self, priority: int = 0) -> asyncio.Task[FlowRequest]:
        task = asyncio.ensure_future(self.run(priority))
        self._clock[0] += 0.001
        await asyncio.sleep(0)
        return task

    def end(self, task: asyncio.Task[FlowRequest]) -> None:
        self._clock[0] += 0.001
        self.endpoint.request_ended(1)
        self.flow.ended(task.result(), None)


@contextlib.asynccontextmanager
async def two(run_dir: Path, clock: list[float]) -> AsyncIterator[tuple[Gateway, Worker, Worker]]:
    async with gateway_of(run_dir) as made:
        first, second = (Worker(made, number, clock) for number in range(2))
        await know_each_other(first.link, second.link)
        try:
            yield made, first, second
        finally:
            for each in (first, second):
                each.flow.stop()


async def is_done(task: asyncio.Task[FlowRequest]) -> bool:
    done, _ = await asyncio.wait((task,), timeout=0.01)
    return bool(done)


def test_a_place_goes_to_the_request_that_is_first_of_all_workers(tmp_path: Path) -> None:
    async def run() -> None:
        async with two(tmp_path, [100.0]) as (_, here, there):
            running = await here.start()
            assert running.done()
            older, newer, urgent = await there.start(), await here.start(), await there.start(priority=1)
            assert not any(each.done() for each in (older, newer, urgent))
            for worker, ends, follows in (
                (here, running, urgent),
                (there, urgent, older),
                (there, older, newer),
            ):
                worker.end(ends)
                await asyncio.wait_for(follows, 60)
                assert here.endpoint.own_in_flight + there.endpoint.own_in_flight == 1
            assert here.shared.in_flight_elsewhere(here.endpoint) == 0

    asyncio.run(run())


def test_a_place_that_another_worker_leaves_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]

    async def run() -> None:
        async with two(tmp_path, clock) as (_, here, there):
            running = await here.start()
            older, newer = await there.start(), await here.start()
            monkeypatch.setattr(there.flow, "fill_places", lambda: 0)  # it hangs
            there.shared.on_wake = lambda: None
            here.end(running)
            assert not await is_done(newer)
            clock[0] += 2 * MAX_YIELD_S
            await asyncio.wait_for(newer, 60)
            assert not older.done()

    asyncio.run(run())


def test_figures_of_a_killed_worker_are_forgotten(tmp_path: Path) -> None:
    clock = [100.0]

    async def run() -> None:
        async with two(tmp_path, clock) as (made, here, there):
            await there.start()
            assert here.shared.in_flight_elsewhere(here.endpoint) == 1
            waiting = await here.start()
            made.kill(there.link)
            clock[0] += 1.0
            await asyncio.wait_for(waiting, 60)
            assert here.shared.first(1) == here.shared.promised(1) == 0
            assert not here.shared.are_waiting

    asyncio.run(run())


def test_entries_that_count_nothing_are_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoreboard, "MAX_ENTRIES", 4)

    async def run() -> None:
        async with two(tmp_path, [100.0]) as (_, here, there):
            for key in range(1, 100):
                here.shared.publish(key, key, 0)
                assert there.shared.promised(key) == key
                here.shared.publish(key, 0, 0)
            for key in range(1, 7):
                here.shared.publish(key, 1, key)
            assert [there.shared.promised(key) for key in range(1, 7)] == [1, 1, 1, 1, 0, 0]
            assert [there.shared.first(key) for key in range(1, 7)] == [1, 2, 3, 4, 0, 0]
            assert there.shared.are_waiting
            here.endpoint.request_sent(1, 0.0)
            assert there.shared.in_flight_elsewhere(there.endpoint) == 0, "there was no room for it"
            here.endpoint.request_ended(1)
            here.shared.publish(1, 0, 0)
            here.endpoint.request_sent(1, 0.0)
            assert there.shared.in_flight_elsewhere(there.endpoint) == 1

    asyncio.run(run())


def test_what_has_changed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a random history of two workers, one of which is replaced now and then."""
    monkeypatch.setattr(scoreboard, "MAX_ENTRIES", 8)
    chance = random.Random(1)

    async def run() -> None:
        async with gateway_of(tmp_path) as made:
            _, reader = made.link(0)
            writers = [made.link(number) for number in (1, 2)]
            counts: list[dict[int, tuple[int, int, int]]] = [{}, {}]
            known: dict[int, tuple[int, int, int]] = {}
            for step in range(2000):
                which = chance.randrange(2)
                if not chance.randrange(50):
                    made.kill(writers[which][0])
                    writers[which], counts[which] = made.link(which + 1, step), {}
                key = chance.randrange(1, 7)
                counts[which][key] = chance.randrange(3), chance.randrange(3), chance.randrange(9)
                writers[which][1]._count(key, *counts[which][key])
                if not counts[which][key][0]:  # of one without requests nothing need be shown
                    counts[which][key] = (0, 0, 0)
                    writers[which][1]._count(key, 0, 0, 0)
                if not chance.randrange(3):
                    for changed in reader.changed_keys():
                        figures = [reader._sum(changed, column) for column in (1, 2, 3)]
                        known[changed] = (figures[0], figures[1], figures[2])
                    for each in range(1, 7):
                        sums = [
                            sum(found)
                            for found in zip(*(c.get(each, (0, 0, 0)) for c in counts), strict=True)
                        ]
                        assert list(known.get(each, (0, 0, 0))) == sums

    asyncio.run(run())


def test_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has its own; one that is free is empty, and is used again."""
    monkeypatch.setattr(scoreboard, "MAX_SLOTS", 3)

    async def run() -> None:
        async with gateway_of(tmp_path) as made:
            workers = [made.link(number) for number in range(3)]
            with pytest.raises(OSError, match="3 workers run already"):
                made.board.take_slot()
            for number, (_, shared) in enumerate(workers):
                shared.publish(7, 10**number, 1)
            assert [shared.promised(7) for _, shared in workers] == [110, 101, 11]
            made.kill(workers[1][0])
            assert [workers[number][1].promised(7) for number in (0, 2)] == [100, 1]
            _, later = made.link(1, 1)
            assert later.promised(7) == 101
            later.publish(8, 5, 0)
            assert [workers[0][1].promised(key) for key in (7, 8)] == [100, 5]

    asyncio.run(run())
