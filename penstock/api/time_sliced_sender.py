"""Sends large replies in pieces, so that formatting them does not delay the events of streams."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.api.api_request import ApiRequest
from penstock.generation.replies.turns import Turns, next_turn
from penstock.http.request import JSON

WHOLE_BYTES = 256 * 1024
"""Replies up to this size are sent at once, with their length; larger ones in chunks, as the client reads."""


class TimeSlicedSender:
    """The large replies of one process, which take turns."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    async def send_json(self, request: ApiRequest, pieces: Iterator[bytes]) -> None:
        """Send a reply whose body is ``pieces``; gives up if the client disconnects."""
        body, ended = next_turn(pieces)
        connection: _Connection | None = None
        while not ended:
            more, ended = await self._turns.next(pieces)
            body += more
            if len(body) <= WHOLE_BYTES or request.http.version == "1.0":
                continue
            if connection is None:
                connection = _Connection()
                request.http.sink.listen(connection)
                await request.http.begin(200, [(b"content-type", JSON)])
            if connection.lost:
                return
            await request.http.write(bytes(body))
            body.clear()
        if connection is None:
            await request.http.reply_json(bytes(body))
        else:
            if body:
                await request.http.write(bytes(body))
            await request.http.finish()

    async def send_sized(self, request: ApiRequest, pieces: Iterator[bytes], kind: bytes, size: int) -> None:
        """Send a reply of ``size`` bytes in all. ``pieces``: each takes less than a turn to make, and is
        written by itself: a copy would take as long. ``kind``: the content type."""
        http = request.http
        if size <= WHOLE_BYTES:
            await http.reply_json(b"".join(pieces), kind=kind)
            return
        connection = _Connection()
        http.sink.listen(connection)
        await http.begin(200, [(b"content-type", kind), (b"content-length", b"%d" % size)])
        while not connection.lost:
            piece = await self._turns.one(pieces)
            if piece is None:
                await http.finish()
                return
            await http.write(piece)


class _Connection:
    """Notices that the client has disconnected."""

    lost = False

    def on_disconnect(self) -> None:
        self.lost = True

    def on_pause(self) -> None:
        pass

    def on_resume(self) -> None:
        pass
