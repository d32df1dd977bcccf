"""The server's side of a WebSocket: pings, ends and limits, with a channel and a clock of the test."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from penstock.http.http1.chunked_body import ChunkRounds
from penstock.http.server_state import LINGER_S, Limits, ServerState
from penstock.http.websocket.codec import Closed, Codec, Event, Ping, Pong
from penstock.http.websocket.socket import WebSocket
from penstock.http.write_target import WriteTarget

KEEP_ALIVE_S, TIMEOUT_S = 60.0, 10.0


class Rounds(ChunkRounds):
    """Without an event loop, the same round goes on."""

    def _schedule(self) -> None:
        with contextlib.suppress(RuntimeError):
            super()._schedule()
            return
        self._scheduled = False


class Peer:
    """A channel with a client at its other end."""

    write_paused = False
    write_target: WriteTarget | None = None

    def __init__(self, *, held: int = 1 << 20) -> None:
        self.now = 0.0
        limits = Limits(keep_alive_timeout_s=KEEP_ALIVE_S, max_held_bytes=held)
        self.state = ServerState(limits=limits, clock=lambda: self.now)
        self.state.chunk_rounds = Rounds()
        self.codec = Codec(client=True, max_bytes=1 << 20)
        self.got: list[Event] = []
        self.reading, self.ended, self.aborted = True, False, False
        self.socket = WebSocket(self, 1000)
        self.messages: list[bytes] = []
        self.busy = self.full = False
        self.held = 0
        self.closed = 0
        self.socket.open(self)

    # -- the channel

    def write(self, data: bytes) -> None:
        self.codec.receive(data)
        self.got += self.codec.events()

    def unread(self) -> int:
        return 0

    def read_on(self, on: bool, /) -> None:
        self.reading = on

    def end(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.aborted = True

    # -- the handler

    def on_message(self, data: bytes) -> None:
        self.messages.append(data)

    def on_pause(self) -> None: ...

    def on_resume(self) -> None: ...

    def on_closed(self) -> None:
        self.closed += 1

    # -- the clock

    def pass_time(self, seconds: float, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        for _ in range(int(seconds)):
            self.now += 1
            self.socket.check(self.now, TIMEOUT_S, keep_alive_s)


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_messages_pings_and_the_end() -> None:
    peer = Peer()
    text, ping = peer.codec.text(b"hi"), peer.codec.ping(b"?")
    peer.socket.on_data(text + ping)
    assert (peer.messages, peer.got) == ([b"hi"], [Pong(b"?")])
    peer.socket.on_data(peer.codec.close(1000))
    assert peer.got[1:] == [Closed(1000, "")]
    assert (peer.closed, peer.ended) == (1, True)


def test_a_silent_client_is_pinged_and_cut() -> None:
    peer = Peer()
    peer.pass_time(KEEP_ALIVE_S)
    assert set(peer.got) == {Ping(b"")}
    assert len(peer.got) == 3
    assert not peer.aborted
    peer.pass_time(1)
    assert (peer.aborted, peer.closed) == (True, 1)


def test_a_client_that_answers_pings_stays() -> None:
    peer = Peer()
    for _ in range(10):
        peer.pass_time(KEEP_ALIVE_S / 2)
        peer.socket.on_data(peer.codec.pong(b""))
    assert (peer.aborted, peer.closed) == (False, 0)


def test_a_message_must_come_in_time() -> None:
    peer = Peer()
    start = peer.codec.text(b"x" * 500)[:-1]
    peer.socket.on_data(start)
    peer.pass_time(TIMEOUT_S)
    assert not peer.got
    peer.pass_time(1)
    assert isinstance(peer.got[0], Closed)
    assert peer.got[0].code == 1008


def test_a_client_that_does_not_answer_the_end_is_cut() -> None:
    peer = Peer()
    peer.socket.shutdown()
    assert peer.got == [Closed(1001, "The server is shutting down.")]
    assert peer.socket.is_over
    peer.pass_time(LINGER_S + 1)
    assert peer.aborted


def test_what_runs_ends_before_the_connection() -> None:
    peer = Peer()
    peer.busy, peer.state.ending = True, True
    peer.socket.shutdown()
    peer.pass_time(3, keep_alive_s=1.0)
    assert not peer.got
    peer.busy = False
    peer.socket.on_idle()
    assert isinstance(peer.got[0], Closed)
    assert peer.got[0].code == 1001


@pytest.mark.parametrize(("ending", "code"), [(False, 1013), (True, 1001)])
def test_idle_connections_end_where_others_wait(ending: bool, code: int) -> None:
    peer = Peer()
    peer.state.ending = ending
    peer.pass_time(2, keep_alive_s=1.0)
    assert isinstance(peer.got[0], Closed)
    assert peer.got[0].code == code


def test_a_full_handler_stops_the_reading() -> None:
    peer = Peer()
    peer.full = True
    peer.socket.on_data(peer.codec.text(b"one"))
    assert (peer.messages, peer.reading) == ([], False)
    peer.full = False
    peer.socket.read_on()
    assert (peer.messages, peer.reading) == ([b"one"], True)


def test_a_flood_is_parsed_in_turns_with_others() -> None:
    asyncio.run(_flood())


async def _flood() -> None:
    peer = Peer()
    flood = peer.codec.text(b"x") * 3000
    peer.socket.on_data(flood)
    first = len(peer.messages)
    assert 0 < first < 1000
    assert not peer.reading
    for _ in range(20):
        await turns()
    assert len(peer.messages) == 3000
    assert peer.reading


def test_the_budget_of_received_bytes_counts_messages() -> None:
    peer = Peer(held=400)
    message = peer.codec.text(b"x" * 600)
    peer.socket.on_data(message[:310])
    assert peer.state.budget.held > 290
    peer.socket.on_data(message[310:500])
    assert isinstance(peer.got[0], Closed)
    assert peer.got[0].code == 1013
    assert peer.state.budget.held == 0
