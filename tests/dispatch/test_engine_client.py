"""An API server's fleet, with engines that do what the test says."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from penstock.dispatch.connections import MAX_QUEUED_BYTES, UNRESPONSIVE_S, EngineState
from penstock.dispatch.engine_client import EngineClient, RoutingHints
from penstock.metrics.bounds import EVENT_BOUNDS, ITL_BOUNDS, TTFT_BOUNDS
from penstock.metrics.histogram import Histogram
from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.row_metrics import RowMetrics
from penstock.streaming.stream import Stream, StreamError
from penstock.streaming.token_log import TokenLog
from penstock.wire.decoding import decode_from_server
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    OVERLOADED,
    PROMPT_GONE,
    UNAVAILABLE,
    Abort,
    EngineInfo,
    GoAway,
    Hello,
    KeptPrefix,
    SamplingParams,
    StreamFailed,
    Submit,
    Welcome,
    encode,
)
from penstock.wire.sockets import RouterSocket, engine_address
from penstock.wire.submits import split_submit

PATIENCE_S = 60.0
INFO = EngineInfo("fake", 100, 100, 8)
PROMPT = b"\1\0\0\0"


class FakeEngine:
    """One end of the wire: what API servers asked for, and answers by hand."""

    def __init__(self, run_dir: str, rank: int) -> None:
        self.socket = RouterSocket(engine_address(run_dir, rank))
        self.rank = rank
        self.asked: list[Submit | Abort] = []
        self._peer = b""

    def look(self) -> None:
        while (received := self.socket.receive()) is not None:
            self._peer, parts = received
            for message in map(decode_from_server, parts):
                if isinstance(message, Hello):
                    self.send(Welcome(ENGINE_PROTOCOL_VERSION, self.rank, 0, INFO, kept_prompt_bytes=1 << 20))
                elif isinstance(message, Submit | Abort):
                    self.asked.append(message)

    def send(self, message: Welcome | StreamFailed | GoAway) -> None:
        assert self.socket.send(self._peer, [encode(message)])

    def refuse(self, code: str = OVERLOADED) -> None:
        """The request asked for last."""
        request = self.asked.pop()
        assert isinstance(request, Submit)
        self.send(StreamFailed(request.stream, 0, code, f"engine {self.rank} is full", 2000 + self.rank))


class FakeReply:
    """Keeps the error that a stream ended with."""

    arrays = False

    def __init__(self) -> None:
        self.errors: list[StreamError] = []

    def on_row(self, *row: object) -> None:
        raise AssertionError("no rows come")

    def on_resumed(self, rank: int, position: int) -> None:
        pass

    def on_failure(self, stream: Stream, error: StreamError) -> None:
        self.errors.append(error)


class Bench:
    """A fleet of ``ranks`` engines with one stream, given to the first of them."""

    def __init__(
        self, run_dir: str, engines: list[FakeEngine], resume_timeout_s: float = 0, lockstep: bool = False
    ) -> None:
        self.engines = engines
        self.streams = OutputProcessor(
            [None] * 100,
            RowMetrics(Histogram(TTFT_BOUNDS), Histogram(ITL_BOUNDS), Histogram(EVENT_BOUNDS)),
            log=TokenLog(),
        )
        places = {engine.rank: engine_address(run_dir, engine.rank) for engine in engines}
        hello = Hello(ENGINE_PROTOCOL_VERSION, 0, 0)
        self.outcomes: Counter[str] = Counter()
        self.engine_client = EngineClient(len(engines), places, hello, lambda info: None, lockstep=lockstep)
        self.engine_client.open(self.streams, resume_timeout_s, self.outcomes)
        self.engine_client.connect()
        self.reply = FakeReply()
        self.stream = Stream(self.reply, 0, 0, lambda data: None)

    async def start(self) -> None:
        await self.until(lambda: all(engine.up for engine in self.engine_client.engines))
        self.streams.open(self.stream, 0.0)
        self.engine_client.submit(self.stream, Submit(self.stream.handle, b"\1\0\0\0", SamplingParams(5, 7)))
        await self.until(lambda: bool(self.engines[0].asked))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                for engine in self.engines:
                    engine.look()
                await asyncio.sleep(0.002)


Scenario = Callable[[Bench], Awaitable[None]]
Run = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs a scenario with three engines."""
    with ExitStack() as stack:

        def run(scenario: Scenario, resume_timeout_s: float = 0, lockstep: bool = False) -> None:
            async def main() -> None:
                engines = [FakeEngine(str(tmp_path), rank) for rank in range(3)]
                for engine in engines:
                    stack.enter_context(closing(engine.socket))
                bench = Bench(str(tmp_path), engines, resume_timeout_s, lockstep)
                try:
                    await bench.start()
                    await scenario(bench)
                finally:
                    bench.engine_client.close("the test is over")

            asyncio.run(main())

        yield run


