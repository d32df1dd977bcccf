"""Comments on silent streams, and on no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache

from penstock.dialects.completions.reply import CompletionReply
from penstock.generation.replies.columns import NOTHING, ColumnsReply, plan_columns
from penstock.generation.replies.keep_alive import KeepAlive
from penstock.generation.replies.reply import TextTables
from penstock.streaming.stream import StreamError
from penstock.wire.frames import FinishReason, TokenFrame
from tests.generation.planning import body, planners, tiny_tokenizer
from tests.generation.replying import Desk, MemorySink, in_loop, tables_of

PLANNER = planners()
COMMENT = ": keep-alive"


@cache
def tables() -> TextTables:
    return tables_of(tiny_tokenizer().raw)


class TellingSink(MemorySink):
    """Says when two comments have come."""

    def __init__(self) -> None:
        super().__init__()
        self.spoken = asyncio.Event()

    def write(self, data: bytes) -> None:
        super().write(data)
        if self.lines().count(COMMENT) == 2:
            self.spoken.set()


class Clocked:
    """A desk whose keep-alive timer is moved by hand; comments after 8 s of silence, a tick every 2 s."""

    def __init__(self) -> None:
        self.desk = Desk(tables())
        self.keep_alive = KeepAlive(self.desk.streams, 8.0)
        self.keep_alive.cancel()

    def tick(self, *times: float) -> None:
        for now in times:
            self.keep_alive.tick(now)

    def deliver(self, frames: list[TokenFrame], now: float) -> None:
        for frame in frames:
            self.desk.streams.process_frame(0, frame, now)


def with_clock(test: Callable[[Clocked], None]) -> Callable[[], None]:
    def run() -> None:
        in_loop(lambda: test(Clocked()))

    return run


@with_clock
def test_a_stream_is_silent_for_eight_seconds_at_most(clocked: Clocked) -> None:
    desk = clocked.desk
    _, sink = desk.streamed(PLANNER.completion(body(stream=True)))
    token = tiny_tokenizer().encode("a", add_special_tokens=False)
    clocked.deliver(desk.rows(0, [token]), 1.0)
    clocked.tick(2, 4, 6)
    assert COMMENT not in sink.lines()
    clocked.tick(8)
    assert sink.lines().count(COMMENT) == 1
    clocked.tick(10, 12)
    assert sink.lines().count(COMMENT) == 1
    clocked.tick(14)
    assert sink.lines().count(COMMENT) == 2
    clocked.deliver(desk.rows(0, [token], FinishReason.LENGTH), 15.0)
    assert len(sink.events()) == 2
    clocked.tick(30)
    assert sink.lines().count(COMMENT) == 2


@with_clock
def test_a_stream_that_speaks_gets_no_comment(clocked: Clocked) -> None:
    desk = clocked.desk
    _, sink = desk.streamed(PLANNER.completion(body(stream=True)))
    token = tiny_tokenizer().encode("a", add_special_tokens=False)
    for second in range(1, 40):
        clocked.deliver(desk.rows(0, [token]), float(second))
        clocked.tick(second + 0.5)
    assert COMMENT not in sink.lines()


@with_clock
def test_a_stream_that_waits_for_its_engine_gets_headers_and_comments(clocked: Clocked) -> None:
    desk = clocked.desk
    _, sink = desk.streamed(PLANNER.completion(body(stream=True)))
    clocked.tick(2, 4, 6, 8)
    assert (sink.starts, sink.lines()) == (1, [COMMENT])
    desk.streams.fail(0, 0, StreamError(503, "overloaded", "full"))
    assert sink.events()[-1]["error"]["code"] == "overloaded"
    assert sink.over.result() is None


@with_clock
def test_a_client_that_does_not_read_gets_no_comment(clocked: Clocked) -> None:
    reply, sink = clocked.desk.streamed(PLANNER.completion(body(stream=True)))
    reply.on_pause()
    clocked.tick(20)
    assert sink.data == b""


@with_clock
def test_a_reply_that_is_not_streamed_gets_none(clocked: Clocked) -> None:
    reply = clocked.desk.collected(PLANNER.completion(body()))
    clocked.tick(20)
    assert not reply.ended


def test_the_timer_goes_on() -> None:
    async def run() -> list[str]:
        desk = Desk(tables())
        reply, _ = desk.streamed(PLANNER.completion(body(stream=True)))
        sink = reply.sink = TellingSink()
        keep_alive = KeepAlive(desk.streams, 0.02)
        await asyncio.wait_for(sink.spoken.wait(), 30)
        keep_alive.cancel()
        return sink.lines()

    assert set(asyncio.run(run())) == {COMMENT}


@with_clock
def test_a_stream_whose_events_have_no_head_yet_is_one_as_well(clocked: Clocked) -> None:
    """As of the Responses API, whose items open later, and of columns."""
    plan = PLANNER.completion(body(stream=True))
    plan_columns(plan)
    own = CompletionReply("r", "m", "assistant")
    _, sink = clocked.desk.streamed(plan, format=ColumnsReply(own, plan))
    clocked.tick(2, 4, 6, 8)
    assert sink.data == NOTHING
