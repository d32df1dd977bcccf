"""What an engine may do without losing its connection, and what closes its own connection alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import pytest

from penstock.dispatch.connections import MESSAGES_PER_READ
from penstock.dispatch.engine_client import MAX_MESSAGE_LENGTH, MAX_RETRY_AFTER_MS
from penstock.dispatch.resumption import RETRY_S
from penstock.logging_setup import RateLimitedLog
from penstock.metrics.snapshot import MAX_SNAPSHOT_BYTES, Series, Snapshot, encode_snapshot
from penstock.streaming.stream import Stream, StreamError
from penstock.wire.frames import FinishReason, encode_frame
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    OVERLOADED,
    Abort,
    EngineMetrics,
    GoAway,
    RpcReply,
    StreamFailed,
    Submit,
    Welcome,
    encode,
)
from tests.hostile.streams.fakes import INFO, ApiServer, Reply, frame_of

END = FinishReason.LENGTH


Test: TypeAlias = Callable[[ApiServer], Awaitable[None] | None]


def with_server(ranks: int, **options: float) -> Callable[[Test], Callable[[], None]]:
    """Runs a test with an API server of so many engines, within a loop."""

    def decorate(test: Test) -> Callable[[], None]:
        def run() -> None:
            async def main() -> None:
                server = ApiServer(ranks, **options)
                try:
                    running = test(server)
                    if running is not None:
                        await running
                finally:
                    server.client.close("over")

            asyncio.run(main())

        return run

    return decorate


def rows(*given: tuple[int, int, list[int], int]) -> list[bytes]:
    return encode_frame(frame_of(given))


@with_server(1)
def test_a_stream_that_ends_and_fails_in_one_step_costs_no_link(server: ApiServer) -> None:
    first, reply = server.open(0)
    other, bystander = server.open(0)
    failure = [encode(StreamFailed(first.handle, 1, "engine_error", "grammar"))]
    server.arrive(0, rows((first.handle, 0, [5], END), (other.handle, 0, [6], 0)), failure, failure)
    server.arrive(0, rows((other.handle, 1, [7], END)))
    assert server.connected(0)
    assert (reply.tokens, reply.end) == ([5], "LENGTH")
    assert (bystander.tokens, bystander.end) == ([6, 7], "LENGTH")
    assert server.client.faults.counts == {(0, "unknown_stream"): 2}


@with_server(2)
def test_a_failure_of_another_engines_stream_is_dropped(server: ApiServer) -> None:
    stream, reply = server.open(0)
    server.arrive(1, [encode(StreamFailed(stream.handle, 0, "engine_error", "not mine"))])
    server.arrive(1, [encode(StreamFailed((1 << 31) - 1, 0, OVERLOADED, "nobody's"))])
    server.arrive(0, rows((stream.handle, 0, [5], END)))
    assert (reply.tokens, reply.end) == ([5], "LENGTH")
    assert server.client.faults.counts == {(1, "unknown_stream"): 2}


@with_server(1)
def test_a_gap_between_frames_that_are_received_together_ends_that_stream(server: ApiServer) -> None:
    gap, reply = server.open(0)
    other, bystander = server.open(0)
    server.arrive(
        0,
        rows((gap.handle, 0, [1], 0), (other.handle, 0, [1], 0)),
        rows((gap.handle, 2, [3], 0), (other.handle, 1, [2], 0)),
    )
    assert (reply.tokens, reply.end) == ([], "engine_error")
    assert bystander.tokens == [1, 2]
    assert server.links[0].sent[-1] == Abort([gap.handle])
    server.arrive(0, rows((gap.handle, 3, [], FinishReason.ABORT)))
    assert server.streams.streams[gap.handle] is None


@with_server(2)
def test_unreadable_messages_cost_only_the_link_that_they_came_on(server: ApiServer) -> None:
    honest, reply = server.open(0)
    moved, other = server.open(1)
    server.arrive(1, rows((moved.handle, 0, [1, 2], 0)), [b"\xc1"])
    assert (server.connected(0), server.connected(1)) == (True, False)
    resumed = server.links[0].sent[-1]
    assert isinstance(resumed, Submit)
    assert (resumed.stream, resumed.resumed) == (moved.handle, 2)
    server.arrive(0, rows((honest.handle, 0, [1], END), (moved.handle, 2, [3], END)))
    assert (reply.tokens, other.tokens) == ([1], [1, 2, 3])
    assert server.client.faults.counts == {(1, "unreadable"): 1}


@with_server(2)
def test_a_stream_that_was_accepted_once_is_not_refused_by_another_engine(server: ApiServer) -> None:
    moved, reply = server.open(1)
    server.arrive(1, [encode(GoAway("over"))])
    refusal = StreamFailed(moved.handle, 0, OVERLOADED, "no memory")
    server.arrive(0, [encode(refusal)])
    server.client.resume(time.monotonic())
    assert (reply.end, len(server.links[0].sent)) == ("", 1)
    server.client.resume(time.monotonic() + RETRY_S)
    server.connections._flush_all()
    assert (reply.end, len(server.links[0].sent)) == ("", 2)
    server.arrive(0, rows((moved.handle, 0, [1], END)))
    assert (reply.tokens, reply.end) == ([1], "LENGTH")


@with_server(1)
def test_a_fault_of_the_receiver_costs_one_link_and_raises_nothing(server: ApiServer) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("a fault of ours")

    _, reply = server.open(0)
    server.client.calls.on_reply = fail  # type: ignore[method-assign]
    server.arrive(0, [encode(RpcReply(1))])
    assert not server.connected(0)
    assert not reply.end, "the stream waits for another engine"


@with_server(1)
async def test_a_flood_is_received_a_part_at_a_time(server: ApiServer) -> None:
    failure = [encode(StreamFailed(7, 0, "engine_error", "again"))]
    server.arrive(0, *[failure] * (3 * MESSAGES_PER_READ))
    assert server.client.faults.counts[0, "unknown_stream"] == MESSAGES_PER_READ
    for _ in range(4):
        await asyncio.sleep(0)
    assert server.client.faults.counts[0, "unknown_stream"] == 3 * MESSAGES_PER_READ


@with_server(1)
def test_what_an_engine_does_wrong_is_logged_once_a_minute(server: ApiServer) -> None:
    lines: list[str] = []

    class Recorder:
        def log(self, level: int, message: str, *arguments: object, **how: object) -> None:
            lines.append(message % arguments)

    log = RateLimitedLog(Recorder(), clock=lambda: 0.0)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.streaming.engine_faults._warn", log)
        for handle in range(1000):
            server.arrive(0, rows((handle, 0, [1], 0)))
    assert lines == ["engine 0: a row of stream 0, which it does not run"]


@with_server(1)
def test_error_texts_of_engines_are_cut(server: ApiServer) -> None:
    errors: list[StreamError] = []
    stream, reply = server.open(0)
    reply.on_failure = lambda stream, error: errors.append(error)  # type: ignore[method-assign]
    failure = StreamFailed(stream.handle, 0, "engine_error", "m" * 1_000_000, (1 << 31) - 1)
    server.arrive(0, [encode(failure)])
    (error,) = errors
    assert (len(error.message), error.retry_after_ms) == (MAX_MESSAGE_LENGTH, MAX_RETRY_AFTER_MS)


@with_server(1)
def test_clients_get_no_code_that_an_engine_has_invented(server: ApiServer) -> None:
    stream, reply = server.open(0)
    server.arrive(0, [encode(StreamFailed(stream.handle, 0, "c" * 10_000, "no"))])
    assert reply.end == "engine_error"
    assert server.client.faults.counts == {(0, "invalid_code"): 1}


@with_server(2)
def test_an_engine_reports_only_its_own_metrics(server: ApiServer) -> None:
    series = [Series("penstock:engine_steps", ("m", "0"), 1.0)]

    def report(rank: int, snapshot: Snapshot) -> None:
        server.arrive(rank, [encode(EngineMetrics(encode_snapshot(snapshot)))])

    report(0, Snapshot("engine 0", 0, 1, series))
    report(0, Snapshot("engine 1", 0, 99, series))
    report(0, Snapshot("engine 0", 5, 99, series))
    for number in range(100):
        report(0, Snapshot(f"engine {number + 7}", 0, 1, series))
    report(
        0, Snapshot("engine 0", 0, 2, [Series("penstock:engine_steps", ("x" * MAX_SNAPSHOT_BYTES, "0"), 1)])
    )
    assert list(server.client.board.starts()) == [("engine 0", 0, 0)]
    assert server.client.board.find_entry(("engine 0", 0, 0)).sequence == 1
    assert server.client.faults.counts == {(0, "invalid_metrics"): 103}
    assert server.connected(0)


@with_server(1)
def test_a_second_welcome_closes_the_connection(server: ApiServer) -> None:
    server.arrive(0, [encode(Welcome(ENGINE_PROTOCOL_VERSION, 0, 7, INFO))])
    assert not server.connected(0)
    assert server.client.faults.counts == {(0, "unreadable"): 1}


@with_server(1)
def test_a_stream_that_was_not_submitted_is_free_at_once(server: ApiServer) -> None:
    reply = Reply()
    for opened in (False, True):
        stream = Stream(reply, 0, 0, lambda data: None)
        if opened:
            server.streams.open(stream, 0.0)
        server.streams.discard(stream)
        server.client.abort(stream)
    assert len(server.streams) == 0
    assert server.links[0].sent == []


@with_server(3)
def test_a_request_that_names_its_engine_is_refused_with_it(server: ApiServer) -> None:
    stream, reply = server.open(1)
    stream.pinned_rank = 1
    server.arrive(1, [encode(StreamFailed(stream.handle, 0, OVERLOADED, "full"))])
    assert reply.end == OVERLOADED
    assert [len(link.sent) for link in server.links] == [0, 1, 0]


@with_server(3, resume_timeout_s=5.0)
def test_a_request_that_names_its_engine_waits_for_it_alone(server: ApiServer) -> None:
    (pinned, reply), (free, other) = server.open(1), server.open(1)
    pinned.pinned_rank = 1
    server.connections.disconnect(server.engine(1), "lost")
    assert server.streams.is_unassigned(pinned)
    assert free.rank in (0, 2)
    server.connect(1)
    submit = server.links[1].sent[0]
    assert isinstance(submit, Submit)
    assert (submit.stream, pinned.rank) == (pinned.handle, 1)
    server.connections.disconnect(server.engine(1), "lost")
    errors: list[StreamError] = []
    reply.on_failure = lambda stream, error: errors.append(error)  # type: ignore[method-assign]
    server.client.resume(1e12)
    (error,) = errors
    assert (error.status, error.code) == (503, "engine_died")
    assert "Engine 1, the only one that may run this request (X-data-parallel-rank)" in error.message
    assert other.end == ""
