"""A media worker's end of a connection of an API server."""

from __future__ import annotations

import asyncio
import struct
from functools import partial

import msgspec

from penstock.logging_setup import RateLimitedLog
from penstock.media.preparation import PicturePreparer
from penstock.media.refused import Refused
from penstock.wire.media.worker import (
    MAX_MESSAGE_BYTES,
    FromMediaWorker,
    MediaRefused,
    PrepareMedia,
    Refusal,
)

MAX_WAITING_BYTES = 256 << 20
"""Files of pictures, as they came, that wait in a worker for its thread, over all connections."""
MAX_WAITING = 4096
"""Pictures that do so."""
_READ_BYTES = 1 << 18
_HEAD = struct.Struct("<II")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PrepareMedia).decode


class MediaConnections:
    """The connections of one worker. What waits in it is bounded: more is refused as busy."""

    def __init__(self, preparer: PicturePreparer, warn: RateLimitedLog) -> None:
        self._preparer = preparer
        self._warn = warn
        self._bytes = 0
        self._count = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its begin to its end."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            self._send(writer, self._preparer.processor.description)
            while True:
                size, more = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                if size > MAX_MESSAGE_BYTES:
                    raise ValueError(f"a message of {size} bytes")
                request = _decode(await reader.readexactly(size))
                if (refusal := self._refusal(more)) is not None:
                    await _skip(reader, more)
                    self._send(writer, MediaRefused(request.number, *refusal))
                    continue
                self._bytes += more
                self._count += 1
                task: asyncio.Task[None] | None = None
                try:
                    data = await reader.readexactly(more)
                    task = asyncio.create_task(self._answer(writer, request, data))
                finally:
                    if task is None:
                        self._forget(more)
                tasks.add(task)
                task.add_done_callback(partial(self._on_answered, tasks, more))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the API server has ended
        except (ValueError, msgspec.MsgspecError) as error:
            self._warn("messages", "an API server's message is refused: %s", error)
        finally:
            for each in tasks:
                each.cancel()
            writer.transport.abort()

    def _on_answered(self, tasks: set[asyncio.Task[None]], more: int, task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        self._forget(more)

    def _forget(self, more: int) -> None:
        self._bytes -= more
        self._count -= 1

    def _refusal(self, more: int) -> tuple[Refusal, str] | None:
        """Code and message for a request with so many bytes of a picture; None: it is taken."""
        most = self._preparer.max_source_bytes
        if more > most:
            size = f"the image has {more} bytes, at most {most} are taken (--media-max-bytes, as base64)"
            return "too_large", size
        if self._count >= MAX_WAITING or (self._bytes and self._bytes + more > MAX_WAITING_BYTES):
            return "busy", "too many images wait to be prepared"
        return None

    async def _answer(self, writer: asyncio.StreamWriter, request: PrepareMedia, data: bytes) -> None:
        answer: FromMediaWorker
        try:
            answer = await self._preparer.prepare(request, data)
        except Refused as error:
            answer = MediaRefused(request.number, error.code, error.message)
        except Exception as error:  # noqa: BLE001 - one picture's fault is no other's
            text = "a picture cannot be prepared: %s: %s"
            self._warn(type(error).__name__, text, type(error).__name__, error, exc_info=True)
            answer = MediaRefused(request.number, "internal", "the image could not be prepared")
        if not writer.is_closing():
            self._send(writer, answer)

    @staticmethod
    def _send(writer: asyncio.StreamWriter, message: FromMediaWorker) -> None:
        data = _encode(message)
        writer.write(_HEAD.pack(len(data), 0) + data)


async def _skip(reader: asyncio.StreamReader, count: int) -> None:
    while count:
        data = await reader.read(min(count, _READ_BYTES))
        if not data:
            raise ConnectionResetError
        count -= len(data)
