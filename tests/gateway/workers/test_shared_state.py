"""What the workers tell each other, over real sockets and with a clock of the test."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool, Scrape
from penstock.gateway.routing.pick_request import PickRequest
from penstock.gateway.routing.picker import Picker
from penstock.gateway.routing.prefix_affinity import BLOCK_ENDS
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.gateway.workers.exchange import Exchange, WorkerName
from penstock.gateway.workers.shared_state import MAX_PICKS, REPEAT_S, SILENCE_S, SharedState
from tests.gateway.routers import router_over

URLS = ("http://a:1", "http://b:1", "http://c:1")
PREFERS_MEMORY = {"prefix": 1.0, "session": 1.0}

OPEN: list[Worker] = []


def in_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Runs a test in an event loop, and closes its workers."""

    async def run_and_close(**fixtures: object) -> None:
        try:
            await test(**fixtures)
        finally:
            while OPEN:
                OPEN.pop().exchange.close()

    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        asyncio.run(run_and_close(**fixtures))

    return run


class Worker:
    """One worker's state, with three endpoints."""

    def __init__(
        self, run_dir: Path, index: int, urls: tuple[str, ...] = URLS, scrape_interval_s: float = 0.5
    ) -> None:
        self.now = 100.0
        self.exchange = Exchange(str(run_dir), WorkerName(index, 0))
        pool = EndpointPool(Timeouts(), lambda endpoint: None)
        pool.update(ResolvedEndpoint(url) for url in urls)
        self.router = router_over(pool, Picker(PREFERS_MEMORY), lambda: self.now)
        self.state = SharedState(self.exchange, self.router, lambda: self.now, scrape_interval_s)
        self.exchange.open()
        OPEN.append(self)

    def endpoint(self, url: str) -> Endpoint:
        return next(each for each in self.router.pool.endpoints if each.url == url)

    def pick(self, **fields: object) -> str:
        request = PickRequest(**fields)  # type: ignore[arg-type]
        return self.router.picker.pick(request, self.router.pool.endpoints, self.now).url


