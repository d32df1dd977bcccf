"""The keeper, its letters, and workers that do them harm."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.telemetry.metrics import ExpositionLimits, GatewayMetrics
from penstock.gateway.workers import letters
from penstock.gateway.workers.exposition import WorkerExposition
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.letters import Letter, LetterStream, WorkerName
from penstock.gateway.workers.shared_budgets import SharedBudgetStore
from penstock.http.errors import ApiError
from tests.gateway.workers.linked import Gateway, gateway_of, know_each_other, stream_of, until


def worker(gateway: Gateway, number: int, heard: list[bytes] | None = None) -> KeeperLink:
    link, _ = gateway.link(number)
    link.on("told", lambda caller, data: heard.append(data) if heard is not None else None)
    return link


# -- letters


class End:
    """One end of letters, and what it has received. Its other end is a socket of the test."""

    def __init__(self) -> None:
        self.received: list[Letter] = []
        self.ended = asyncio.Event()
        self.stream = LetterStream(self.received.append, self.ended.set)


@contextlib.asynccontextmanager
async def end() -> AsyncIterator[tuple[End, socket.socket]]:
    made, loop = End(), asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    await loop.create_unix_connection(lambda: made.stream, sock=ours)
    with theirs:
        yield made, theirs
        made.stream.transport.abort()
        await asyncio.sleep(0)


def test_letters_in_pieces_and_at_once() -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        sent = [Letter("a", b"x" * size, WorkerName(1, size)) for size in (0, 1, 300, 7_000)]
        async with end() as (writer, theirs):
            for letter in sent:
                assert writer.stream.send(letter)
            data = await loop.sock_recv(theirs, 1 << 20)
        for size in (1, 3, 1000, len(data)):
            reader = End()
            for start in range(0, len(data), size):
                reader.stream.data_received(data[start : start + size])
            assert reader.received == sent

    asyncio.run(check())


@pytest.mark.parametrize("data", [struct.pack("!I", letters.MAX_LETTER_BYTES + 1), b""])
def test_a_stream_ends(data: bytes) -> None:
    """With a length that no letter has, and when the other end closes."""

    async def check() -> None:
        async with end() as (reader, theirs):
            theirs.sendall(data)
            if not data:
                theirs.close()
            await asyncio.wait_for(reader.ended.wait(), 20)
            assert not reader.stream.send(Letter("a"))

    asyncio.run(check())


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "MAX_UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr(letters, "MAX_LETTER_BYTES", 1 << 19)

    async def check() -> None:
        async with end() as (writer, theirs):
            assert not writer.stream.send(Letter("long", bytes(1 << 19)))
            sent = 0
            while writer.stream.send(Letter("a", bytes(100_000))):
                sent += 1
            assert 5 < sent < 20
            assert writer.stream.transport.get_write_buffer_size() <= 1 << 20
            while writer.stream.transport.get_write_buffer_size():
                await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)
            assert writer.stream.send(Letter("a", bytes(100_000)))

    asyncio.run(check())


# -- the keeper


def run(tmp_path: Path, test: Callable[[Gateway], object]) -> None:
    async def check() -> None:
        async with gateway_of(tmp_path) as gateway:
            await test(gateway)  # type: ignore[misc]

    asyncio.run(check())


def test_a_worker_s_last_letters_arrive(tmp_path: Path) -> None:
    async def check(gateway: Gateway) -> None:
        heard: list[bytes] = []
        first, second = worker(gateway, 0, heard), worker(gateway, 1)
        await know_each_other(first, second)
        gone: list[int] = []
        first.on_gone.append(lambda worker: gone.append(len(heard)))
        for number in range(100):
            second.tell_others("told", b"%d" % number + bytes(10_000))
        await gateway.end(second)
        await until(lambda: bool(gone))
        assert gone == [100], "and before its end is told"
        assert [int(data.rstrip(b"\0")) for data in heard] == list(range(100))

    run(tmp_path, check)


def test_letters_to_one_worker(tmp_path: Path) -> None:
    async def check(gateway: Gateway) -> None:
        heard: list[list[bytes]] = [[], [], []]
        links = [worker(gateway, number, heard[number]) for number in range(3)]
        await know_each_other(*links)
        links[0].tell_others("told", b"one", WorkerName(2, 0))
        links[0].tell_others("told", b"nobody", WorkerName(9, 0))
        links[0].tell_others("told", b"all")
        await until(lambda: all(heard))
        assert heard == [[b"nobody"], [b"all"], [b"one", b"all"]], "what reaches nobody comes back"

    run(tmp_path, check)


def test_a_worker_that_does_not_read_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letters, "MAX_UNSENT_BYTES", 1 << 20)

    async def check(gateway: Gateway) -> None:
        heard: list[bytes] = []
        first, second, hung = worker(gateway, 0), worker(gateway, 1, heard), worker(gateway, 2)
        await know_each_other(first, second, hung)
        stream_of(hung).transport.pause_reading()
        store = SharedBudgetStore(first)
        stream = gateway.keeper._streams[WorkerName(2, 0)]
        for number in range(100):
            first.tell_others("told", bytes(50_000))
            await until(lambda number=number: len(heard) == number + 1)  # type: ignore[misc]
            assert (await store.reserve("a", str(number), (), None)).granted
        assert 0 < stream.transport.get_write_buffer_size() <= 1 << 20
        stream_of(hung).transport.resume_reading()
        await until(lambda: not stream.transport.get_write_buffer_size())
        first.tell_others("told", b"again")
        await until(lambda: heard[-1] == b"again")

    run(tmp_path, check)


def test_a_worker_that_sends_no_letters_is_cut_off(tmp_path: Path) -> None:
    async def check(gateway: Gateway) -> None:
        first, second = worker(gateway, 0), worker(gateway, 1)
        await know_each_other(first, second)
        stream_of(second).transport.write(b"\xff" * 100)
        await until(lambda: not first.siblings and second._stream is None)
        assert not second.siblings
        third = worker(gateway, 2)
        await know_each_other(first, third)

    run(tmp_path, check)


def test_a_worker_that_starts_is_none_before_it_says_so(tmp_path: Path) -> None:
    async def check(gateway: Gateway) -> None:
        first = worker(gateway, 0)
        starting, _ = gateway.link(1, 3)
        second = worker(gateway, 2)
        await know_each_other(first, second)
        assert first.first_epochs == {0: 0, 1: 3, 2: 0}
        await know_each_other(first, second, starting)

    run(tmp_path, check)


def test_workers_go_on_without_a_keeper(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check(gateway: Gateway) -> None:
        first, second = worker(gateway, 0), worker(gateway, 1)
        await know_each_other(first, second)
        for stream in list(gateway.keeper._streams.values()):
            gateway.keeper._loop.call_soon_threadsafe(stream.transport.abort)
        await until(lambda: first._stream is None)
        assert not first.siblings
        assert not first.ask_keeper("budget questions", b"")
        assert first.tell_others("told", b"")

    run(tmp_path, check)
    assert "the keeper of what the workers share cannot be reached" in caplog.text


# -- the metrics of all


def shown_by(link: KeeperLink) -> WorkerExposition:
    metrics = GatewayMetrics(lambda: [Endpoint("http://a:1")], ExpositionLimits("none"))
    return WorkerExposition(link, metrics)


def requests(text: bytes) -> float:
    families = text_string_to_metric_families(text.decode())
    samples = [sample for family in families for sample in family.samples]
    return sum(each.value for each in samples if each.name == "penstock_gateway_request_total")


def test_a_scrape_has_what_the_others_count_now(tmp_path: Path) -> None:
    async def check(gateway: Gateway) -> None:
        first, second = worker(gateway, 0), worker(gateway, 1)
        shown = shown_by(first), shown_by(second)
        await know_each_other(first, second)
        for number in range(1, 4):
            for each in shown:
                each._metrics.request_started(record := RequestRecord("/v1/completions", model="m"))
                each._metrics.request_ended(record)
            texts = await asyncio.gather(*(each.text() for each in shown))
            assert [requests(text) for text in texts] == [2 * number, 2 * number]
        gateway.kill(second)
        await know_each_other(first)
        assert requests(await shown[0].text()) == 6

    run(tmp_path, check)


def test_a_worker_that_hangs_or_dies_delays_no_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its latest metrics count."""
    monkeypatch.setattr("penstock.gateway.workers.exposition.WAIT_S", 0.05)

    async def check(gateway: Gateway) -> None:
        first, hung, dying = (worker(gateway, number) for number in range(3))
        shown, hidden, dead = (shown_by(link) for link in (first, hung, dying))
        await know_each_other(first, hung, dying)
        for each in (hidden, dead):
            each._metrics.request_started(record := RequestRecord("/v1/completions", model="m"))
            each._metrics.request_ended(record)
            each.send_when_due()
        await until(lambda: len(gateway.keeper._metrics._latest) == 2)
        stream_of(hung).transport.pause_reading()
        assert requests(await shown.text()) == 2
        monkeypatch.setattr("penstock.gateway.workers.exposition.WAIT_S", 20.0)
        stream_of(dying).transport.pause_reading()
        asked = asyncio.ensure_future(shown.text())
        await until(lambda: bool(shown._awaited))
        gateway.kill(hung)
        gateway.kill(dying)
        assert requests(await asyncio.wait_for(asked, 10.0)) == 2

    run(tmp_path, check)


def test_a_scrape_without_a_keeper_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than that counters fall; when it is back, what comes late is no part of a later answer."""

    async def check(gateway: Gateway) -> None:
        first, second = worker(gateway, 0), worker(gateway, 1)
        shown, _ = shown_by(first), shown_by(second)
        await know_each_other(first, second)
        with monkeypatch.context() as patch:
            patch.setattr("penstock.gateway.workers.exposition.WAIT_S", 0.05)
            patch.setattr("penstock.gateway.workers.exposition.KEEPER_WAIT_S", 0.05)
            with gateway.hangs(), pytest.raises(ApiError, match="do not come") as refused:
                await shown.text()
        assert refused.value.status == 503
        expected = await shown.text()
        assert len(shown._others) == 2, "the other worker, and those that have ended"
        assert expected

    run(tmp_path, check)
