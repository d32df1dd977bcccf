"""The keeper, its letters, and workers that do them harm."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.telemetry.metrics import GatewayMetrics, MetricsOptions
from penstock.gateway.workers import letters
from penstock.gateway.workers.exposition import WorkerExposition
from penstock.gateway.workers.keeper_link import KeeperLink
from penstock.gateway.workers.letters import Letter, LetterStream, StreamEnded, WorkerName
from penstock.gateway.workers.shared_budgets import SharedBudgetStore
from penstock.http.errors import ApiError
from tests.gateway.workers.linked import Gateway, gateway_of, know_each_other, until


def opened(gateway: Gateway, number: int, heard: list[bytes] | None = None) -> KeeperLink:
    link, _ = gateway.link(number)
    link.on("told", lambda sender, data: heard.append(data) if heard is not None else None)
    link.open()
    return link


# -- letters


def test_letters_in_pieces_and_at_once() -> None:
    ours, theirs = socket.socketpair()
    sent = [Letter("a", b"x" * size, WorkerName(1, size)) for size in (0, 1, 300, 70_000)]
    with ours, theirs:
        reader, writer = LetterStream(ours), LetterStream(theirs)
        for letter in sent:
            assert writer.send(letter)
        data = b""
        while len(data) < 70_000:
            data += ours.recv(1 << 20)
        for size in (1, 3, 1000, len(data)):
            received: list[Letter] = []
            for start in range(0, len(data), size):
                theirs.sendall(data[start : start + size])
                received += reader.receive()
            while len(received) < len(sent):
                received += reader.receive()
            assert received == sent


@pytest.mark.parametrize("data", [struct.pack("!I", letters.MAX_LETTER_BYTES + 1), b""])
def test_a_stream_ends(data: bytes) -> None:
    """With a length that no letter has, and when the other end closes."""
    ours, theirs = socket.socketpair()
    reader = LetterStream(ours)
    with ours, theirs:
        assert reader.receive() == []
        theirs.sendall(data)
        theirs.close()
        with pytest.raises(StreamEnded):
            reader.receive()
        reader.send(Letter("a"))
        assert not reader.has_unsent, "nobody will read it"


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "MAX_UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr(letters, "MAX_LETTER_BYTES", 1 << 19)
    ours, theirs = socket.socketpair()
    writer, reader = LetterStream(ours), LetterStream(theirs)
    assert not writer.send(Letter("long", bytes(1 << 19)))
    sent = 0
    while writer.send(Letter("a", bytes(100_000))):
        sent += 1
    assert writer.has_unsent
    assert sent < 20
    writer.close(0.0)
    assert len(received_to_the_end(reader)) < sent, "there was no time"
    reader.close()


def test_closing_waits_for_an_end_that_reads() -> None:
    ours, theirs = socket.socketpair()
    writer, reader = LetterStream(ours), LetterStream(theirs)
    for _ in range(50):
        writer.send(Letter("a", bytes(100_000)))
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(received_to_the_end, reader)
        writer.close(60.0)
        assert len(received.result()) == 50
    reader.close()


def received_to_the_end(reader: LetterStream) -> list[Letter]:
    received = []
    with contextlib.suppress(StreamEnded):
        while True:
            received += reader.receive()
    return received


# -- the keeper


def run(tmp_path: Path, test: Callable[[Gateway], object]) -> None:
    async def check() -> None:
        with gateway_of(tmp_path) as gateway:
            await test(gateway)  # type: ignore[misc]

    asyncio.run(check())


def test_a_worker_s_last_letters_arrive(tmp_path: Path) -> None:
    async def check(gateway: Gateway) -> None:
        heard: list[bytes] = []
        first, second = opened(gateway, 0, heard), opened(gateway, 1)
        await know_each_other(first, second)
        gone: list[int] = []
        first.on_gone.append(lambda worker: gone.append(len(heard)))
        for number in range(100):
            second.tell_others("told", b"%d" % number + bytes(10_000))
        gateway.end(second)
        await until(lambda: bool(gone))
        assert gone == [100], "and before its end is told"
        assert [int(data.rstrip(b"\0")) for data in heard] == list(range(100))

    run(tmp_path, check)


def test_letters_to_one_worker(tmp_path: Path) -> None:
    async def check(gateway: Gateway) -> None:
        heard: list[list[bytes]] = [[], [], []]
        links = [opened(gateway, number, heard[number]) for number in range(3)]
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
        first, second, hung = opened(gateway, 0), opened(gateway, 1, heard), opened(gateway, 2)
        await know_each_other(first, second, hung)
        asyncio.get_running_loop().remove_reader(hung._stream.fileno())
        store = SharedBudgetStore(first)
        stream = gateway.keeper._streams[WorkerName(2, 0)]
        for number in range(100):
            first.tell_others("told", bytes(50_000))
            await until(lambda number=number: len(heard) == number + 1)  # type: ignore[misc]
            assert (await store.reserve("a", str(number), (), None)).granted
        assert len(stream._unsent) <= 1 << 20
        assert stream.has_unsent
        asyncio.get_running_loop().add_reader(hung._stream.fileno(), hung._on_readable)
        await until(lambda: not stream.has_unsent)
        first.tell_others("told", b"again")
        await until(lambda: heard[-1] == b"again")

    run(tmp_path, check)


def test_a_worker_that_sends_no_letters_is_cut_off(tmp_path: Path) -> None:
    async def check(gateway: Gateway) -> None:
        first, second = opened(gateway, 0), opened(gateway, 1)
        await know_each_other(first, second)
        second._stream._unsent += b"\xff" * 100
        second._stream.flush()
        await until(lambda: not first.siblings and not second._is_open)
        assert not second.siblings
        third = opened(gateway, 2)
        await know_each_other(first, third)

    run(tmp_path, check)


def test_a_worker_that_starts_is_none_before_it_says_so(tmp_path: Path) -> None:
    async def check(gateway: Gateway) -> None:
        first = opened(gateway, 0)
        starting, _ = gateway.link(1, 3)
        second = opened(gateway, 2)
        await know_each_other(first, second)
        assert first.first_epochs == {0: 0, 1: 3, 2: 0}
        starting.open()
        await know_each_other(first, second, starting)

    run(tmp_path, check)


def test_workers_go_on_without_a_keeper(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A fault of its thread ends it."""

    async def check(gateway: Gateway) -> None:
        first, second = opened(gateway, 0), opened(gateway, 1)
        await know_each_other(first, second)
        gateway.keeper._budgets = None  # type: ignore[assignment]
        gateway.kill(second)
        await until(lambda: not first._is_open)
        assert not first.siblings
        assert not first.ask_keeper("budget questions", b"")
        assert first.tell_others("told", b"")

    run(tmp_path, check)
    assert "the workers of the gateway share nothing any more" in caplog.text


