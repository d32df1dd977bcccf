from __future__ import annotations

import pytest

from penstock.generation.replies.stream_failure import stream_failed
from penstock.streaming.stream import StreamError


@pytest.mark.parametrize(
    ("milliseconds", "seconds"), [(1000, b"1"), (1001, b"2"), (2500, b"3"), (60000, b"60")]
)
def test_a_full_queue_says_when_there_is_room_and_never_too_early(milliseconds: int, seconds: bytes) -> None:
    error = stream_failed(StreamError(429, "overloaded", "Full.", milliseconds))
    assert (error.status, error.type, error.code) == (429, "RateLimitError", "overloaded")
    assert dict(error.headers) == {b"retry-after": seconds, b"retry-after-ms": b"%d" % milliseconds}


def test_other_failures() -> None:
    assert stream_failed(StreamError(400, "invalid_request", "No.")).headers == []
    assert stream_failed(StreamError(500, "engine_error", "Broken.")).headers == []
    assert dict(stream_failed(StreamError(503, "engine_died", "Gone.")).headers)[b"retry-after-ms"] == b"1000"
