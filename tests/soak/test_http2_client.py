"""Clients over HTTP/2 read, leave and share connections; the server is that of another library."""

from __future__ import annotations

import asyncio
import random

import h2.connection
import h2.errors
import pytest

from penstock.http.http2.frames import DATA, END_HEADERS, HEADERS, frame, settings_frame
from tests.bench.conftest import EVENT
from tests.bench.load.http2_server import HEAD, Scripted2
from tests.http2_client import Http2Client
from tests.soak.exchange import SentRequest
from tests.soak.http2_client import Http2ClientPool
from tests.soak.received_reply import ReceivedReply
from tests.soak.request_mix import COMPLETIONS, ClientBehaviour, RequestSpec


def spec(
    behaviour: ClientBehaviour = ClientBehaviour.READ, events: int = 0, wait_s: float = 0.0
) -> RequestSpec:
    return RequestSpec(COMPLETIONS, {"prompt": "x"}, behaviour, events=events, wait_s=wait_s)


def ask(script: Scripted2, *specs: RequestSpec, seconds: float = 60.0) -> list[SentRequest]:
    """The first one, and then the others at the same time."""

    class AlwaysLow(random.Random):
        def random(self) -> float:
            return 0.0

    async def run() -> list[SentRequest]:
        clients = Http2ClientPool(f"http://127.0.0.1:{script.port}", AlwaysLow())
        try:
            first = await clients.send(specs[0], seconds)
            return [first, *await asyncio.gather(*(clients.send(each, seconds) for each in specs[1:]))]
        finally:
            clients.close()

    return asyncio.run(run())


def part(connection: h2.connection.H2Connection, number: int) -> None:
    """A reply that does not end."""
    connection.send_headers(number, HEAD)
    for _ in range(3):
        connection.send_data(number, EVENT)


def test_requests_share_a_connection_however_they_read(scripted2: Scripted2) -> None:
    attempts = ask(
        scripted2,
        spec(),
        spec(ClientBehaviour.SLOW),
        spec(ClientBehaviour.STALL, wait_s=0.01),
        spec(ClientBehaviour.LEAVE_LATE, events=1000),
    )
    assert all(each.seen.whole and each.seen.done and not each.left for each in attempts)
    assert len({each.port for each in attempts}) == scripted2.connections == 1
    assert scripted2.requests[0][1] == b'{"prompt":"x"}'


def test_a_client_that_leaves_resets_its_stream_alone(scripted2: Scripted2) -> None:
    scripted2.reply = lambda number: part
    attempts = ask(
        scripted2,
        spec(ClientBehaviour.LEAVE_LATE, events=2),
        spec(ClientBehaviour.LEAVE_EARLY, wait_s=0.01),
        spec(),
        seconds=0.3,
    )
    assert [(each.left, each.stuck) for each in attempts] == [(True, False), (True, False), (False, True)]
    assert scripted2.connections == 1
    assert scripted2.resets >= 2


@pytest.mark.parametrize(("last", "stale"), [(0, True), (1, False)])
def test_a_request_that_the_server_has_not_begun_is_sent_again(
    scripted2: Scripted2, last: int, stale: bool
) -> None:
    scripted2.reply = lambda number: lambda connection, _: connection.close_connection(last_stream_id=last)
    scripted2.closing = lambda number: True
    (attempt,) = ask(scripted2, spec())
    assert (attempt.stale, attempt.left, attempt.stuck) == (stale, False, False)


def test_a_stream_that_is_cut(scripted2: Scripted2) -> None:
    def cut(connection: h2.connection.H2Connection, number: int) -> None:
        part(connection, number)
        connection.reset_stream(number, h2.errors.ErrorCodes.CANCEL)

    scripted2.reply = lambda number: cut
    (attempt,) = ask(scripted2, spec())
    assert (attempt.stale, attempt.left, attempt.seen.events, attempt.seen.whole) == (False, False, 3, False)
    assert attempt.seen.cut_reason == "CANCEL"


@pytest.mark.parametrize(
    ("frames", "fault"),
    [
        (frame(DATA, 0, 1, bytes(10)), "DATA before HEADERS"),
        (frame(HEADERS, END_HEADERS, 1, b"\x88") + frame(DATA, 0, 1, bytes(101)), "beyond the window"),
        (frame(HEADERS, END_HEADERS, 1, b"\x88") * 2, "a second reply"),
        (frame(HEADERS, END_HEADERS, 3, b"\x88"), "stream 3, which is idle"),
        (frame(HEADERS, 0, 1, b"\x88") + settings_frame({}), "a header block is interrupted"),
    ],
)
def test_a_server_that_breaks_the_protocol_is_found(frames: bytes, fault: str) -> None:
    client, reply = Http2Client("x", window=100), ReceivedReply()
    client.start("/", b"", reply)
    client.feed(settings_frame({}) + frames)
    assert fault in reply.cut_reason
    assert not client.usable
