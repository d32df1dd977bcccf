"""Replies in whose handling something raises: the request ends once, its streams are aborted, and nothing is
written after its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np
import pytest

from penstock.dispatch.periodic_timer import PeriodicTimer
from penstock.generation.dialect import ReplyFormat
from penstock.generation.replies.keep_alive import KeepAlive
from penstock.generation.replies.parsed_output import ParsedOutput
from penstock.generation.replies.reply import TextTables
from penstock.generation.replies.streamed import StreamedReply
from penstock.http.write_target import WriteTarget
from penstock.streaming.stream import StreamError
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import PromptLogprobs
from tests.generation.planning import body, planners, tiny_tokenizer
from tests.generation.replying import Desk, MemorySink, in_loop, read_stream, tables_of

PLANNER = planners()
PLAIN = tiny_tokenizer().encode("a", add_special_tokens=False)


@cache
def tables() -> TextTables:
    return tables_of(tiny_tokenizer().raw)


def broken(*arguments: object, **fields: object) -> Any:
    raise RuntimeError("a fault of ours")


class BrokenMessage:
    """Whatever it is given or asked for, also the text that a failed stream still holds."""

    called = idle = False
    size = 0
    add = take = end = staticmethod(broken)

    @property
    def parser(self) -> BrokenMessage:
        return self

    def reasoning_tokens(self, total: int) -> None:
        return None


class BrokenFormat:
    """A format, one of whose methods raises."""

    def __init__(self, format: object, method: str) -> None:
        self._format = format
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return broken if name == self._method else getattr(self._format, name)


class Broken:
    """A streamed reply of ``n`` choices, and what became of it."""

    def __init__(self, n: int = 1, **fields: Any) -> None:
        self.desk = Desk(tables())
        self.desk.streams.set_engines(self.desk.engine_client.abort, self.desk.streams.faults)
        plan = PLANNER.completion(body(stream=True, n=n, max_tokens=99, **fields))
        self.reply: StreamedReply
        self.sink: MemorySink
        self.reply, self.sink = self.desk.streamed(plan)
        self.streams = [choice.stream for choice in self.reply.choices if choice.stream is not None]

    def break_format(self, method: str) -> None:
        self.reply.format = cast(ReplyFormat, BrokenFormat(self.reply.format, method))

    def rows(self, *parts: list[int], finish: FinishReason = FinishReason.NONE) -> None:
        """The same rows for all choices, and more of them after a failure."""
        for stream in self.streams:
            self.desk.deliver(self.desk.rows(stream.handle, parts, finish))

    def check(self, *, ended: str, left: int = 0) -> None:
        """``left``: handles that an engine has ended before."""
        assert self.sink.ended == ended
        assert self.sink.over.done(), "nobody was told of the end"
        assert self.desk.outcomes == ["error"]
        assert len(self.desk.engine_client.aborted) == len(self.streams) - left
        written = self.sink.data
        for stream in self.streams:
            stream.write_plain_rows(WriteTarget(descriptor=0))
        if not left:
            self.rows(PLAIN, [*PLAIN, *PLAIN])
            self.rows([], finish=FinishReason.ABORT)
        assert self.sink.data == written
        assert len(self.desk.streams) == 0


def within_loop(test: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        in_loop(test)

    run.__name__ = test.__name__
    return run


@pytest.mark.parametrize("n", [1, 3])
def test_a_row_that_raises_ends_the_request_before_plain_rows_follow(n: int) -> None:
    def test() -> None:
        bench = Broken(n)
        bench.rows(PLAIN, PLAIN)  # the next ones would be written without the reply
        first = bench.streams[0]
        bench.reply.choices[0].parsed = cast(ParsedOutput, BrokenMessage())
        first.stop_plain_rows()
        bench.desk.deliver(bench.desk.rows(first.handle, [PLAIN]))
        assert bench.sink.events()[-1]["error"]["code"] == "internal_error"
        bench.check(ended="finish")

    in_loop(test)


@within_loop
def test_a_first_row_that_raises_leaves_the_error_to_the_http_status() -> None:
    bench = Broken()
    bench.break_format("event")
    bench.reply._plain = False
    bench.rows(PLAIN)
    error = bench.sink.over.result()
    assert error is not None
    assert (error.status, error.code) == (500, "internal_error")
    bench.check(ended="")


@within_loop
def test_a_last_row_that_raises_frees_the_handle() -> None:
    bench = Broken()
    bench.rows(PLAIN)
    bench.break_format("end")
    bench.rows(PLAIN, finish=FinishReason.LENGTH)
    assert bench.sink.events()[-1]["error"]["code"] == "internal_error"
    bench.check(ended="finish", left=1)


@within_loop
def test_a_reply_whose_end_cannot_be_written_is_cut() -> None:
    bench = Broken()
    bench.rows(PLAIN)
    send = bench.sink.send

    def refuse_last(chunks: bytes, *, last: bool) -> None:
        if last:
            broken()
        send(chunks, last=last)

    bench.sink.send = refuse_last  # type: ignore[method-assign]
    bench.desk.streams.fail(0, bench.streams[0].handle, StreamError(500, "engine_error", "it broke"))
    bench.check(ended="cut", left=1)


@within_loop
def test_a_reply_that_raises_when_its_client_reads_again_ends() -> None:
    bench = Broken(2)
    bench.rows(PLAIN)
    bench.reply.on_pause()
    bench.rows(PLAIN)
    bench.reply.choices[1].parsed = cast(ParsedOutput, BrokenMessage())
    bench.reply.on_resume()
    assert bench.sink.events()[-1]["error"]["code"] == "internal_error"
    bench.check(ended="finish")


@within_loop
def test_a_stream_whose_stop_string_was_found_and_whose_reply_raises_ends() -> None:
    bench = Broken(stop=["aa"])
    bench.break_format("event")
    bench.rows(PLAIN, PLAIN)
    assert bench.sink.over.done()
    assert bench.desk.outcomes == ["error"]
    assert bench.desk.engine_client.aborted == bench.streams


@pytest.mark.parametrize(("asked", "position"), [(None, 1), (1, 2), (1, (1 << 31) - 1)])
def test_logprobs_of_a_prompt_that_were_not_asked_for_end_their_stream(
    asked: int | None, position: int
) -> None:
    def test() -> None:
        desk = Desk(tables())
        reply = desk.collected(PLANNER.completion(body(prompt_logprobs=asked)))
        [choice] = reply.choices
        assert choice.stream is not None
        (frame,) = desk.rows(choice.stream.handle, [[]])
        frame.prompt = PromptLogprobs(
            np.zeros(1, np.int32),
            np.array([position], np.int32),
            np.array([[3]], np.int32),
            np.array([[-1.0]], np.float32),
            np.ones(1, np.int32),
        )
        desk.deliver([frame])
        error = reply.done.result()
        assert error is not None
        assert error.code == "engine_error"

    in_loop(test)


@within_loop
def test_a_comment_that_cannot_be_sent_ends_its_stream_alone() -> None:
    desk = Desk(tables())
    replies = [desk.streamed(PLANNER.completion(body(stream=True))) for _ in range(3)]
    replies[0][1].send = broken  # type: ignore[method-assign]
    keep_alive = KeepAlive(desk.streams, 8.0)
    keep_alive.cancel()
    keep_alive.tick(10.0)
    assert [sink.lines() for _, sink in replies] == [[], [": keep-alive"], [": keep-alive"]]
    assert [reply.ended for reply, _ in replies] == [True, False, False]
    keep_alive.tick(20.0)
    assert replies[1][1].lines() == [": keep-alive"] * 2


def test_a_timer_goes_on_after_an_exception() -> None:
    async def run() -> None:
        third = asyncio.Event()
        calls = []

        def call() -> None:
            calls.append(1)
            if len(calls) == 3:
                third.set()
            broken()

        timer = PeriodicTimer("a test", 0.001, call)
        await asyncio.wait_for(third.wait(), 30)
        timer.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("finish", [FinishReason.STOP_TOKEN, FinishReason.EOS])
def test_an_end_by_a_token_that_the_engine_leaves_out_is_an_end_like_others(finish: FinishReason) -> None:
    def run() -> None:
        desk = Desk(tables())
        reply, sink = desk.streamed(PLANNER.completion(body(max_tokens=9, stream=True)))
        (handle,) = (choice.stream.handle for choice in reply.choices if choice.stream is not None)
        desk.deliver(desk.rows(handle, [PLAIN, []], finish))
        assert read_stream(sink).finish_reason == "stop"
        assert sink.lines()[-1] == "data: [DONE]"
        assert desk.outcomes == ["stop"]

    in_loop(run)
