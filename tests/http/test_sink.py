"""A reply over any ASGI server: what is written to the sink arrives, and slow servers slow it down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.http.sink import HIGH_WATER_BYTES, AsgiSink, unframed
from penstock.streaming.stream import chunk


class FakeServer:
    """The two callables of an ASGI server; ``room`` is set while it takes what is sent."""

    def __init__(self) -> None:
        self.room = asyncio.Event()
        self.room.set()
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.room.wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_disconnect(self) -> None:
        self.calls.append("disconnect")

    def on_pause(self) -> None:
        self.calls.append("pause")

    def on_resume(self) -> None:
        self.calls.append("resume")


Scenario = Callable[[FakeServer, AsgiSink, Recorder], Coroutine[Any, Any, None]]


def play(scenario: Scenario) -> FakeServer:
    """Runs the sink beside the scenario until both have ended."""

    async def main() -> FakeServer:
        server, recorder = FakeServer(), Recorder()
        sink = AsgiSink(server.receive, server.send)
        sink.listen(recorder)
        async with asyncio.timeout(30):
            await asyncio.gather(sink.run(), scenario(server, sink, recorder))
        return server

    return asyncio.run(main())


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("contents", [[], [b"a"], [b"a" * 20, b"\r\n0\r\n", b"c"]])
def test_chunks_lose_their_frames(contents: list[bytes]) -> None:
    assert unframed(b"".join(map(chunk, contents))) == b"".join(contents)


def test_what_is_written_arrives_in_order() -> None:
    async def scenario(server: FakeServer, sink: AsgiSink, recorder: Recorder) -> None:
        sink.send(chunk(b"one "), last=False)
        sink.write(chunk(b"two "))
        await settle()
        sink.write(chunk(b"three "))
        sink.send(chunk(b"four"), last=True)

    server = play(scenario)
    assert [message["type"] for message in server.sent[:2]] == ["http.response.start", "http.response.body"]
    assert server.body == b"one two three four"
    assert [message["more_body"] for message in server.sent[1:]][-1] is False


def test_a_server_that_takes_nothing_pauses_the_reply() -> None:
    async def scenario(server: FakeServer, sink: AsgiSink, recorder: Recorder) -> None:
        sink.send(chunk(b"first"), last=False)
        await settle()
        server.room.clear()
        sink.write(chunk(b"x" * HIGH_WATER_BYTES))
        await settle()
        sink.write(chunk(b"x"))
        assert recorder.calls == ["pause"]
        assert sink.unread() == HIGH_WATER_BYTES + 1
        server.room.set()
        await settle()
        assert recorder.calls == ["pause", "resume"]
        assert sink.unread() == 0
        sink.send(b"", last=True)

    play(scenario)


def test_a_cut_reply_never_ends_well() -> None:
    async def scenario(server: FakeServer, sink: AsgiSink, recorder: Recorder) -> None:
        sink.send(chunk(b"first"), last=False)
        await settle()
        server.room.clear()
        sink.write(chunk(b"second"))
        await settle()
        sink.cut()  # run() ends although the server waits for its client

    server = play(scenario)
    assert all(message.get("more_body", True) for message in server.sent)


def test_a_client_that_leaves_is_told_to_the_reply() -> None:
    calls: list[str] = []

    async def scenario(server: FakeServer, sink: AsgiSink, recorder: Recorder) -> None:
        sink.send(chunk(b"first"), last=False)
        await settle()
        server.gone.set()
        await settle()
        calls.extend(recorder.calls)

    play(scenario)
    assert calls == ["disconnect"]


def test_a_reply_that_never_starts_sends_nothing() -> None:
    async def scenario(server: FakeServer, sink: AsgiSink, recorder: Recorder) -> None:
        sink.cut_unless_finished()

    assert play(scenario).sent == []