async def told(*workers: Worker, until: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not until():
            for worker in workers:
                worker.exchange.look()
                worker.state.share()
            await asyncio.sleep(0)


async def both(run_dir: Path, urls: tuple[str, ...] = URLS) -> tuple[Worker, Worker]:
    first, second = Worker(run_dir, 0, urls), Worker(run_dir, 1, urls)
    await told(first, second, until=lambda: bool(first.exchange.siblings and second.exchange.siblings))
    return first, second


@in_loop
async def test_requests_of_all_workers_count(tmp_path: Path) -> None:
    first, second = await both(tmp_path)
    ours, theirs = first.endpoint(URLS[0]), second.endpoint(URLS[0])
    ours.request_sent(10, 100.0)
    theirs.request_sent(20, 100.0)
    theirs.request_sent(30, 100.0)
    await told(first, second, until=lambda: ours.in_flight == theirs.in_flight == 3)
    assert (ours.own_in_flight, theirs.own_in_flight) == (1, 2)
    assert ours.in_flight_tokens == theirs.in_flight_tokens == 60
    assert ours.sent_since_scrape == 3
    theirs.request_ended(20)
    await told(first, second, until=lambda: ours.in_flight == 2)
    third = Worker(tmp_path, 2)  # it is told what was told before
    await told(first, second, third, until=lambda: third.endpoint(URLS[0]).in_flight == 2)
    OPEN.remove(second)
    second.exchange.close()  # its requests have ended with it
    await told(first, third, until=lambda: ours.in_flight == third.endpoint(URLS[0]).in_flight == 1)


@in_loop
async def test_a_worker_that_was_killed_is_forgotten(tmp_path: Path) -> None:
    first, second = await both(tmp_path)
    ours = first.endpoint(URLS[0])
    second.endpoint(URLS[0]).request_sent(1, 100.0)
    await told(first, second, until=lambda: ours.in_flight == 1)
    OPEN.remove(second)
    asyncio.get_running_loop().remove_reader(second.exchange._socket.fileno())
    second.exchange._socket.close()  # its path stays
    ours.request_sent(1, 100.0)
    await told(first, until=lambda: not first.exchange.siblings)
    assert ours.in_flight == 1
    assert os.listdir(tmp_path) == ["worker-0.0"]


@in_loop
async def test_picks_and_owners_are_known_to_all(tmp_path: Path) -> None:
    first, second = await both(tmp_path)
    blocks = list(range(10**15, 10**15 + len(BLOCK_ENDS) - 1))
    chosen = [
        (first.pick(session=f"s{number}"), first.pick(blocks=[number, *blocks]))
        for number in range(3 * MAX_PICKS)
    ]
    await told(first, second, until=lambda: not first.state._picks)
    first.router.owners.learn("resp_x", first.endpoint(URLS[2]))  # comes last
    await told(first, second, until=lambda: bool(second.router.owners.of("resp_x")))
    assert [each.url for each in second.router.owners.of("resp_x")] == [URLS[2]]
    for number, (by_session, by_prefix) in enumerate(chosen):
        assert second.pick(session=f"s{number}") == by_session
        assert second.pick(blocks=[number, *blocks]) == by_prefix


@in_loop
async def test_an_opened_breaker_is_open_everywhere(tmp_path: Path) -> None:
    first, second = await both(tmp_path)
    ours, theirs = first.endpoint(URLS[1]).breaker, second.endpoint(URLS[1]).breaker
    for _ in range(3):
        ours.record_unavailable(100.0, 100.0)
    assert not ours.allows(100.1)
    await told(first, second, until=lambda: not theirs.closed)
    assert (theirs.allows(100.1), theirs.opening) == (False, ours.opening)


@in_loop
async def test_a_breaker_that_one_worker_has_closed_is_closed_everywhere(tmp_path: Path) -> None:
    first, second = await both(tmp_path)
    ours, theirs = first.endpoint(URLS[1]).breaker, second.endpoint(URLS[1]).breaker
    again, still = first.endpoint(URLS[2]).breaker, second.endpoint(URLS[2]).breaker
    for breaker in (ours, again):
        for _ in range(3):
            breaker.record_unavailable(100.0, 100.0)
    await told(first, second, until=lambda: not theirs.closed and not still.closed)
    again.record_unavailable(102.5, 102.5)  # its own probe has failed, after the other one's was sent
    still.record_success(103.0, 102.0)
    theirs.record_success(103.0, 102.0)
    assert not ours.closed
    await told(first, second, until=lambda: ours.closed)
    assert still.closed
    assert not again.closed
    for _ in range(3):
        ours.record_unavailable(104.0, 104.0)
    await told(first, second, until=lambda: not theirs.closed)


@in_loop
async def test_one_worker_scrapes_for_all(tmp_path: Path) -> None:
    first, second = await both(tmp_path)
    pools = first.router.pool, second.router.pool
    assert [pool.scrapes() for pool in pools] == [True, False]
    load = EndpointLoad(3, 4, 0.5, frozenset({"adapter"}), 2)
    pools[0].on_scrape(first.endpoint(URLS[0]), Scrape("load", 100.5, load))
    theirs = second.endpoint(URLS[0])
    theirs.request_sent(1, 100.0)
    await told(first, second, until=lambda: theirs.load == load)
    assert (theirs.scraped_at, theirs.sent_since_scrape, theirs.in_flight) == (100.5, 0, 1)
    for _ in range(2):
        pools[0].on_scrape(first.endpoint(URLS[1]), Scrape("no connection", 101.0))
    away = second.endpoint(URLS[1])
    await told(first, second, until=lambda: away.scrape_failures == 2)
    assert not away.is_ready(101.0)
    second.now += SILENCE_S + 0.6  # the first one hangs
    assert second.router.pool.scrapes()


@in_loop
async def test_scrapes_that_are_rare_are_no_silence(tmp_path: Path) -> None:
    interval_s = 2 * SILENCE_S
    first, second = (Worker(tmp_path, number, scrape_interval_s=interval_s) for number in range(2))
    await told(first, second, until=lambda: bool(second.exchange.siblings))
    second.now += interval_s
    assert not second.router.pool.scrapes()
    second.now += interval_s
    assert second.router.pool.scrapes()


@in_loop
async def test_endpoints_that_have_left_are_forgotten(tmp_path: Path) -> None:
    first, second = await both(tmp_path)
    left = "http://left:1"
    third = Worker(tmp_path, 2, (left,))
    elsewhere = first.state._elsewhere
    await told(first, second, third, until=lambda: left in elsewhere.get(third.exchange.own, {}))
    first.now += REPEAT_S
    first.state.share()
    assert {url for counts in elsewhere.values() for url in counts} == set(URLS)


@in_loop
async def test_nonsense_is_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = await both(tmp_path)
    second.exchange.send("state", b"nonsense")
    second.exchange.send("unknown", b"")
    second.exchange._socket.sendto(b"\xc1", str(tmp_path / "worker-0.0"))
    second.endpoint(URLS[0]).request_sent(1, 100.0)
    await told(first, second, until=lambda: first.endpoint(URLS[0]).in_flight == 1)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2


@in_loop
async def test_a_thousand_endpoints(tmp_path: Path) -> None:
    urls = tuple(f"http://server{number}:8000" for number in range(1000))
    first, second = await both(tmp_path, urls)
    for url in urls:
        second.endpoint(url).request_sent(1, 100.0)
    await told(first, second, until=lambda: all(first.endpoint(url).in_flight for url in urls[::50]))
