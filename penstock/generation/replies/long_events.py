"""Events that take longer to make than other streams can wait: they are sent in turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from penstock.generation.replies.turns import Turns
from penstock.http.sink import EventSink
from penstock.logging_setup import RateLimitedLog

_log_fault = RateLimitedLog(logging.getLogger(__name__), logging.ERROR)

MAX_UNREAD_S = 60.0
"""Longest time in which a client reads nothing of what waits for it."""


class LongEvents:
    """Sends some pieces of a reply's events as the client reads."""

    def __init__(
        self,
        pieces: Iterator[bytes],
        turns: Turns,
        sink: EventSink,
        *,
        send: Callable[[bytes], None],
        on_sent: Callable[[], None],
        on_fault: Callable[[], None],
        paused: bool,
    ) -> None:
        """``send``: as the reply sends; it may call :meth:`pause`. ``on_sent`` is called at the end, or
        ``on_fault``, if they could not be made or are not read. ``paused``: whether the client does not read
        at first."""
        self._pieces = pieces
        self._turns = turns
        self._sink = sink
        self._send = send
        self._on_sent = on_sent
        self._on_fault = on_fault
        self._reading = asyncio.Event()
        if not paused:
            self._reading.set()
        self._task = asyncio.ensure_future(self._run())

    def pause(self) -> None:
        """The client does not read."""
        self._reading.clear()

    def resume(self) -> None:
        self._reading.set()

    def cancel(self) -> None:
        """Send no more, and call neither."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            ended = False
            while not ended:
                if not await self._is_read():
                    self._on_fault()
                    return
                data, ended = await self._turns.next(self._pieces)
                if data:
                    self._send(bytes(data))
            self._on_sent()
        except Exception:  # noqa: BLE001 - this reply ends
            _log_fault("long events", "events of a reply could not be made", exc_info=True)
            self._on_fault()

    async def _is_read(self) -> bool:
        """Wait until the client reads; False: it does not."""
        while not self._reading.is_set():
            unread = self._sink.unread()
            try:
                await asyncio.wait_for(self._reading.wait(), MAX_UNREAD_S)
            except TimeoutError:
                if self._sink.unread() == unread:
                    return False
        return True
