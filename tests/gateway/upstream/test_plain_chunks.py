"""Plain events over HTTP/1.1: they pass the parser by, in their order, whatever the chunks and reads are."""

from __future__ import annotations

import asyncio
import random

import pytest

from penstock.gateway.responses.event_template import EventTemplate
from penstock.gateway.upstream.connection_pool import ConnectionPool
from penstock.gateway.upstream.exchange import Failure, UpstreamRequest
from penstock.gateway.upstream.http1_connection import Http1UpstreamConnection
from penstock.gateway.upstream.reply_scanner import PlainEventShape, plain_chunk
from penstock.gateway.upstream.upstream import Upstream
from tests.gateway.upstream.receivers import WAIT_S, Collected
from tests.gateway.upstream.test_http2_faults import FakeTransport

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
REQUEST = UpstreamRequest(b"POST", b"/x", [], b"{}")


def event(text: str, number: int | None = None) -> bytes:
    named = "" if number is None else f',"sequence_number":{number}'
    return f'data: {{"choices":[{{"text":"{text}"{named}}}]}}\n\n'.encode()


def chunk(data: bytes, length: str = "%x") -> bytes:
    return (length % len(data)).encode() + b"\r\n" + data + b"\r\n"


class Stream(Collected):
    """Takes the fast path as an attempt does, and is the relay of its plain events."""

    def __init__(self, learned: bytes) -> None:
        super().__init__()
        self.template = EventTemplate()
        self.template.learn(learned)
        self.connection: Http1UpstreamConnection
        self.plain = 0
        self._on_fast_path = False

    def on_body(self, data: bytes, now: float) -> None:
        if self._on_fast_path:
            self._on_fast_path = False
            self.connection.leave_fast_path(0)
        super().on_body(data, now)
        if self.template.matches(data) and self.template.parts is not None:
            parts = self.template.parts
            shape = PlainEventShape(*parts, len(parts.head) + len(parts.tail), 7)
            self._on_fast_path = bool(self.connection.enter_fast_path(shape, self, len(data)))

    def relay_events(self, slots: list[int], events: list[bytes], texts: list[bytes], now: float) -> None:
        (data,) = events
        assert slots == [7]
        assert self._on_fast_path
        if self.template.matches(data):
            self.plain += 1
            super().on_body(data, now)
        else:
            self.on_body(data, now)

    async def receive(self, data: bytes) -> None:
        """``data`` comes, and the connection has the turns of the event loop that it asks for."""
        self.connection.data_received(data)
        async with asyncio.timeout(WAIT_S):
            while self.connection._waits_for_turn:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0)


def stream(learned: bytes) -> Stream:
    """A stream whose head has come."""
    connection = ConnectionPool("http://127.0.0.1:1", Upstream(http2="off")).make_http1()
    connection.connection_made(FakeTransport())
    collected = Stream(learned)
    collected.connection = connection
    connection.send(REQUEST, collected)
    connection.data_received(HEAD)
    return collected


@pytest.mark.parametrize("numbered", [False, True])
def test_events_of_one_chunk_and_read_each_pass_the_parser_by(numbered: bool) -> None:
    async def main() -> None:
        events = [event(f"w{n}", n + 1 if numbered else None) for n in range(50)]
        collected = stream(events[0])
        for each in events:
            await collected.receive(chunk(each))
        assert collected.plain == 49
        await collected.receive(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        assert collected.body == b"".join(events) + b"data: [DONE]\n\n"
        assert collected.end == "end"
        assert collected.connection.usable

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_chunks_and_reads_are_nothing_is_lost_or_overtaken(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        texts = ["a", "bb", "é", "\\n", 'x\\"y', "", "5", "data: ", "c" * 300, "d" * 5000, "4\\r\\n"]
        events = [event(rng.choice(texts), rng.choice([None, 1, 22, 0])) for _ in range(120)]
        content, wire, reads = b"", b"", list[bytes]()
        while events:
            data = b"".join(events.pop() for _ in range(min(rng.choice([1, 1, 1, 1, 2, 3]), len(events))))
            content += data
            pieces = (
                [data] if rng.random() < 0.8 else [data[: (cut := rng.randrange(1, len(data)))], data[cut:]]
            )
            for piece in pieces:
                piece = chunk(piece, rng.choice(["%x", "%x", "%x", "%x", "%X", "0%x", "%x;a=b"]))
                if rng.random() < 0.7:
                    reads.append(piece)
                else:
                    cut = rng.randrange(1, len(piece))
                    reads += [piece[:cut], piece[cut:]]
        if rng.random() < 0.5:  # TCP joins them
            wire = b"".join(reads)
            reads = [wire[at : at + 700] for at in range(0, len(wire), 700)]
        collected = stream(event("x"))
        for read in [*reads, b"0\r\n\r\n"]:
            await collected.receive(read)
        assert collected.body == content
        assert collected.end == "end"

    asyncio.run(main())


def test_an_event_without_the_end_of_its_chunk_does_not_enter() -> None:
    async def main() -> None:
        collected = stream(event("a"))
        await collected.receive(chunk(event("b"))[:-2])
        await collected.receive(b"\r\n" + chunk(event("c")))
        await collected.receive(chunk(event("d")))
        assert (collected.body, collected.plain) == (event("b") + event("c") + event("d"), 1)
        # content that looks like a chunk: the parser alone knows that it is none
        trap = event("e") + chunk(event("f"))
        await collected.receive(b"%x\r\n%b" % (len(trap), trap[:-10]))
        await collected.receive(trap[-10:] + b"\r\n")
        assert collected.body.endswith(trap)

    asyncio.run(main())


def test_a_connection_that_breaks_says_so() -> None:
    async def main() -> None:
        collected = stream(event("a"))
        for text in "abc":
            await collected.receive(chunk(event(text)))
        collected.connection.connection_lost(ConnectionResetError("reset"))
        assert collected.plain == 2
        assert (collected.end, collected.failure) == ("reset", Failure.NETWORK)

    asyncio.run(main())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\r\n",
        b"0\r\n\r\n",
        chunk(event("a"))[:-1],
        chunk(event("a")) + b"\r\n",
        chunk(event("a")) * 2,
        b" " + chunk(event("a")),
        chunk(event("a"), "0x%x"),
        chunk(event("a"), "+%x"),
        chunk(event("a"), "%x "),
        chunk(event("a")).replace(b"text", b"txet"),
        chunk(event("a" * 5000)),
    ],
)
def test_what_is_no_plain_chunk(data: bytes) -> None:
    template = EventTemplate()
    template.learn(event("x"))
    assert template.parts is not None
    shape = PlainEventShape(*template.parts, len(template.parts.head) + len(template.parts.tail), 0)
    assert plain_chunk(data, shape) is None
    assert plain_chunk(chunk(event("a")), shape) == (event("a"), b"a")
