"""A subscriber and publishers, over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from penstock.config.kv_events import KVEventsConfig
from penstock.engine.kv_events.publisher import KVEventPublisher
from penstock.gateway.kv_events import subscriber
from penstock.gateway.kv_events.block_index import BlockIndex, Source
from penstock.gateway.kv_events.subscriber import REPLAY_TIMEOUT_S, EventAddresses, KVEventSubscriber
from penstock.gateway.routing.endpoint import Endpoint
from penstock.wire.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockStored,
    KVCacheEvent,
    encode_batch,
)

WAIT_S = 90.0
PROMPT = np.arange(65, dtype=np.int32).tobytes()


def block(number: int) -> BlockStored:
    """The block of PROMPT with this number; its hash is one more."""
    parent = number or None
    return BlockStored([number + 1], parent, [*range(8 * number, 8 * number + 8)], 8, None, "GPU", None)


def publish(publisher: KVEventPublisher, *events: KVCacheEvent) -> None:
    for event in events:
        publisher.publish([event])


def publisher(directory: Path, *, replays: bool = True, buffer_steps: int = 100) -> KVEventPublisher:
    replay = f"ipc://{directory}/replay" if replays else None
    return KVEventPublisher(
        KVEventsConfig(
            enable_kv_cache_events=True,
            endpoint=f"ipc://{directory}/events",
            replay_endpoint=replay,
            buffer_steps=buffer_steps,
        ),
        0,
    )


class Subscribed:
    def __init__(self, directory: Path, *, replays: bool = True, replay: str | None = None) -> None:
        self.endpoint = Endpoint("http://a")
        self.index = BlockIndex()
        self.subscriber = KVEventSubscriber(self.index)
        self.addresses = EventAddresses(
            Source(self.endpoint),
            f"ipc://{directory}/events",
            replay or (f"ipc://{directory}/replay" if replays else None),
        )
        self.subscriber.update([self.addresses])

    def cached(self) -> int:
        return self.index.cached(PROMPT, [self.endpoint], 0.0).get(self.endpoint, 0)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 - the index is no asyncio object
                await asyncio.sleep(0.01)

    async def until_cached(self, tokens: int) -> None:
        await self.until(lambda: self.cached() == tokens)


@asynccontextmanager
async def subscribed(
    directory: Path, *, replays: bool = True, replay: str | None = None
) -> AsyncIterator[Subscribed]:
    each = Subscribed(directory, replays=replays, replay=replay)
    try:
        yield each
    finally:
        each.subscriber.close()


def test_events_before_and_after_the_subscription_are_applied(tmp_path: Path) -> None:
    async def run() -> None:
        server = publisher(tmp_path)
        publish(server, block(0), block(1))
        async with subscribed(tmp_path) as gateway:
            await gateway.until_cached(16)
            publish(server, block(2))
            await gateway.until_cached(24)
            publish(server, AllBlocksCleared())
            await gateway.until_cached(0)
            assert gateway.subscriber.counts.applied == 4
        server.close()

    asyncio.run(run())


class Clock:
    """The subscriber's, which a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        fake = SimpleNamespace(monotonic=lambda: self.now, perf_counter=time.perf_counter, sleep=time.sleep)
        monkeypatch.setattr(subscriber, "time", fake)


def message(number: int) -> tuple[bytes, bytes, bytes]:
    return b"", number.to_bytes(8, "big"), encode_batch(0.0, [block(number)], 0)


def test_a_long_replay_is_waited_for_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)

    async def run(events: zmq.Socket[bytes], replay: zmq.Socket[bytes]) -> None:
        async with subscribed(tmp_path) as gateway:
            await gateway.until(lambda: events.poll(0) != 0 and replay.poll(0) != 0)
            asker, empty, first = replay.recv_multipart()
            assert (empty, first) == (b"", bytes(8))
            for number in range(4):
                replay.send_multipart((asker, b"", *message(number)))
                await gateway.until_cached(8 * number + 8)
                clock.now += 0.7 * REPLAY_TIMEOUT_S
            replay.send_multipart((asker, b"", b"", END_OF_REPLAY, b""))
            events.send_multipart(message(4))
            await gateway.until_cached(40)
            assert gateway.subscriber.counts.resets == 1

    with zmq.Context() as context, context.socket(zmq.XPUB) as events, context.socket(zmq.ROUTER) as replay:
        events.bind(f"ipc://{tmp_path}/events")
        replay.bind(f"ipc://{tmp_path}/replay")
        asyncio.run(run(events, replay))


def test_a_replay_that_does_not_go_on_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    async def run(events: zmq.Socket[bytes]) -> None:
        async with subscribed(tmp_path) as gateway:  # nobody is at the address of the replay
            await gateway.until(lambda: events.poll(0) != 0 and gateway.subscriber.counts.resets == 1)
            events.send_multipart(message(0))
            clock.now += REPLAY_TIMEOUT_S + 1.0
            await gateway.until_cached(8)
            assert gateway.subscriber.counts.resets == 2

    with zmq.Context() as context, context.socket(zmq.XPUB) as events:
        events.bind(f"ipc://{tmp_path}/events")
        asyncio.run(run(events))


