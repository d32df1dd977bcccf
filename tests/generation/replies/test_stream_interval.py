"""Which pace a request gets, by its wishes and the server's options."""

from __future__ import annotations

import pytest

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.config.sources import resolve
from penstock.dialects.completions.request_schema import CompletionRequest
from penstock.generation.replies.stream_interval import NOT_STREAMED, IntervalPolicy, StreamInterval


@pytest.mark.parametrize(
    ("config", "tokens", "ms", "expected"),
    [
        (ServeConfig(), None, None, StreamInterval(1)),
        (ServeConfig(), 7, None, StreamInterval(7)),
        (ServeConfig(), None, 40, StreamInterval(1, 40)),
        (ServeConfig(stream_interval=10), None, None, StreamInterval(10)),
        (ServeConfig(stream_interval=10), 1, None, StreamInterval(1)),
        (ServeConfig(stream_interval=10), 30, None, StreamInterval(30)),
        (ServeConfig(stream_interval=10), None, 40, StreamInterval(1, 40)),
        (ServeConfig(stream_interval_ms=20), None, None, StreamInterval(1, 20)),
        (ServeConfig(stream_interval_ms=20), 3, None, StreamInterval(3)),
        (ServeConfig(stream_interval_ms=20), None, 5, StreamInterval(1, 5)),
    ],
)
def test_a_request_gets_what_it_asks_for_within_the_operators_bound(
    config: ServeConfig, tokens: int | None, ms: int | None, expected: StreamInterval
) -> None:
    request = CompletionRequest(prompt="x", stream_interval=tokens, stream_interval_ms=ms)
    assert IntervalPolicy(config).interval(request, streamed=True) == expected


def test_nobody_watches_a_reply_that_is_not_streamed() -> None:
    request = CompletionRequest(prompt="x", stream_interval=1)
    assert IntervalPolicy(ServeConfig()).interval(request, streamed=False) == NOT_STREAMED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"stream_interval": "5", "stream_interval_ms": "20"},
            "--stream-interval-ms 20: events are paced by",
        ),
        ({"stream_interval_ms": "0"}, "--stream-interval-ms"),
    ],
)
def test_options_that_contradict_are_errors(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(ServeConfig, arguments, {})
