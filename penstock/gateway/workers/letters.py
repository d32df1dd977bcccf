"""Letters between a worker of the gateway and the keeper, which runs in the supervisor.

They go over a stream socket that the supervisor makes before it starts the worker: the length of a letter in
four bytes, then the letter in MessagePack. No end waits for the other one: what the socket has no room for is
kept, up to a bound.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import NamedTuple, cast

import msgspec

from penstock.logging_setup import RateLimitedLog

_warn = RateLimitedLog(logging.getLogger(__name__))

MAX_LETTER_BYTES = 32 << 20
"""The metrics of a worker with 20,000 series take some 4 MB; other letters a few KB."""
MAX_UNSENT_BYTES = 64 << 20
"""Bytes that wait for an end that does not read; further letters to it are dropped."""
_LENGTH = struct.Struct("!I")


class WorkerName(NamedTuple):
    """A worker: its number, and how many had the number before."""

    number: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.number}.{self.epoch}"


class Letter(msgspec.Struct, array_like=True, frozen=True):
    """What one end tells the other."""

    topic: str
    data: bytes = b""
    peer: WorkerName | None = None
    """To the keeper: the worker that gets the letter, None for all others. From the keeper: the worker that
    has sent it, None for the keeper itself, also where it returns a letter to one that has ended."""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Letter)


class LetterStream(asyncio.Protocol):
    """One end of the socket. ``on_letter`` is called with each letter; what it raises as msgspec does is
    logged: processes of two versions may write letters in two ways. ``on_end`` is called at the end."""

    def __init__(self, on_letter: Callable[[Letter], None], on_end: Callable[[], None]) -> None:
        self.transport: asyncio.Transport
        self._on_letter = on_letter
        self._on_end = on_end
        self._received = bytearray()

    def send(self, letter: Letter) -> bool:
        """Send a letter, as soon as there is room. Returns False for one that is dropped: too many wait, or
        the stream has ended."""
        if self.transport.is_closing():
            return False
        data = _encode(letter)
        unsent = self.transport.get_write_buffer_size() + len(data)
        if len(data) > MAX_LETTER_BYTES or unsent > MAX_UNSENT_BYTES:
            _warn(letter.topic, "%d bytes of %s are dropped", len(data), letter.topic)
            return False
        self.transport.write(_LENGTH.pack(len(data)) + data)
        return True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        start = _LENGTH.size
        while len(self._received) >= start:
            (size,) = _LENGTH.unpack_from(self._received, start - _LENGTH.size)
            if size > MAX_LETTER_BYTES:
                _warn("length", "a letter of %d bytes", size)
                self.transport.abort()
                return
            if len(self._received) < start + size:
                break
            self._take_letter(bytes(self._received[start : start + size]))
            start += size + _LENGTH.size
        del self._received[: start - _LENGTH.size]

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()

    def _take_letter(self, data: bytes) -> None:
        try:
            self._on_letter(_decoder.decode(data))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            _warn("letter", "a letter was not understood: %s", error)
