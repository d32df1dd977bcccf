"""Letters between a worker of the gateway and the keeper, which runs in the supervisor.

They go over a stream socket that the supervisor makes before it starts the worker: the length of a letter in
four bytes, then the letter in MessagePack. No end waits for the other one: what the socket has no room for is
kept, up to a bound.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
import time
from typing import NamedTuple

import msgspec

from penstock.logging_setup import RateLimitedLog

_complain = RateLimitedLog(logging.getLogger(__name__))

MAX_LETTER_BYTES = 32 << 20
"""The metrics of a worker with 20,000 series take some 4 MB; other letters a few KB."""
MAX_UNSENT_BYTES = 64 << 20
"""Bytes that wait for an end that does not read; further letters to it are dropped."""
READ_BYTES = 256 << 10
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


class StreamEnded(Exception):
    """The other end has closed the socket, or sends what is no letter."""


class LetterStream:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether letters wait for room: call :meth:`flush` when the socket is writable."""
        return bool(self._unsent)

    def send(self, letter: Letter) -> bool:
        """Send a letter, as far as there is room at once. Returns False for one that is dropped: too many
        wait."""
        data = _encode(letter)
        if len(data) > MAX_LETTER_BYTES or len(self._unsent) + len(data) > MAX_UNSENT_BYTES:
            _complain(letter.topic, "no room for %d bytes of %s", len(data), letter.topic)
            return False
        self._unsent += _LENGTH.pack(len(data))
        self._unsent += data
        self.flush()
        return True

    def flush(self) -> None:
        """Send what there is room for."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:  # the other end is gone, as reading will tell
            self._unsent.clear()

    def receive(self) -> list[Letter]:
        """The letters that one read completes, possibly none. Raises StreamEnded."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            raise StreamEnded("it is closed")
        self._received += data
        letters, start = [], _LENGTH.size
        while len(self._received) >= start:
            (size,) = _LENGTH.unpack_from(self._received, start - _LENGTH.size)
            if size > MAX_LETTER_BYTES:
                raise StreamEnded(f"a letter of {size} bytes")
            if len(self._received) < start + size:
                break
            letters += _decoded(bytes(self._received[start : start + size]))
            start += size + _LENGTH.size
        del self._received[: start - _LENGTH.size]
        return letters

    def close(self, wait_s: float = 0.0) -> None:
        """Close the socket, after at most ``wait_s`` for room for what is unsent."""
        poll, until = select.poll(), time.monotonic() + wait_s
        while self._unsent and (left_s := until - time.monotonic()) > 0:
            poll.register(self._socket, select.POLLOUT)
            poll.poll(1000 * left_s)
            self.flush()
        self._unsent.clear()
        self._socket.close()


def _decoded(data: bytes) -> list[Letter]:
    """The letter, or none if a process of another version has written it in another way."""
    try:
        return [_decoder.decode(data)]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _complain("letter", "a letter was not understood: %s", error)
        return []