def test_a_restarted_server_has_an_empty_cache(tmp_path: Path) -> None:
    async def run() -> None:
        server = publisher(tmp_path)
        publish(server, *map(block, range(4)))
        async with subscribed(tmp_path) as gateway:
            await gateway.until_cached(32)
            server.close()
            await gateway.until_cached(0)
            server = publisher(tmp_path)
            publish(server, block(0))
            await gateway.until_cached(8)
        server.close()

    asyncio.run(run())


def test_without_a_replay_socket_only_later_events_are_known(tmp_path: Path) -> None:
    async def run() -> None:
        server = publisher(tmp_path, replays=False)
        publish(server, block(0))
        async with subscribed(tmp_path, replays=False) as gateway:
            await gateway.until(lambda: gateway.subscriber.counts.resets > 0)
            async with asyncio.timeout(WAIT_S):
                while gateway.cached() < 8:  # until the publisher knows of the subscription
                    publish(server, AllBlocksCleared(), block(0))
                    await asyncio.sleep(0.02)
        server.close()

    asyncio.run(run())


def test_a_source_that_left_is_forgotten(tmp_path: Path) -> None:
    async def run() -> None:
        server = publisher(tmp_path)
        publish(server, block(0))
        async with subscribed(tmp_path) as gateway:
            await gateway.until_cached(8)
            gateway.subscriber.update([])
            assert gateway.cached() == 0
            await gateway.until(lambda: not gateway.index._bits)
            gateway.subscriber.update([EventAddresses(Source(gateway.endpoint), gateway.addresses.events)])
            gateway.subscriber.update([gateway.addresses])
            await gateway.until_cached(8)
        server.close()

    asyncio.run(run())


def test_a_source_is_followed_again_after_a_batch_that_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket does not connect again by itself after what is no message for it."""
    monkeypatch.setattr(subscriber, "MAX_BATCH_BYTES", 1 << 12)
    monkeypatch.setattr(subscriber, "RECONNECT_S", 0.02)
    large = BlockStored([1], None, [*range(1 << 12)], 1 << 12, None, "GPU", None)

    async def run() -> None:
        server = publisher(tmp_path, replays=False)
        async with subscribed(tmp_path, replays=False) as gateway, asyncio.timeout(WAIT_S):
            for awaited, event in (
                (lambda: gateway.subscriber.counts.resets > 1, large),
                (gateway.cached, block(0)),
            ):
                while not awaited():  # until the publisher knows of the subscription
                    publish(server, event)
                    await asyncio.sleep(0.02)
        server.close()

    asyncio.run(run())


def test_what_is_no_batch_is_counted(tmp_path: Path) -> None:
    async def run() -> None:
        server = publisher(tmp_path)
        async with subscribed(tmp_path) as gateway:
            publish(server, block(0))
            await gateway.until_cached(8)
            server._pub.send_multipart((b"", (1).to_bytes(8, "big"), b"\xc1"))
            server._pub.send_multipart((b"", b"1", b"", b""))
            await gateway.until(lambda: gateway.subscriber.counts.malformed == 1)
            assert gateway.cached() == 8
        server.close()

    asyncio.run(run())


def test_an_address_that_is_none_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = publisher(tmp_path)
    publish(server, block(0))

    async def run() -> None:
        async with subscribed(tmp_path) as gateway:
            await gateway.until_cached(8)
            wrong = EventAddresses(Source(Endpoint("http://b")), "tcp://no port")
            gateway.subscriber.update([gateway.addresses, wrong])
            await gateway.until(lambda: "tcp://no port cannot be followed" in caplog.text)
            gateway.subscriber.update([gateway.addresses])
            publish(server, block(1))
            await gateway.until_cached(16)

    asyncio.run(run())
    server.close()


def test_without_a_socket_for_a_replay_later_events_are_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the process has all the descriptors that it may have."""

    async def run(events: zmq.Socket[bytes]) -> None:
        async with subscribed(tmp_path, replay="tcp://no port") as gateway:
            await gateway.until(
                lambda: events.poll(0) != 0 and "tcp://no port cannot be asked" in caplog.text
            )
            for number in range(2):
                events.send_multipart(message(number))
            await gateway.until_cached(16)

    with zmq.Context() as context, context.socket(zmq.XPUB) as events:
        events.bind(f"ipc://{tmp_path}/events")
        asyncio.run(run(events))


def test_a_failure_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise LookupError("a bug")

    async def run() -> None:
        async with subscribed(tmp_path) as gateway:
            monkeypatch.setattr(KVEventSubscriber, "_receive", broken)
            with pytest.raises(LookupError):
                await asyncio.wait_for(gateway.subscriber.watch(), WAIT_S)

    asyncio.run(run())
