"""Streams of every API, counted to their end."""

from __future__ import annotations

import pytest

from penstock.bench.load.reply_counter import ReplyCounter

COMPLETED = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
FAILED = b'event: response.failed\ndata: {"type":"response.failed"}\n\n'
ERROR = b'event: error\ndata: {"type":"error","error":{}}\n\n'


def counted(data: bytes, size: int) -> ReplyCounter:
    counter = ReplyCounter()
    counter.status = 200
    for start in range(0, len(data), size):
        counter.feed(data[start : start + size])
    return counter


@pytest.mark.parametrize("size", [1, 10, 1000])
@pytest.mark.parametrize(
    "end",
    [
        b"data: [DONE]\n\n",
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        COMPLETED,
        COMPLETED.replace(b"completed", b"incomplete"),
    ],
)
def test_every_api_has_its_terminator(end: bytes, size: int) -> None:
    counter = counted(b'data: {"n":1}\n\n' + end, size)
    assert counter.done
    assert counter.end() is None


@pytest.mark.parametrize("size", [1, 10, 1000])
@pytest.mark.parametrize("event", [b'data: {"error":{"code":500}}\n\n', FAILED, ERROR])
def test_a_stream_that_fails_is_an_error_whatever_follows(event: bytes, size: int) -> None:
    counter = counted(b'data: {"n":1}\n\n' + event + b"data: [DONE]\n\n", size)
    assert not counter.between_events
    assert (counter.end() or "").startswith("error event: ")


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (b'data: {"error":{"code":500}}\n\n', '{"error":{"code":500}}'),
        (FAILED, 'response.failed data: {"type":"response.failed"}'),
        (ERROR, 'error data: {"type":"error","error":{}}'),
    ],
)
def test_an_error_shows_its_event(event: bytes, shown: str) -> None:
    assert counted(event, 1000).end() == f"error event: {shown}"
