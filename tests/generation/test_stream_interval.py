"""Which pace a request gets, by its wishes and the server's options."""

from __future__ import annotations

import pytest

from penstock.config import ConfigError, ServeConfig, resolve
from penstock.generation.request_schemas import CompletionRequest
from penstock.generation.stream_interval import UNWATCHED, Pace, Pacing


@pytest.mark.parametrize(
    ("config", "tokens", "ms", "expected"),
    [
        (ServeConfig(), None, None, Pace(1)),
        (ServeConfig(), 7, None, Pace(7)),
        (ServeConfig(), None, 40, Pace(1, 40)),
        (ServeConfig(stream_interval=10), None, None, Pace(10)),
        (ServeConfig(stream_interval=10), 1, None, Pace(1)),
        (ServeConfig(stream_interval=10), 30, None, Pace(30)),
        (ServeConfig(stream_interval=10), None, 40, Pace(1, 40)),
        (ServeConfig(stream_interval_ms=20), None, None, Pace(1, 20)),
        (ServeConfig(stream_interval_ms=20), 3, None, Pace(3)),
        (ServeConfig(stream_interval_ms=20), None, 5, Pace(1, 5)),
        (ServeConfig(min_stream_interval=4), None, None, Pace(4)),
        (ServeConfig(min_stream_interval=4), 1, None, Pace(4)),
        (ServeConfig(min_stream_interval=4), 9, None, Pace(9)),
        (ServeConfig(min_stream_interval=4), None, 1, Pace(4, 1)),
        (ServeConfig(min_stream_interval=4, stream_interval=10), 2, None, Pace(4)),
        (ServeConfig(min_stream_interval=4, stream_interval_ms=20), None, None, Pace(4, 20)),
    ],
)
def test_a_request_gets_what_it_asks_for_within_the_operators_bound(
    config: ServeConfig, tokens: int | None, ms: int | None, expected: Pace
) -> None:
    request = CompletionRequest(prompt="x", stream_interval=tokens, stream_interval_ms=ms)
    assert Pacing(config).pace(request, watched=True) == expected


def test_nobody_watches_a_reply_that_is_not_streamed() -> None:
    request = CompletionRequest(prompt="x", stream_interval=1)
    assert Pacing(ServeConfig()).pace(request, watched=False) == UNWATCHED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stream_interval": "5", "stream_interval_ms": "20"}, "--stream-interval-ms: events are paced by"),
        ({"stream_interval": "5", "min_stream_interval": "6"}, "--min-stream-interval: 6 is more than"),
        ({"min_stream_interval": "0"}, "--min-stream-interval"),
        ({"stream_interval_ms": "0"}, "--stream-interval-ms"),
    ],
)
def test_options_that_contradict_are_errors(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(ServeConfig, arguments, {})