@pytest.mark.parametrize(("code", "status"), [(OVERLOADED, 429), (UNAVAILABLE, 503)])
def test_a_stream_is_refused_once_every_engine_has_refused_it(run: Run, code: str, status: int) -> None:
    async def scenario(bench: Bench) -> None:
        for rank in range(3):
            await bench.until(lambda engine=bench.engines[rank]: bool(engine.asked))
            assert bench.reply.errors == []
            assert bench.stream.rank == rank
            bench.engines[rank].refuse(code)
        await bench.until(lambda: bool(bench.reply.errors))
        assert bench.reply.errors == [StreamError(status, code, "engine 2 is full", 2002)]
        assert len(bench.streams) == 0
        assert [engine.submitted for engine in bench.engine_client.engines] == [1, 1, 1]

    run(scenario)


def test_a_stream_nobody_waits_for_is_given_to_no_other_engine(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        bench.streams.discard(bench.stream)
        bench.engine_client.abort(bench.stream)
        await bench.until(lambda: len(bench.engines[0].asked) == 2)
        assert bench.engines[0].asked.pop() == Abort([bench.stream.handle])
        bench.engines[0].refuse()
        await bench.until(lambda: len(bench.streams) == 0)
        assert [engine.asked for engine in bench.engines] == [[], [], []]

    run(scenario)


def test_the_streams_of_a_request_are_one_message_per_engine(run: Run) -> None:
    """They differ in handle and seed alone, whichever reason submits them to the same engine."""

    async def scenario(bench: Bench) -> None:
        schema = "x" * 2_000_000
        handles = []
        for index in range(100):
            stream = Stream(bench.reply, index, 1, lambda data: None)
            handles.append(bench.streams.open(stream, 0.0))
            request = Submit(stream.handle, PROMPT, SamplingParams(5, index, grammar=schema))
            bench.engine_client.submit(stream, request)
        assert bench.engine_client.engines[1].queued_bytes < 3_000_000
        await bench.until(lambda: bool(bench.engines[1].asked))
        (joined,) = bench.engines[1].asked
        assert isinstance(joined, Submit)
        streams = list(split_submit(joined))
        assert [request.stream for request in streams] == handles
        assert [request.sampling.seed for request in streams] == list(range(100))

        bench.engines[1].send(GoAway("restart"))
        await bench.until(lambda: sum(len(engine.asked) for engine in bench.engines) == 4)
        resumed = [engine.asked[-1] for engine in (bench.engines[0], bench.engines[2])]
        assert all(isinstance(request, Submit) for request in resumed)
        again = [one.stream for request in resumed for one in split_submit(request)]
        assert sorted(again) == sorted(handles)

    run(scenario, resume_timeout_s=60)


LONG = bytes(range(1, 5)) * 5000


def submit_long(bench: Bench, more: bytes, rank: int = 1) -> tuple[Stream, FakeReply]:
    """Submit a turn that goes on from LONG."""
    reply = FakeReply()
    stream = Stream(reply, 0, rank, lambda data: None)
    bench.streams.open(stream, 0.0)
    bench.engine_client.submit(stream, Submit(stream.handle, LONG + more, SamplingParams(5, 1)))
    return stream, reply


async def asked_last(bench: Bench, number: int, rank: int = 1) -> Submit:
    """The engine's request of this number, counted from 1."""
    await bench.until(lambda: len(bench.engines[rank].asked) == number)
    request = bench.engines[rank].asked[-1]
    assert isinstance(request, Submit)
    return request


def test_a_prompt_that_the_engine_keeps_no_longer_is_sent_again_whole_and_once(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        engine = bench.engines[1]
        submit_long(bench, b"\1\0\0\0")
        assert (await asked_last(bench, 1)).keep == 1
        stream, reply = submit_long(bench, b"\1\0\0\0\2\0\0\0")
        short = await asked_last(bench, 2)
        assert (short.prompt, short.prefix) == (b"\2\0\0\0", KeptPrefix(1, 5001, replaced=True))
        engine.send(StreamFailed(stream.handle, 0, PROMPT_GONE, "gone"))
        whole = await asked_last(bench, 3)
        assert (whole.stream, whole.prompt) == (stream.handle, LONG + b"\1\0\0\0\2\0\0\0")
        assert (whole.prefix, whole.keep) == (None, 0)
        submit_long(bench, b"\3\0\0\0")
        assert (await asked_last(bench, 4)).prefix is None, "it may keep nothing any more"
        assert reply.errors == []
        engine.send(StreamFailed(stream.handle, 0, PROMPT_GONE, "a defect"))
        await bench.until(lambda: bool(reply.errors))
        assert reply.errors == [StreamError(500, PROMPT_GONE, "a defect")]

    run(scenario)


def test_a_stream_that_was_dropped_meanwhile_is_not_sent_again(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        stream, _ = submit_long(bench, b"\1\0\0\0")
        await asked_last(bench, 1)
        bench.streams.discard(stream)
        bench.engine_client.abort(stream)
        await bench.until(lambda: len(bench.engines[1].asked) == 2)
        bench.engines[1].send(StreamFailed(stream.handle, 0, PROMPT_GONE, "gone"))
        await bench.until(lambda: bench.streams.streams[stream.handle] is not stream)
        assert len(bench.engines[1].asked) == 2

    run(scenario)


def test_another_engine_and_a_new_connection_get_whole_prompts(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        stream, _ = submit_long(bench, b"\1\0\0\0")
        await asked_last(bench, 1)
        bench.engines[1].send(GoAway("restart"))

        def resumed() -> list[Submit]:
            others = bench.engines[0].asked + bench.engines[2].asked
            return [each for each in others if isinstance(each, Submit) and each.stream == stream.handle]

        await bench.until(lambda: bool(resumed()))
        (request,) = resumed()
        assert (request.prompt, request.prefix, request.keep) == (LONG + b"\1\0\0\0", None, 0)
        await bench.until(lambda: bench.engine_client.engines[1].up)
        submit_long(bench, b"\2\0\0\0")
        assert (await asked_last(bench, 2)).prefix is None

    run(scenario, resume_timeout_s=60)


def test_requests_of_different_clients_are_messages_of_their_own(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        for index in range(40):
            stream = Stream(FakeReply(), 0, 2, lambda data: None)
            bench.streams.open(stream, 0.0)
            request = Submit(stream.handle, PROMPT, SamplingParams(5, index))
            bench.engine_client.submit(stream, request)
        await bench.until(lambda: len(bench.engines[2].asked) == 40)
        assert all(isinstance(asked, Submit) and not asked.choices for asked in bench.engines[2].asked)

    run(scenario)


def test_bytes_that_an_engine_has_not_accepted_are_bounded(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        client, schema = bench.engine_client, "x" * (MAX_QUEUED_BYTES // 4)
        for _ in range(12):
            assert not client.full()
            engine = client.pick()
            assert engine is not None
            stream = Stream(FakeReply(), 0, engine.rank, lambda data: None)
            bench.streams.open(stream, 0.0)
            client.submit(stream, Submit(stream.handle, PROMPT, SamplingParams(5, 0, grammar=schema)))
        assert client.full()
        assert client.full(RoutingHints(rank=1))
        slow = client.engines[1]
        submitted = slow.submitted
        slow.update_load(
            step=1, waiting=1, running=0, kv_used=0.0, accepted=submitted - 1, now=time.monotonic()
        )
        assert slow.queued_bytes < MAX_QUEUED_BYTES // 2
        assert not client.full()
        assert client.pick() is slow
        slow.clear()
        assert slow.queued_bytes == 0

    run(scenario)


def test_a_request_that_cannot_be_encoded_fails_alone(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        client, engine = bench.engine_client, bench.engine_client.engines[1]
        replies = [FakeReply() for _ in range(3)]
        for reply, salt in zip(replies, ("a", "\ud800", "c"), strict=True):
            stream = Stream(reply, 0, 1, lambda data: None)
            bench.streams.open(stream, 0.0)
            client.submit(stream, Submit(stream.handle, PROMPT, SamplingParams(5, 0), cache_salt=salt))
        await bench.until(lambda: len(bench.engines[1].asked) == 2)
        assert [len(reply.errors) for reply in replies] == [0, 1, 0]
        assert replies[1].errors[0].code == "internal_error"
        assert engine.submitted == 2
        assert len(bench.streams) == 3, "with the one of the bench"

    run(scenario)


def test_other_failures_are_final(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        bench.engines[0].send(StreamFailed(bench.stream.handle, 0, "invalid_request", "too long"))
        await bench.until(lambda: bool(bench.reply.errors))
        assert bench.reply.errors == [StreamError(400, "invalid_request", "too long")]

    run(scenario)


def test_a_message_of_an_engine_names_the_field(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        refusal = "prompt: token id 9, but the vocabulary has 5"
        bench.engines[0].send(StreamFailed(bench.stream.handle, 0, "invalid_request", refusal))
        await bench.until(lambda: bool(bench.reply.errors))
        assert bench.reply.errors == [StreamError(400, "invalid_request", refusal, param="prompt")]

    run(scenario)


def test_a_stream_of_engines_in_lock_step_goes_to_none_that_is_about_to_end(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        bench.engines[0].asked.clear()
        bench.engines[0].send(GoAway("broken"))
        await bench.until(lambda: not bench.engine_client.engines[0].up)
        assert [engine.up for engine in bench.engine_client.engines] == [False] * 3
        assert bench.outcomes == {}
        await bench.until(lambda: bench.outcomes["resumed"] == 1)
        assert all(engine.up for engine in bench.engine_client.engines)
        await bench.until(lambda: any(engine.asked for engine in bench.engines))
        assert bench.stream.failed_resumes == 0
        assert sum(len(engine.asked) for engine in bench.engines) == 1

    run(scenario, resume_timeout_s=PATIENCE_S, lockstep=True)


def test_the_load_of_an_engine_has_what_it_cannot_have_counted() -> None:
    engine = EngineState(0)
    engine.submitted = 5
    assert engine.load == 5
    engine.update_load(step=7, waiting=2, running=10, kv_used=0.001, accepted=3, now=1.0)
    assert engine.load == 14
    engine.update_load(step=6, waiting=99, running=0, kv_used=0.0, accepted=0, now=1.0)
    assert engine.load == 14, "older than what is known"
    engine.update_load(step=7, waiting=0, running=0, kv_used=0.0, accepted=5, now=1.0)
    assert engine.load == 0


def test_an_engine_that_takes_nothing_is_silent_until_it_does() -> None:
    engine = EngineState(0)
    assert not engine.is_unresponsive(now=1e9)
    engine.on_submit(now=10.0)
    engine.on_submit(now=11.0)
    assert not engine.is_unresponsive(now=10.0 + UNRESPONSIVE_S)
    assert engine.is_unresponsive(now=10.1 + UNRESPONSIVE_S)
    engine.update_load(step=1, waiting=0, running=1, kv_used=0.0, accepted=0, now=12.0)
    assert engine.is_unresponsive(now=10.1 + UNRESPONSIVE_S), "it ran, but took nothing"
    engine.update_load(step=2, waiting=0, running=1, kv_used=0.0, accepted=1, now=13.0)
    assert not engine.is_unresponsive(now=13.0)
    assert engine.is_unresponsive(now=13.1 + UNRESPONSIVE_S), "there is one more"
    engine.update_load(step=3, waiting=0, running=2, kv_used=0.0, accepted=2, now=20.0)
    assert not engine.is_unresponsive(now=1e9)


def test_new_streams_avoid_a_silent_engine_while_there_is_another(run: Run) -> None:
    async def scenario(bench: Bench) -> None:
        long_ago = time.monotonic() - UNRESPONSIVE_S - 1
        _, silent, busy = bench.engine_client.engines
        bench.engine_client.set_draining([0])
        busy.update_load(1, waiting=50, running=50, kv_used=0.0, accepted=0, now=long_ago)
        silent.on_submit(long_ago)
        assert bench.engine_client.pick() is busy
        busy.on_submit(long_ago)
        assert bench.engine_client.pick() is silent

    run(scenario)


def test_what_is_not_counted_yet_stands_for_the_other_api_servers_too() -> None:
    engine = EngineState(0, servers=4)
    engine.on_submit(now=0.0)
    engine.on_submit(now=0.0)
    assert engine.load == 8
    engine.update_load(step=1, waiting=0, running=7, kv_used=0.0, accepted=2, now=1.0)
    assert engine.load == 7
