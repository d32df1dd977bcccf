"""Plain events of many streams by columns: the same bytes and counts as one by one, in order."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from penstock.gateway.relay.attempt import Attempt, TimeLimits
from penstock.gateway.relay.client_connection import HttpClientConnection
from penstock.gateway.relay.plain_events import PlainEvents
from penstock.gateway.relay.write_batch import WriteBatch
from penstock.gateway.responses.held_bytes import HeldBytes
from penstock.gateway.responses.outcome import TransportResult
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.responses.response_observer import StreamObserver
from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.exchange import Headers, UpstreamRequest
from penstock.gateway.upstream.http2_connection import Http2UpstreamConnection
from penstock.gateway.upstream.http2_exchange import WINDOW, Http2Exchange
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.gateway.upstream.upstream import Upstream
from penstock.http.http2 import frames as h2
from penstock.http.http2.flow_windows import FlowWindows
from penstock.http.http2.header_blocks import encode_fields
from penstock.http.sink import Listener
from penstock.http.write_target import WriteTarget
from penstock.streaming.rows.io_submit import write_each
from tests.gateway.upstream.test_http2_faults import FakeTransport

HEAD = encode_fields([(b":status", b"200"), (b"content-type", b"text/event-stream")])
TEXTS = [b" the", b"of", b"\\n", b"\\u00e9", "größer".encode(), b'\\"', b"\xff", b"\\ud83d\\ude00", b""]
"""Some of which are no text of a plain event."""


def event(number: int, text: bytes, finish: bytes = b"null") -> bytes:
    fields = b'{"id":"c-%d","choices":[{"index":0,"text":"%b","finish_reason":%b}]}' % (number, text, finish)
    return b"data: %b\n\n" % fields


def delta(number: int, count: int, text: bytes) -> bytes:
    """A numbered event of the responses API; half of the streams have the number first."""
    shape = (
        b'{"type":"response.output_text.delta","delta":"%b","sequence_number":%d,"logprobs":[]}'
        if number % 2
        else b'{"type":"response.output_text.delta","sequence_number":%d,"item_id":"m","delta":"%b"}'
    )
    fields = shape % ((text, count) if number % 2 else (count, text))
    return b"event: response.output_text.delta\ndata: %b\n\n" % fields


def chunks(data: bytes) -> bytes:
    """The content of HTTP/1.1's chunks."""
    content = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        content += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return content


class FakeRequester:
    """A request whose replies are relayed as they come."""

    translation = None

    def screen(self, status: int, headers: Headers) -> Headers:
        return headers

    def error_event(self, code: str, message: str) -> bytes:
        return RequestRecord("/v1/completions").error_event(code, message)

    def on_response(self, id: str) -> None: ...

    def on_first_token(self) -> None: ...


