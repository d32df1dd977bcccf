"""Envoy's access log reports to one worker what another one has picked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.gateway.extproc.log_forwarding import MAX_AT_ONCE, LogForwarding
from penstock.gateway.extproc.messages import MessagePart, ProcessingRequest
from penstock.gateway.routing.endpoint import EndpointLoad
from penstock.gateway.routing.endpoint_places import EndpointPlaces
from penstock.gateway.workers.exchange import Exchange, WorkerName
from tests.gateway.extproc.test_processor_stream import World, picked, picked_metadata


class Worker:
    def __init__(self, run_dir: Path, number: int) -> None:
        self.world = World()
        self.exchange = Exchange(str(run_dir), WorkerName(number, 0))
        self.forwarding = LogForwarding(self.exchange, self.world.requests)
        self.exchange.open()


def kill(exchange: Exchange) -> None:
    """Its path stays."""
    asyncio.get_running_loop().remove_reader(exchange._socket.fileno())
    exchange._socket.close()


async def sent(*workers: Worker, until: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not until():
            for worker in workers:
                worker.exchange.look()
                worker.forwarding.send()
            await asyncio.sleep(0)


def test_entries_reach_the_worker_that_picked(tmp_path: Path) -> None:
    async def check() -> None:
        picking, logging = Worker(tmp_path, 0), Worker(tmp_path, 1)
        here, there = picking.world, logging.world
        try:
            assert here.requests.process != there.requests.process
            await sent(picking, logging, until=lambda: bool(logging.exchange.siblings))
            requests = 3 * MAX_AT_ONCE
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
        finally:
            picking.exchange.close()
            logging.exchange.close()
        # It has gone: its requests are counted here, like those of another gateway.
        logging.exchange.siblings.clear()
        there.logged(metadata=first)
        assert sum(there.counts().values()) == 1

    asyncio.run(check())


def test_entries_that_wait_for_a_worker_that_died_are_counted(tmp_path: Path) -> None:
    async def check() -> None:
        dying, logging, third = (Worker(tmp_path, number) for number in range(3))
        try:
            await sent(dying, logging, third, until=lambda: len(logging.exchange.siblings) == 2)
            logging.world.logged(metadata=picked_metadata(dying.world))
            kill(dying.exchange)
            logging.forwarding.send()
            assert dying.exchange.own not in logging.exchange.siblings
            assert sum(logging.world.counts().values()) == 1
        finally:
            logging.exchange.close()
            third.exchange.close()

    asyncio.run(check())


def test_open_streams_are_told_again_when_there_was_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        picking, logging = Worker(tmp_path, 0), Worker(tmp_path, 1)
        try:
            await sent(picking, logging, until=lambda: bool(logging.exchange.siblings))
            logging.world.requests.open_log_streams = 1
            with monkeypatch.context() as patch:
                patch.setattr(logging.exchange, "send", lambda *_: False)
                logging.forwarding.send()
            await sent(picking, logging, until=lambda: picking.world.requests.log_streams_elsewhere == 1)
        finally:
            picking.exchange.close()
            logging.exchange.close()

    asyncio.run(check())


def test_what_a_killed_worker_was_told_holds_no_places(tmp_path: Path) -> None:
    """Whether requests have ended of which it may have had the entries is not known. If an entry comes
    nevertheless it counts, and frees nothing twice. A reply that is shown to the gateway is not in doubt."""

    async def check() -> None:
        picking, logging = Worker(tmp_path, 0), Worker(tmp_path, 1)
        here, endpoint = picking.world, picking.world.endpoints[0]
        try:
            logging.world.requests.open_log_streams = 1
            await sent(picking, logging, until=lambda: here.requests.log_streams_elsewhere == 1)
            first, _ = picked_metadata(here), picked_metadata(here)
            shown = picked(here)
            endpoint.scrape_succeeded(EndpointLoad(running=2), here.now)
            assert endpoint.in_flight == here.metrics.running == 3
            kill(logging.exchange)
            picking.exchange.send("hello", b"")
            assert endpoint.in_flight == endpoint.own_in_flight == here.metrics.running == 1
            assert EndpointPlaces(5).free(endpoint, here.now) == 5 - 2, "as it has reported"
            here.logged(metadata=first)
            assert here.counts() == {"ok_without_usage": 1}
            assert endpoint.in_flight == 1
            shown.receive(ProcessingRequest(MessagePart.RESPONSE_HEADERS, [(b":status", b"200")], end=True))
            shown.closed()
            assert endpoint.in_flight == endpoint.in_flight_tokens == 0
            picking.forwarding.close()
            assert not here.requests.is_busy
        finally:
            picking.exchange.close()

    asyncio.run(check())


def test_a_worker_that_ends_has_forwarded_all(tmp_path: Path) -> None:
    async def check() -> None:
        picking, logging = Worker(tmp_path, 0), Worker(tmp_path, 1)
        here = picking.world
        try:
            logging.world.requests.open_log_streams = 1
            await sent(picking, logging, until=lambda: here.requests.log_streams_elsewhere == 1)
            first, _ = picked_metadata(here), picked_metadata(here)
            logging.world.logged(metadata=first)
            logging.forwarding.close()
            logging.exchange.close()
            await sent(picking, until=lambda: not picking.exchange.siblings and bool(here.counts()))
            assert here.endpoints[0].in_flight == 1
        finally:
            picking.exchange.close()

    asyncio.run(check())
