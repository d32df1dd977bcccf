"""Responses whose events take long to make: they are the same, and others are served in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.dialects.responses import reply as responses_reply
from penstock.generation.replies import long_events, turns
from penstock.generation.replies.logprobs import PIECE_CANDIDATES
from penstock.generation.replies.streamed import StreamedReply
from penstock.streaming.stream import StreamError
from penstock.wire.frames import FinishReason
from tests.dialects.responses.reading import events_of, final_response
from tests.dialects.responses.test_replies import (
    LOGPROBS,
    LOOK,
    MORE_TEXT,
    PATCH,
    PLAIN,
    TEXT,
    THOUGHT,
    Spelled,
    comparable,
    dialect,
    request,
    rows_of,
    tables,
    whole,
)
from tests.generation.replying import Desk, MemorySink

OUTPUTS = (
    PLAIN,
    TEXT + LOOK,
    THOUGHT + TEXT + LOOK + MORE_TEXT + PATCH,
    THOUGHT + LOOK + MORE_TEXT,
)


@pytest.fixture
def all_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every event is long, and a turn has one piece of it."""
    monkeypatch.setattr(responses_reply, "SHORT_BYTES", 0)
    monkeypatch.setattr(turns, "TURN_S", 0)


def started(desk: Desk, **fields: Any) -> tuple[StreamedReply, MemorySink]:
    plan = dialect().plan(request(stream=True, **fields))
    return desk.streamed(plan, format=dialect().reply_format(plan, "r"))


async def rounds(reply: StreamedReply) -> AsyncIterator[None]:
    """One for each round of the event loop until the reply has ended."""
    for _ in range(100_000):
        if reply.ended:
            return
        yield
        await asyncio.sleep(0)
    raise AssertionError("the reply does not end")


@pytest.mark.usefixtures("all_long")
@pytest.mark.parametrize("text", OUTPUTS)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("between", [0, 1, 3, 30])
@pytest.mark.parametrize("pause", [0, 5])
@pytest.mark.parametrize("fields", [{}, LOGPROBS])
def test_events_are_the_whole_response(
    text: str, width: int, between: int, pause: int, fields: dict[str, Any]
) -> None:
    """``between``: rounds of the event loop between two rows; ``pause``: the client does not read after each
    of so many of them."""

    async def run() -> bytes:
        desk = Desk(tables())
        reply, sink = started(desk, **fields)
        round = 0

        async def one_round() -> None:
            nonlocal round
            round += 1
            if pause and not reply.ended and round % pause == 0:
                (reply.on_resume if round // pause % 2 == 0 else reply.on_pause)()
            await asyncio.sleep(0)

        for frame in desk.rows(0, rows_of(text, [width]), FinishReason.GRAMMAR, logprobs=bool(fields)):
            desk.deliver([frame])
            for _ in range(between):
                await one_round()
        async for _ in rounds(reply):
            await one_round()
        assert sink.ended == "finish"
        assert desk.outcomes == ["stop"]
        return sink.data

    final = final_response(events_of(asyncio.run(run()).decode()))
    assert comparable(final) == comparable(whole(text, FinishReason.GRAMMAR, **fields))


@pytest.mark.usefixtures("all_long")
@pytest.mark.parametrize("text", OUTPUTS)
@pytest.mark.parametrize("between", [0, 1, 3, 30])
def test_a_failure_comes_after_them(text: str, between: int) -> None:
    async def run() -> bytes:
        desk = Desk(tables())
        reply, sink = started(desk, **LOGPROBS)
        for frame in desk.rows(0, rows_of(text, [3]), logprobs=True):
            desk.deliver([frame])
            for _ in range(between):
                await asyncio.sleep(0)
        desk.streams.fail(0, 0, StreamError(500, "engine_error", "It died."))
        async for _ in rounds(reply):
            pass
        assert (sink.ended, desk.outcomes) == ("finish", ["error"])
        return sink.data

    final = final_response(events_of(asyncio.run(run()).decode()))
    assert final["error"]["message"] == "It died."


def test_logprobs_of_a_stream_are_spelled_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    spelled = Spelled(monkeypatch)
    monkeypatch.setattr(turns, "TURN_S", 0)
    found: list[int] = []

    async def run() -> bytes:
        desk = Desk(tables())
        reply, sink = started(desk, tools=[], **LOGPROBS)
        rows = rows_of(PLAIN * 400, [1])
        for frame in desk.rows(0, rows, FinishReason.LENGTH, logprobs=True):
            spelled.take()
            desk.deliver([frame])
        async for _ in rounds(reply):
            found.append(sum(spelled.take()))
        # beside what is made at once, in three events of the message, and in the response
        assert 3 * 2 * len(rows) < sum(found) + responses_reply.SHORT_CANDIDATES <= 5 * 2 * len(rows)
        return sink.data

    final = final_response(events_of(asyncio.run(run()).decode()))
    assert max(found) <= 4 * PIECE_CANDIDATES, "a turn, and what is made at once"
    assert comparable(final) == comparable(whole(PLAIN * 400, **LOGPROBS, tools=[]))


def ended_in_the_middle(end: Callable[[StreamedReply], None]) -> tuple[str, list[str], bytes]:
    """How the body ended, the outcome, and what was sent after ``end``, in the middle of long events."""

    async def run() -> tuple[str, list[str], bytes]:
        desk = Desk(tables())
        reply, sink = started(desk, **LOGPROBS)
        desk.deliver(desk.rows(0, rows_of(PLAIN, [3]), FinishReason.LENGTH, logprobs=True))
        for _ in range(6):
            await asyncio.sleep(0)
        assert sink.data
        assert not reply.ended
        end(reply)
        sent = len(sink.data)
        async for _ in rounds(reply):
            pass
        for _ in range(20):
            await asyncio.sleep(0)
        return sink.ended, desk.outcomes, sink.data[sent:]

    return asyncio.run(run())


@pytest.mark.usefixtures("all_long")
def test_nothing_is_sent_to_a_client_that_has_left() -> None:
    assert ended_in_the_middle(StreamedReply.on_disconnect) == ("", ["abort"], b"")


@pytest.mark.usefixtures("all_long")
def test_a_client_that_does_not_read_them_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_events, "MAX_UNREAD_S", 0)
    ended, outcomes, after = ended_in_the_middle(StreamedReply.on_pause)
    assert (ended, outcomes) == ("cut", ["cut"])
    assert after.count(b"\n\n") <= 1, "a turn that had begun"


@pytest.mark.usefixtures("all_long")
def test_no_comment_is_sent_within_them() -> None:
    ended, outcomes, after = ended_in_the_middle(lambda reply: reply.send_keep_alive(1.0, 2.0))
    assert (ended, outcomes) == ("finish", ["length"])
    assert b"keep-alive" not in after
