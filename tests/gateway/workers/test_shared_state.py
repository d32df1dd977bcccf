"""What the workers tell each other, over real sockets and with a clock of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from penstock.gateway.routing.endpoint import Endpoint, EndpointLoad
from penstock.gateway.routing.endpoint_discovery import ResolvedEndpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool, Scrape
from penstock.gateway.routing.pick_request import PickRequest
from penstock.gateway.routing.picker import Picker
from penstock.gateway.routing.prefix_affinity import BLOCK_ENDS
from penstock.gateway.upstream.upstream import Upstream
from penstock.gateway.workers.shared_state import SILENCE_S, SharedState
from tests.gateway.routers import router_over
from tests.gateway.workers.linked import Gateway, gateway_of, know_each_other, stream_of

URLS = ("http://a:1", "http://b:1", "http://c:1")
PREFERS_MEMORY = {"prefix": 1.0, "session": 1.0}


def in_loop(test: Callable[[Gateway], Coroutine[None, None, None]]) -> Callable[[Path], None]:
    """Runs a test in an event loop, with the workers' keeper."""

    async def run_and_close(run_dir: Path) -> None:
        async with gateway_of(run_dir) as gateway:
            await test(gateway)

    def run(tmp_path: Path) -> None:
        asyncio.run(run_and_close(tmp_path))

    return run


class Worker:
    """One worker's state, with three endpoints."""

    def __init__(
        self, gateway: Gateway, index: int, urls: tuple[str, ...] = URLS, scrape_interval_s: float = 0.5
    ) -> None:
        self.now = 100.0
        self.link, scoreboard = gateway.link(index)
        self.pool = EndpointPool(Upstream(), lambda endpoint: None)
        self.pool.update(ResolvedEndpoint(url) for url in urls)
        self.router = router_over(self.pool, Picker(PREFERS_MEMORY), lambda: self.now)
        self.state = SharedState(self.link, scoreboard, self.router, lambda: self.now, scrape_interval_s)

    def endpoint(self, url: str) -> Endpoint:
        return next(each for each in self.router.pool.endpoints if each.url == url)

    def pick(self, **fields: object) -> str:
        request = PickRequest(**fields)  # type: ignore[arg-type]
        return self.router.picker.pick(request, self.router.pool.endpoints, self.now).url


