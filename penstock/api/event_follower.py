"""Sends the stored events of a background response to a client, and those that still come."""

from __future__ import annotations

import asyncio
import time

from penstock.api.api_request import ApiRequest
from penstock.generation.dialect import ReplyFormat
from penstock.http.errors import ApiError
from penstock.store.database import EventPage
from penstock.store.response_store import ResponseStore
from penstock.store.stored_response import RUNNING

PAGE_BYTES = 256 * 1024
"""Events that are read at a time: what waits for a client is little more."""
LOOK_S = 1.0
"""Time between looks whether the API server that generates the response still lives."""
NOT_READING_S = 60.0
"""Longest wait for a client that does not read."""


class _Client:
    """The client's connection. Its waits end when the client is gone."""

    def __init__(self, request: ApiRequest) -> None:
        self.gone = False
        self.begun = False
        """Whether anything was sent."""
        self._sink = request.http.sink
        self._readable = asyncio.Event()
        self._readable.set()
        request.http.sink.listen(self)

    def on_disconnect(self) -> None:
        self.gone = True
        self._readable.set()

    def on_pause(self) -> None:
        self._readable.clear()

    def on_resume(self) -> None:
        self._readable.set()

    async def send(self, data: bytes) -> None:
        """Send events, and wait until the client can take more."""
        if self.gone:
            return
        self.begun = True
        self._sink.send(data, last=False)
        try:
            async with asyncio.timeout(NOT_READING_S):
                await self._readable.wait()
        except TimeoutError:
            self._sink.cut()
            self.gone = True

    def end(self) -> None:
        if not self.gone:
            self._sink.send(b"", last=True)

    def cut(self) -> None:
        """End the reply in such a way that the client sees that there is more."""
        if not self.gone:
            self._sink.cut()


async def follow(
    request: ApiRequest, store: ResponseStore, id: str, tenant: str, after: int, keep_alive_s: float
) -> None:
    """Send the events of a response that come after sequence number ``after``, to its end. To be run in a
    task. ``keep_alive_s``: longest silence; 0: any. Raises ApiError if nothing was sent."""
    client = _Client(request)
    try:
        await _send_all(client, store, id, tenant, after, keep_alive_s)
        client.end()
    except ApiError:  # the store fails
        if not client.begun:
            raise
        client.cut()


async def _send_all(
    client: _Client, store: ResponseStore, id: str, tenant: str, after: int, keep_alive_s: float
) -> None:
    silent_since = time.monotonic()
    while not client.gone:
        version = store.version
        page: EventPage | None = await store.page(id, tenant, after, PAGE_BYTES)
        if page is None:  # it was deleted
            return
        if page.data:
            await client.send(page.data)
            after, silent_since = page.last, time.monotonic()
            continue
        if page.status not in RUNNING:
            return
        await store.changed_since(version, LOOK_S)
        if store.version == version:
            await store.entry(id, tenant)
        if keep_alive_s and time.monotonic() - silent_since >= keep_alive_s:
            await client.send(ReplyFormat.keep_alive)
            silent_since = time.monotonic()
