"""Bounds the time of chat templates: some take the square of the number of messages, or much for each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from penstock.http.errors import ApiError

RENDER_S = 5.0
"""CPU seconds that a template may take."""
INLINE_S = 0.01
"""CPU seconds that a template may take on the event loop; then it goes on in a thread."""
PIECES = 16
"""Pieces of a prompt between two looks at the clock."""

_limit_s: ContextVar[float] = ContextVar("limit_s", default=RENDER_S)


class RenderTimeout(Exception):
    """A template takes longer than it may on the event loop: a thread should run it."""


@contextmanager
def on_event_loop() -> Iterator[None]:
    """Within it, templates may take INLINE_S; beyond that they raise RenderTimeout."""
    token = _limit_s.set(INLINE_S)
    try:
        yield
    finally:
        _limit_s.reset(token)


def within_limit(pieces: Iterator[str], messages: int) -> Iterator[str]:
    """The pieces of a prompt of so many messages. Raises RenderTimeout, or in a thread ApiError."""
    limit_s = _limit_s.get()
    end = time.thread_time() + limit_s
    for number, piece in enumerate(pieces):
        if number % PIECES == 0 and time.thread_time() > end:
            if limit_s < RENDER_S:
                raise RenderTimeout
            raise ApiError(
                400,
                f"The model's chat template takes more than {RENDER_S:g} s for these {messages} messages: "
                "send fewer.",
                param="messages",
            )
        yield piece
