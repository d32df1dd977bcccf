"""Envoy's access log reports to one worker what another one has picked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.gateway.extproc.log_forwarding import LogForwarding
from penstock.gateway.extproc.messages import MessagePart, ProcessingRequest
from penstock.gateway.routing.endpoint import EndpointLoad
from penstock.gateway.routing.endpoint_capacity import EndpointCapacity
from tests.gateway.extproc.test_processor_stream import World, picked, picked_metadata
from tests.gateway.workers.linked import Gateway, gateway_of, know_each_other, stream_of


class Worker:
    def __init__(self, gateway: Gateway, number: int) -> None:
        self.world = World()
        self.link, _ = gateway.link(number)
        self.forwarding = LogForwarding(self.link, self.world.requests)


@contextlib.asynccontextmanager
async def workers(run_dir: Path, count: int = 2) -> AsyncIterator[tuple[Gateway, list[Worker]]]:
    async with gateway_of(run_dir) as gateway:
        made = [Worker(gateway, number) for number in range(count)]
        await know_each_other(*(each.link for each in made))
        yield gateway, made


async def sent(*workers: Worker, until: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not until():
            for worker in workers:
                worker.forwarding.send()
            await asyncio.sleep(0.001)


def test_entries_reach_the_worker_that_picked(tmp_path: Path) -> None:
    async def check() -> None:
        async with workers(tmp_path) as (gateway, [picking, logging]):
            here, there = picking.world, logging.world
            assert here.requests.process != there.requests.process
            requests = 200
            first, *others = [picked_metadata(here) for _ in range(requests)]
            there.requests.open_log_streams = 1
            assert not here.requests.is_busy
            await sent(picking, logging, until=lambda: here.requests.is_busy)
            for metadata in [others[0], *others]:  # one comes twice
                there.logged(metadata={**metadata, "other": {"large": ["x" * 100_000]}})
            there.logged(metadata=first, status=500)
            ends = {"ok_without_usage": requests - 1, "model_server_error": 1}
            await sent(picking, logging, until=lambda: here.counts() == ends)
            assert there.counts() == {}
            assert not here.requests.is_busy
            await gateway.end(picking.link)
            await know_each_other(logging.link)
            # It has gone: its requests are counted here, like those of another gateway.
            there.logged(metadata=first)
            assert sum(there.counts().values()) == 1

    asyncio.run(check())


@pytest.mark.parametrize("under_way", [True, False])
def test_entries_for_a_worker_that_died_are_counted(tmp_path: Path, under_way: bool) -> None:
    """Those that wait for it, and those that did not reach it."""

    async def check() -> None:
        async with workers(tmp_path, 3) as (gateway, [dying, logging, third]):
            stream_of(logging.link).transport.pause_reading()
            logging.world.logged(metadata=picked_metadata(dying.world))
            gateway.kill(dying.link)
            await sent(third, until=lambda: len(third.link.siblings) == 1)
            if under_way:
                logging.forwarding.send()
            stream_of(logging.link).transport.resume_reading()
            await sent(third, until=lambda: bool(logging.world.counts()))
            assert dying.link.own not in logging.link.siblings
            assert sum(logging.world.counts().values()) == 1

    asyncio.run(check())


def test_open_streams_are_told_again_when_there_was_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with workers(tmp_path) as (_, [picking, logging]):
            logging.world.requests.open_log_streams = 1
            with monkeypatch.context() as patch:
                patch.setattr(logging.link, "tell_others", lambda *_: False)
                logging.forwarding.send()
            await sent(picking, logging, until=lambda: picking.world.requests.log_streams_elsewhere == 1)

    asyncio.run(check())


def test_entries_wait_while_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with workers(tmp_path) as (_, [picking, logging]):
            logging.world.logged(metadata=picked_metadata(picking.world))
            with monkeypatch.context() as patch:
                patch.setattr(logging.link, "tell_others", lambda *_: False)
                logging.forwarding.send()
            await sent(picking, logging, until=lambda: bool(picking.world.counts()))

    asyncio.run(check())


def test_what_a_killed_worker_was_told_holds_no_places(tmp_path: Path) -> None:
    """Whether requests have ended of which it may have had the entries is not known. If an entry comes
    nevertheless it counts, and frees nothing twice. A reply that is shown to the gateway is not in doubt."""

    async def check() -> None:
        async with workers(tmp_path) as (gateway, [picking, logging]):
            here, endpoint = picking.world, picking.world.endpoints[0]
            logging.world.requests.open_log_streams = 1
            await sent(picking, logging, until=lambda: here.requests.log_streams_elsewhere == 1)
            first, _ = picked_metadata(here), picked_metadata(here)
            shown = picked(here)
            endpoint.scrape_succeeded(EndpointLoad(running=2), here.now)
            assert endpoint.in_flight == here.metrics.running == 3
            gateway.kill(logging.link)
            await know_each_other(picking.link)
            assert endpoint.in_flight == endpoint.own_in_flight == here.metrics.running == 1
            assert EndpointCapacity(5).free(endpoint, here.now) == 5 - 2, "as it has reported"
            here.logged(metadata=first)
            assert here.counts() == {"ok_without_usage": 1}
            assert endpoint.in_flight == 1
            shown.receive(ProcessingRequest(MessagePart.RESPONSE_HEADERS, [(b":status", b"200")], end=True))
            shown.closed()
            assert endpoint.in_flight == endpoint.in_flight_tokens == 0
            picking.forwarding.close()
            assert not here.requests.is_busy

    asyncio.run(check())


def test_a_worker_that_ends_has_forwarded_all(tmp_path: Path) -> None:
    async def check() -> None:
        async with workers(tmp_path) as (gateway, [picking, logging]):
            here = picking.world
            logging.world.requests.open_log_streams = 1
            await sent(picking, logging, until=lambda: here.requests.log_streams_elsewhere == 1)
            first, _ = picked_metadata(here), picked_metadata(here)
            logging.world.logged(metadata=first)
            logging.forwarding.close()
            await gateway.end(logging.link)
            await sent(picking, until=lambda: not picking.link.siblings and bool(here.counts()))
            assert here.endpoints[0].in_flight == 1

    asyncio.run(check())