class SocketClient:
    """A client of HTTP/1.1, whose socket the test reads."""

    def __init__(self, windows: FlowWindows) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.setblocking(False)
        self.path: WriteTarget | None = WriteTarget(descriptor=self.ours.fileno(), write_rest=self.write_rest)
        self.rest = b""
        """What the socket has not taken."""
        self.listener: Listener
        self.ended = self.was_cut = False

    @property
    def write_target(self) -> WriteTarget | None:
        return None if self.rest else self.path

    def write_rest(self, data: bytes) -> None:
        self.rest += data

    def write_body(self, data: bytes) -> None:
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        sent = 0 if self.rest else self.ours.send(chunk)
        self.rest += chunk[sent:]

    def received(self) -> bytes:
        data = b""
        while True:
            try:
                data += self.theirs.recv(1 << 20)
            except BlockingIOError:
                break
        return chunks(data + self.rest)

    def listen(self, listener: Listener, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.listener = listener

    def begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None: ...

    def finish(self) -> None:
        self.ended = True

    def cut(self) -> None:
        self.was_cut = True

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


class FrameClient(SocketClient):
    """A stream of a client's HTTP/2 connection; two streams share one connection."""

    window = 1 << 20
    connections: ClassVar[dict[FlowWindows, list[FrameClient]]] = {}

    def __init__(self, windows: FlowWindows) -> None:
        super().__init__(windows)
        self._windows = windows
        siblings = self.connections.setdefault(windows, [])
        if len(siblings) % 2:
            self.frames, connection = siblings[-1].frames, siblings[-1].connection
        else:
            self.frames = []
            connection = windows.add_connection(self, 1 << 30)
        self.connection = connection
        siblings.append(self)
        self.stream_id = 2 * len(siblings) + 1
        self.slot = windows.add_stream(connection, self.window)
        self.path = WriteTarget(window=self.slot, prefix=h2.data_prefix(self.stream_id))
        self.held = b""

    @property
    def write_target(self) -> WriteTarget | None:
        return None if self.held else self.path

    def write_frames(self, frames: bytes) -> None:
        self.frames.append(frames)

    def write_body(self, data: bytes) -> None:
        left = int(self._windows.streams[self.slot])
        if self.held or left < len(data):
            self.held += data
        else:
            self._windows.streams[self.slot] = left - len(data)
            self.frames.append(h2.frame(h2.DATA, 0, self.stream_id, data))

    def received(self) -> bytes:
        scanner = h2.FrameScanner(1 << 20)
        scanner.receive(b"".join(self.frames))
        own = [payload for _, _, stream, payload in scanner.take_frames(1 << 20) if stream == self.stream_id]
        return b"".join(own) + self.held


class Relayed:
    """Streams of one connection to a model server, relayed to clients of their own."""

    def __init__(self, kind: type[SocketClient], streams: int, *, strip_usage: bool = True) -> None:
        loop = asyncio.get_running_loop()
        windows = FlowWindows()
        self.plain = PlainEvents(write_each, windows, slots=2)
        self.batch = WriteBatch(write_each)
        pool = ConnectionPool("http://127.0.0.1:1", Upstream(Timeouts(connect=1.0)))
        self.server: Http2UpstreamConnection = pool.make_http2()
        self.server.connection_made(FakeTransport())
        self.server.data_received(h2.settings_frame({}))
        self.clients = [kind(windows) for _ in range(streams)]
        self.attempts: list[Attempt] = []
        for client in self.clients:
            connection = HttpClientConnection(client, (b"x-request-id", b"r"), self.batch)
            exchange = self.server.open_exchange()
            attempt = Attempt(
                connection,
                exchange,
                self.plain,
                expects="stream",
                strip_usage=strip_usage,
                held=HeldBytes(),
                requester=FakeRequester(),
                limits=TimeLimits(Timeouts(), loop.time() + 60.0, loop.time),
            )
            exchange.send(UpstreamRequest(b"POST", b"/", [], b""), attempt)
            connection.listen(attempt)
            self.attempts.append(attempt)
        self.server.data_received(
            b"".join(h2.frame(h2.HEADERS, h2.END_HEADERS, self.id(n), HEAD) for n in range(streams))
        )

    @staticmethod
    def id(number: int) -> int:
        """Of the stream."""
        return 2 * number + 1

    async def send(self, data: bytes) -> None:
        """What the model server sends."""
        self.server.data_received(data)
        await self.settle()

    async def settle(self) -> None:
        """Until nothing is left to be done."""
        while self.server._waits_for_turn or self.plain._scheduled or self.batch._waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def begin(self) -> None:
        """Two events of each stream, after which it has a fast path."""
        for _ in range(3):
            await self.send(b"".join(data(n, event(n, b"x")) for n in range(len(self.clients))))
        assert len(self.server.plain_shapes) == len(self.clients)

    def close(self) -> None:
        for client in self.clients:
            client.close()


def data(number: int, payload: bytes, flags: int = 0) -> bytes:
    return h2.frame(h2.DATA, flags, Relayed.id(number), payload)


@contextmanager
def relayed(kind: type[SocketClient], streams: int, **options: Any) -> Iterator[Relayed]:
    each = Relayed(kind, streams, **options)
    try:
        yield each
    finally:
        each.close()


CLIENTS = pytest.mark.parametrize("kind", [SocketClient, FrameClient])


@CLIENTS
@pytest.mark.parametrize("strip_usage", [True, False])
def test_bytes_and_counts_are_those_of_streams_that_are_read_one_by_one(
    kind: type[SocketClient], strip_usage: bool
) -> None:
    async def main() -> None:
        rng = random.Random(7)
        for _ in range(10):
            await one_run(rng)

    async def one_run(rng: random.Random) -> None:
        streams = 6
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
        sent: list[list[bytes]] = []
        for number in range(streams):
            counts = range(1, rng.randrange(1, 41))
            if number % 3:
                texts = [event(number, rng.choice(TEXTS)) for _ in counts]
            else:
                texts = [delta(number, count, rng.choice(TEXTS)) for count in counts]
            sent.append([*texts, b": keep-alive\n\n", *texts, event(number, b"", b'"stop"'), usage])
            sent[-1].append(b"data: [DONE]\n\n")
        waiting = [list(events) for events in sent]
        wire = b""
        while any(waiting):
            number = rng.choice([n for n in range(streams) if waiting[n]])
            wire += data(number, waiting[number].pop(0), 0 if waiting[number] else h2.END_STREAM)
        with relayed(kind, streams, strip_usage=strip_usage) as run:
            at = 0
            while at < len(wire):
                size = rng.choice([1, 50, 500, 5000])
                run.server.data_received(wire[at : at + size])
                at += size
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
            await run.settle()
            for number, (attempt, client) in enumerate(zip(run.attempts, run.clients, strict=True)):
                observer = StreamObserver(strip_usage)
                expected = b"".join(observer.feed(each, 0.0) for each in sent[number])
                assert client.received() == expected + observer.finish(0.0)
                assert client.ended
                seen = attempt.seen
                assert attempt.ended.result() is TransportResult.COMPLETE
                assert attempt.bytes_out == len(expected)
                assert seen.token_events == observer.seen.token_events
                assert sum(seen.itl_bucket_counts) == sum(observer.seen.itl_bucket_counts)
                assert seen.usage == observer.seen.usage
                assert seen.finished_at_event == observer.seen.finished_at_event
                assert (seen.content_problem is None) == (observer.seen.content_problem is None)
            assert not run.server.plain_shapes
            assert run.plain._owners.count(None) == len(run.plain._owners)

    asyncio.run(main())


@CLIENTS
def test_most_events_come_by_lanes(kind: type[SocketClient]) -> None:
    async def main() -> None:
        with relayed(kind, 4) as run:
            await run.begin()
            calls = 0

            def count(data: bytes, now: float) -> None:
                nonlocal calls
                calls += 1

            for attempt in run.attempts:
                attempt.on_body = count  # type: ignore[method-assign]
            for _ in range(20):
                await run.send(b"".join(data(n, event(n, b" y")) for n in range(4)))
            assert calls == 0
            for number, client in enumerate(run.clients):
                assert client.received() == event(number, b"x") * 3 + event(number, b" y") * 20

    asyncio.run(main())


@CLIENTS
def test_numbered_events_come_by_lanes(kind: type[SocketClient]) -> None:
    async def main() -> None:
        with relayed(kind, 4) as run:
            sent = [[delta(n, count, b" y") for count in range(1, 120)] for n in range(4)]
            for count in range(5):
                await run.send(b"".join(data(n, sent[n][count]) for n in range(4)))
            assert len(run.server.plain_shapes) == 4
            for count in range(5, len(sent[0])):
                await run.send(b"".join(data(n, sent[n][count]) for n in range(4)))
            assert len(run.server.plain_shapes) == 4, "none has left the fast path"
            for n in range(4):
                run.attempts[n].leave_fast_path()
                assert run.attempts[n].seen.token_events == len(sent[n])
                assert run.clients[n].received() == b"".join(sent[n])

    asyncio.run(main())


@CLIENTS
@pytest.mark.parametrize("number", [b"", b"07", b"x", b'7","sequence_number":8', b"7\n"])
def test_what_is_no_number_is_read(kind: type[SocketClient], number: bytes) -> None:
    async def main() -> None:
        with relayed(kind, 2) as run:
            for count in range(1, 6):
                await run.send(b"".join(data(n, delta(n, count, b"x")) for n in range(2)))
            odd = [delta(n, 9, b"x").replace(b'number":9', b'number":' + number) for n in range(2)]
            calls: list[bytes] = []
            for attempt in run.attempts:
                attempt.on_body = lambda data, now: calls.append(data)  # type: ignore[method-assign]
            await run.send(b"".join(data(n, odd[n]) for n in range(2)))
            assert calls == odd

    asyncio.run(main())


def test_events_of_one_read_are_one_write_for_each_connection() -> None:
    async def main() -> None:
        with relayed(FrameClient, 4) as run:
            await run.begin()
            writes = [client.frames for client in run.clients]
            for each in writes:
                each.clear()
            await run.send(b"".join(data(n, event(n, b" y")) for n in (3, 1, 2, 0)))
            assert [len(each) for each in writes] == [1, 1, 1, 1]
            assert writes[0] is writes[1]

    asyncio.run(main())


@CLIENTS
def test_several_events_of_a_stream_in_one_read_keep_their_order(kind: type[SocketClient]) -> None:
    async def main() -> None:
        with relayed(kind, 2) as run:
            await run.begin()
            texts = [b"%d" % number for number in range(30)]
            await run.send(b"".join(data(n, event(n, text)) for text in texts for n in range(2)))
            for number, client in enumerate(run.clients):
                expected = event(number, b"x") * 3 + b"".join(event(number, text) for text in texts)
                assert client.received() == expected
                run.attempts[number].leave_fast_path()
                assert run.attempts[number].seen.token_events == 33
                assert sum(run.attempts[number].seen.itl_bucket_counts) == 32

    asyncio.run(main())


@CLIENTS
def test_a_client_that_has_gone_gets_nothing_and_disturbs_nobody(kind: type[SocketClient]) -> None:
    async def main() -> None:
        with relayed(kind, 2) as run:
            await run.begin()
            gone, stays = run.clients
            before = gone.received()
            run.server.data_received(data(0, event(0, b"late")) + data(1, event(1, b"late")))
            gone.path = None
            gone.listener.on_disconnect()
            await run.settle()
            assert run.attempts[0].ended.result() is TransportResult.CLIENT_GONE
            assert gone.received() in (b"", before)
            assert stays.received().endswith(event(1, b"late"))
            await run.send(data(0, event(0, b"later")) + data(1, event(1, b"later")))
            assert stays.received().endswith(event(1, b"later"))

    asyncio.run(main())


def test_a_socket_that_is_full_leaves_its_lane() -> None:
    async def main() -> None:
        with relayed(SocketClient, 2) as run:
            await run.begin()
            full, other = run.clients
            sent = 3
            while not full.rest:
                await run.send(b"".join(data(n, event(n, b"z" * 3000)) for n in range(2)))
                assert other.received()
                sent += 1
            await run.send(b"".join(data(n, event(n, b"after")) for n in range(2)))
            assert run.server.plain_shapes.keys() == {Relayed.id(1)}
            assert full.received() == event(0, b"x") * 3 + event(0, b"z" * 3000) * (sent - 3) + event(
                0, b"after"
            )

    asyncio.run(main())


def test_a_window_that_is_used_up_leaves_its_lane() -> None:
    class Narrow(FrameClient):
        window = 2000

    async def main() -> None:
        with relayed(Narrow, 2) as run:
            await run.begin()
            texts = [b"%d" % number for number in range(60)]
            for text in texts:
                await run.send(b"".join(data(n, event(n, text)) for n in range(2)))
            for number, client in enumerate(run.clients):
                assert isinstance(client, Narrow)
                assert client.held
                expected = event(number, b"x") * 3 + b"".join(event(number, text) for text in texts)
                assert client.received() == expected
                assert int(client._windows.streams[client.slot]) >= 0
            assert not run.server.plain_shapes

    asyncio.run(main())


@CLIENTS
def test_the_window_towards_the_model_server_is_opened_again(kind: type[SocketClient]) -> None:
    async def main() -> None:
        with relayed(kind, 1) as run:
            await run.begin()
            size = len(event(0, b"z" * 1000))
            for _ in range(3 * WINDOW // size):
                await run.send(data(0, event(0, b"z" * 1000)))
                run.clients[0].received()
                if isinstance(run.clients[0], FrameClient):
                    run.clients[0].frames.clear()
                    run.clients[0]._windows.streams[:] = 1 << 20
            transport = run.server._transport
            assert isinstance(transport, FakeTransport)
            assert transport.written.count(b"\0\0\4\x08\0\0\0\0\1") >= 3
            assert run.server.plain_shapes
            assert not run.attempts[0].ended.done()

    asyncio.run(main())


def granted(run: Relayed, number: int) -> int:
    """Bytes that the model server has been allowed to send in a stream."""
    transport = run.server._transport
    assert isinstance(transport, FakeTransport)
    update = h2.window_update(Relayed.id(number), 0)[:-4]
    parts = bytes(transport.written).split(update)[1:]
    return WINDOW + sum(int.from_bytes(part[:4]) for part in parts)


@pytest.mark.parametrize("text", [b"x", b"\xff", b"\\ud83d\\ude00"])
def test_the_model_server_knows_the_same_window(text: bytes) -> None:
    async def main() -> None:
        with relayed(SocketClient, 1) as run:
            await run.begin()
            sent = 3 * len(event(0, b"x"))
            exchange = run.attempts[0]._exchange
            assert isinstance(exchange, Http2Exchange)
            for _ in range(2 * WINDOW // 400):  # streams leave the fast path and take it again
                batch = [event(0, b"a"), event(0, text), event(0, b"b" * 50), b": keep-alive\n\n"]
                sent += sum(map(len, batch))
                await run.send(b"".join(data(0, each) for each in batch))
                run.clients[0].received()
                if not run.attempts[0]._on_fast_path:
                    assert exchange.window == granted(run, 0) - sent

    asyncio.run(main())


def test_a_whole_window_in_one_read_opens_it_again() -> None:
    async def main() -> None:
        with relayed(FrameClient, 1) as run:
            await run.begin()
            plain = event(0, b"y" * 10)
            client, sent = run.clients[0], 3 * len(event(0, b"x"))
            assert isinstance(client, FrameClient)
            while granted(run, 0) < 4 * WINDOW:
                count = (granted(run, 0) - sent) // len(plain)
                assert count, "the model server may send nothing, and the stream stands still"
                await run.send(data(0, plain) * count)
                await asyncio.sleep(0)  # the connection writes at the end of a turn
                sent += count * len(plain)
                client.frames.clear()
                client._windows.streams[:] = 1 << 20

    asyncio.run(main())


def test_an_event_larger_than_a_chunk_of_the_table_is_relayed() -> None:
    async def main() -> None:
        with relayed(SocketClient, 1) as run:
            await run.begin()
            large = event(0, b"z" * 16_300)
            await run.send(data(0, large) + data(0, event(0, b"y")))
            assert run.clients[0].received() == event(0, b"x") * 3 + large + event(0, b"y")

    asyncio.run(main())