# -- the metrics of all


def exposition(link: KeeperLink, timeout_s: float = 5.0) -> WorkerExposition:
    metrics = GatewayMetrics(lambda: [Endpoint("http://a:1")], MetricsOptions("none"))
    return WorkerExposition(link, metrics, timeout_s)


def requests(text: bytes) -> float:
    families = text_string_to_metric_families(text.decode())
    samples = [sample for family in families for sample in family.samples]
    return sum(each.value for each in samples if each.name == "penstock_gateway_request_total")


def test_a_scrape_has_what_the_others_count_now(tmp_path: Path) -> None:
    async def check(gateway: Gateway) -> None:
        first, second = opened(gateway, 0), opened(gateway, 1)
        shown = exposition(first), exposition(second)
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


def test_a_scrape_without_a_keeper_is_refused(tmp_path: Path) -> None:
    """Rather than that counters fall; when it is back, what comes late is no part of a later answer."""

    async def check(gateway: Gateway) -> None:
        first, second = opened(gateway, 0), opened(gateway, 1)
        shown, _ = exposition(first, timeout_s=0.05), exposition(second)
        await know_each_other(first, second)
        with gateway.hangs(), pytest.raises(ApiError, match="do not come") as refused:
            await shown.text()
        assert refused.value.status == 503
        shown._timeout_s = 5.0
        expected = await shown.text()
        assert len(shown._others) == 2, "the other worker, and those that have ended"
        assert expected

    run(tmp_path, check)
