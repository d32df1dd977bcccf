"""Sends large replies in pieces, so that formatting them does not delay the events of streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from penstock.api.api_request import ApiRequest
from penstock.http.request import JSON

TURN_S = 0.002
"""Time to format pieces before other work runs."""
WHOLE_BYTES = 256 * 1024
"""Replies up to this size are sent at once, with their length; larger ones in chunks, as the client reads."""


class TimeSlicedSender:
    """The large replies of one process. They take turns: one turn in each round of the event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def send(
        self, request: ApiRequest, pieces: Iterator[bytes], kind: bytes = JSON, size: int | None = None
    ) -> None:
        """Send a reply whose body is ``pieces``; gives up if the client disconnects. ``kind``: its content
        type; ``size``: its bytes, if they are known before all pieces are."""
        body, ended = _next_turn(pieces)
        connection: _Connection | None = None
        while not ended:
            async with self._turn:
                more, ended = _next_turn(pieces)
                await asyncio.sleep(0)
            body += more
            if len(body) <= WHOLE_BYTES or request.http.version == "1.0":
                continue
            if connection is None:
                connection = _Connection()
                request.http.sink.listen(connection)
                length = [] if size is None else [(b"content-length", b"%d" % size)]
                await request.http.begin(200, [(b"content-type", kind), *length])
            if connection.lost:
                return
            await request.http.write(bytes(body))
            body.clear()
        if connection is None:
            await request.http.reply_json(bytes(body), kind=kind)
        else:
            if body:
                await request.http.write(bytes(body))
            await request.http.finish()


class _Connection:
    """Notices that the client has disconnected."""

    lost = False

    def on_disconnect(self) -> None:
        self.lost = True

    def on_pause(self) -> None:
        pass

    def on_resume(self) -> None:
        pass


def _next_turn(pieces: Iterator[bytes]) -> tuple[bytearray, bool]:
    """As many pieces as there is time for, and whether they were the last."""
    body = bytearray()
    due = time.monotonic() + TURN_S
    for piece in pieces:
        body += piece
        if time.monotonic() >= due:
            return body, False
    return body, True