async def told(*workers: Worker, until: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not until():
            for worker in workers:
                worker.state.share()
            await asyncio.sleep(0.001)


async def both(gateway: Gateway, urls: tuple[str, ...] = URLS) -> tuple[Worker, Worker]:
    first, second = Worker(gateway, 0, urls), Worker(gateway, 1, urls)
    await know_each_other(first.link, second.link)
    return first, second


@in_loop
async def test_requests_of_all_workers_count(gateway: Gateway) -> None:
    first, second = await both(gateway)
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
    third = Worker(gateway, 2)  # it knows what was counted before
    await know_each_other(first.link, second.link, third.link)
    await told(first, second, third, until=lambda: third.endpoint(URLS[0]).in_flight == 2)
    await gateway.end(second.link)  # its requests have ended with it
    await told(first, third, until=lambda: ours.in_flight == third.endpoint(URLS[0]).in_flight == 1)


@in_loop
async def test_a_worker_that_was_killed_is_forgotten(gateway: Gateway) -> None:
    first, second = await both(gateway)
    ours = first.endpoint(URLS[0])
    second.endpoint(URLS[0]).request_sent(1, 100.0)
    await told(first, second, until=lambda: ours.in_flight == 1)
    gateway.kill(second.link)
    await told(first, until=lambda: not first.link.siblings and ours.in_flight == 0)
    ours.request_sent(1, 100.0)
    assert ours.in_flight == 1
    later = Worker(gateway, 1)  # it gets the slot of the one that died
    await know_each_other(first.link, later.link)
    later.endpoint(URLS[1]).request_sent(1, 100.0)
    await told(first, later, until=lambda: first.endpoint(URLS[1]).in_flight == 1)
    assert (ours.in_flight, later.endpoint(URLS[0]).in_flight) == (1, 1)


@in_loop
async def test_picks_and_owners_are_known_to_all(gateway: Gateway) -> None:
    first, second = await both(gateway)
    blocks = list(range(10**15, 10**15 + len(BLOCK_ENDS) - 1))
    chosen = []
    for number in range(96):  # hashes would spread them
        first.router.picker.remember(PickRequest(session=f"s{number}"), first.endpoint(URLS[0]))
        first.router.picker.remember(PickRequest(blocks=[number, *blocks]), first.endpoint(URLS[1]))
        chosen.append((URLS[0], URLS[1]))
    await told(first, second, until=lambda: not first.state._picks)
    first.router.owners.learn("resp_x", first.endpoint(URLS[2]))  # comes last
    await told(first, second, until=lambda: bool(second.router.owners.of("resp_x")))
    assert [each.url for each in second.router.owners.of("resp_x")] == [URLS[2]]
    for number, (by_session, by_prefix) in enumerate(chosen):
        assert second.pick(session=f"s{number}") == by_session
        assert second.pick(blocks=[number, *blocks]) == by_prefix


@in_loop
async def test_an_opened_breaker_is_open_everywhere(gateway: Gateway) -> None:
    first, second = await both(gateway)
    ours, theirs = first.endpoint(URLS[1]).breaker, second.endpoint(URLS[1]).breaker
    for _ in range(3):
        ours.record_unavailable(100.0, 100.0)
    assert not ours.allows(100.1)
    await told(first, second, until=lambda: not theirs.closed)
    assert (theirs.allows(100.1), theirs.opening) == (False, ours.opening)


@in_loop
async def test_a_breaker_that_one_worker_has_closed_is_closed_everywhere(gateway: Gateway) -> None:
    first, second = await both(gateway)
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
async def test_one_worker_scrapes_for_all(gateway: Gateway) -> None:
    first, second = await both(gateway)
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
async def test_scrapes_that_are_rare_are_no_silence(gateway: Gateway) -> None:
    interval_s = 2 * SILENCE_S
    first, second = (Worker(gateway, number, scrape_interval_s=interval_s) for number in range(2))
    await know_each_other(first.link, second.link)
    second.now += interval_s
    assert not second.router.pool.scrapes()
    second.now += interval_s
    assert second.router.pool.scrapes()


@in_loop
async def test_the_first_of_those_that_run_scrapes(gateway: Gateway) -> None:
    first, second = await both(gateway)
    third = Worker(gateway, 2)
    await know_each_other(first.link, second.link, third.link)
    assert [each.router.pool.scrapes() for each in (first, second, third)] == [True, False, False]
    gateway.kill(first.link)
    await know_each_other(second.link, third.link)
    assert [each.router.pool.scrapes() for each in (second, third)] == [True, False]


@in_loop
async def test_endpoints_that_come_and_go(gateway: Gateway) -> None:
    """What others have sent to one that this worker gets to know later counts at once."""
    first, _ = await both(gateway)
    later = "http://later:1"
    third = Worker(gateway, 2, (later,))
    third.endpoint(later).request_sent(7, 100.0)
    for _ in range(2):
        first.state.share()
    assert {each.in_flight for each in first.pool.endpoints} == {0}
    first.pool.update(ResolvedEndpoint(url) for url in (later, URLS[0]))
    assert (first.endpoint(later).in_flight, first.endpoint(later).in_flight_tokens) == (1, 7)
    first.pool.update([ResolvedEndpoint(URLS[0])])
    third.endpoint(later).request_ended(7)
    first.state.share()
    first.pool.update(ResolvedEndpoint(url) for url in (later, URLS[0]))
    assert first.endpoint(later).in_flight == 0


def test_nonsense_is_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @in_loop
    async def run(gateway: Gateway) -> None:
        first, second = await both(gateway)
        second.link.tell_others("state", b"nonsense")
        second.link.tell_others("unknown", b"")
        second.link.ask_keeper("budget questions", b"nonsense")
        stream_of(second.link).transport.write(b"\0\0\0\1\xc1")  # a letter that is none
        for _ in range(3):
            second.endpoint(URLS[0]).breaker.record_unavailable(100.0, 100.0)
        await told(first, second, until=lambda: not first.endpoint(URLS[0]).breaker.closed)
        assert "a letter was not understood" in caplog.text

    run(tmp_path)


@in_loop
async def test_a_thousand_endpoints(gateway: Gateway) -> None:
    urls = tuple(f"http://server{number}:8000" for number in range(1000))
    first, second = await both(gateway, urls)
    for url in urls:
        second.endpoint(url).request_sent(1, 100.0)
    first.state.share()
    assert all(first.endpoint(url).in_flight for url in urls)
