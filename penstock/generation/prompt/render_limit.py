"""Bounds the time of chat templates: some take the square of the number of messages, or much for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from itertools import islice
from typing import ParamSpec, TypeVar

from penstock.http.errors import ApiError

RENDER_S = 5.0
"""CPU seconds that a template may take."""
INLINE_S = 0.01
"""CPU seconds that a template may take on the event loop; then it goes on in a thread."""
PIECES = 16
"""Pieces of a prompt between two looks at the clock."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_limit_s: ContextVar[float] = ContextVar("limit_s", default=RENDER_S)


class RenderTimeout(Exception):
    """A template takes longer than it may on the event loop: a thread should run it."""


def on_event_loop(
    function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """Call ``function``, within which templates may take INLINE_S. Raises RenderTimeout beyond that."""
    token = _limit_s.set(INLINE_S)
    try:
        return function(*args, **kwargs)
    finally:
        _limit_s.reset(token)


def join_within_limit(pieces: Iterator[str], messages: int, joined: list[str]) -> str:
    """The prompt of so many messages from its pieces, which are added to ``joined`` one by one. Raises
    RenderTimeout, or in a thread ApiError."""
    limit_s = _limit_s.get()
    end = time.thread_time() + limit_s
    while True:
        before = len(joined)
        joined += islice(pieces, PIECES)
        if len(joined) < before + PIECES:
            return "".join(joined)
        if time.thread_time() > end:
            if limit_s < RENDER_S:
                raise RenderTimeout
            raise ApiError(
                400,
                f"The model's chat template takes more than {RENDER_S:g} s for these {messages} messages: "
                "send fewer.",
                param="messages",
            )
