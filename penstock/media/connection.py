"""A media worker's end of a connection of an API server."""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import msgspec

from penstock.logging_setup import RateLimitedLog
from penstock.media.preparation import PicturePreparer, tenant_of
from penstock.media.refused import Refused
from penstock.wire.media.worker import (
    MAX_MESSAGE_BYTES,
    AbandonMedia,
    FromMediaWorker,
    MediaRefused,
    PrepareMedia,
    Refusal,
    ToMediaWorker,
)

MAX_WAITING_BYTES = 256 << 20
"""Files of pictures, as they came, that wait in a worker for its thread, over all connections."""
MAX_WAITING = 4096
"""Pictures that do so."""
TENANT_SHARE = 3 / 4
"""Of both, that pictures of one tenant may take: the others' are not refused because of them."""
_READ_BYTES = 1 << 18
_HEAD = struct.Struct("<II")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ToMediaWorker).decode


@dataclass(slots=True)
class _Waiting:
    """Pictures that wait, and their bytes."""

    count: int = 0
    size: int = 0

    def has_room(self, more: int, share: float = 1) -> bool:
        """Whether another of ``more`` bytes may wait; alone, any may."""
        return self.count < MAX_WAITING * share and (
            not self.size or self.size + more <= MAX_WAITING_BYTES * share
        )


class MediaConnections:
    """The connections of one worker. What waits in it is bounded: more is refused as busy."""

    def __init__(self, preparer: PicturePreparer, warn: RateLimitedLog) -> None:
        self._preparer = preparer
        self._warn = warn
        self._all = _Waiting()
        self._of_tenants: defaultdict[str, _Waiting] = defaultdict(_Waiting)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its begin to its end."""
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            self._send(writer, self._preparer.processor.description)
            while True:
                size, more = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                if size > MAX_MESSAGE_BYTES:
                    raise ValueError(f"a message of {size} bytes")
                request = _decode(await reader.readexactly(size))
                if isinstance(request, AbandonMedia):
                    if (abandoned := tasks.get(request.number)) is not None:
                        abandoned.cancel()
                    continue
                if request.number in tasks:
                    raise ValueError(f"number {request.number} is in use")
                tenant = tenant_of(request.salt)
                if (refusal := self._refusal(more, tenant)) is not None:
                    await _skip(reader, more)
                    self._send(writer, MediaRefused(request.number, *refusal))
                    continue
                self._count(tenant, 1, more)
                task: asyncio.Task[None] | None = None
                try:
                    data = await reader.readexactly(more)
                    task = asyncio.create_task(self._answer(writer, request, data))
                finally:
                    if task is None:
                        self._count(tenant, -1, -more)
                tasks[request.number] = task
                task.add_done_callback(partial(self._on_answered, tasks, request.number, tenant, more))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the API server has ended
        except asyncio.CancelledError:
            pass  # the worker ends; asyncio before 3.12 logs a connection that is cancelled
        except (ValueError, msgspec.MsgspecError) as error:
            self._warn("messages", "an API server's message is refused: %s", error)
        finally:
            for each in tasks.values():
                each.cancel()
            writer.transport.abort()

    def _on_answered(
        self,
        tasks: dict[int, asyncio.Task[None]],
        number: int,
        tenant: str,
        more: int,
        task: asyncio.Task[None],
    ) -> None:
        del tasks[number]
        self._count(tenant, -1, -more)

    def _count(self, tenant: str, pictures: int, size: int) -> None:
        for waiting in (self._all, self._of_tenants[tenant]):
            waiting.count += pictures
            waiting.size += size
        if not self._of_tenants[tenant].count:
            del self._of_tenants[tenant]

    def _refusal(self, more: int, tenant: str) -> tuple[Refusal, str] | None:
        """Code and message for a request with so many bytes of a picture; None: it is taken."""
        most = self._preparer.max_source_bytes
        if more > most:
            size = f"the image has {more} bytes, at most {most} are taken (--media-max-bytes, as base64)"
            return "too_large", size
        mine = self._of_tenants.get(tenant) if tenant else None
        if not self._all.has_room(more) or (mine and not mine.has_room(more, TENANT_SHARE)):
            return "busy", "too many images wait to be prepared"
        return None

    async def _answer(self, writer: asyncio.StreamWriter, request: PrepareMedia, data: bytes) -> None:
        answer: FromMediaWorker
        try:
            answer = await self._preparer.prepare(request, data)
        except Refused as error:
            answer = MediaRefused(request.number, error.code, error.message, error.key, error.size)
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
