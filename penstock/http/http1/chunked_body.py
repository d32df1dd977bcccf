"""Decodes the chunked body of a request (RFC 9112 §7.1) within bounds. Trailers are checked and dropped."""

from __future__ import annotations

import asyncio
import enum
import re
from collections import deque
from collections.abc import Callable

from penstock.http.errors import ApiError
from penstock.http.http1.request_head import HEADER_LINES, bad_header

MAX_SIZE_LINE = 256
"""Bytes of the line with a chunk's size and extensions."""
MAX_EXTENSIONS = 16 * 1024
"""Bytes of extensions of all chunks of a body."""
MAX_TRAILERS = 8 * 1024
"""Bytes of the trailers of a body."""
CHUNKS_PER_TURN = 512
"""Chunks of one connection that are decoded at a time: about 0.5 ms."""
CHUNKS_PER_ROUND = 2048
"""Chunks of all connections that are decoded in one round of the event loop: about 2 ms, so that connections
with tiny chunks, however many, do not delay others."""

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?\r\n")


class ChunkRounds:
    """Shares the decoding of chunked bodies among the connections of a server, which take turns."""

    def __init__(self) -> None:
        self.left = CHUNKS_PER_ROUND
        """Chunks that may still be decoded in this round of the event loop."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def spend(self, chunks: int) -> None:
        """``chunks`` have been decoded."""
        self.left -= chunks
        self._schedule()

    def wait(self, resume: Callable[[], None]) -> None:
        """Have ``resume`` called in a later round, when it is this connection's turn."""
        self._waiting.append(resume)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._scheduled = False
        self.left = CHUNKS_PER_ROUND
        for _ in range(len(self._waiting)):
            if self.left <= 0:
                break
            self._waiting.popleft()()
        if self._waiting:
            self._schedule()


class _State(enum.Enum):
    SIZE = enum.auto()
    DATA = enum.auto()
    DATA_END = enum.auto()
    TRAILERS = enum.auto()
    DONE = enum.auto()


class ChunkedBody:
    """The decoder of one body."""

    __slots__ = ("_extensions", "_left", "_state", "_trailers")

    def __init__(self) -> None:
        self._state = _State.SIZE
        self._left = 0
        """Bytes of the current chunk that have not come."""
        self._extensions = self._trailers = 0
        """Bytes of extensions and trailers so far."""

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    def take(self, buffer: bytearray) -> tuple[bytes, int]:
        """Remove what can be decoded from the start of ``buffer``, at most :data:`CHUNKS_PER_TURN` chunks.

        Returns the data, and the number of chunks; there may be more if it is the greatest. Raises ApiError.
        """
        data = bytearray()
        at, chunks = 0, 0
        while chunks < CHUNKS_PER_TURN:
            if self._state is _State.SIZE:
                end = self._line_end(buffer, at, MAX_SIZE_LINE, "The line of a chunk's size is larger than")
                if not end:
                    break
                self._start_chunk(buffer, at, end)
                at = end
                chunks += 1
            elif self._state is _State.DATA:
                piece = buffer[at : at + self._left]
                data += piece
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._state = _State.DATA_END
            elif self._state is _State.DATA_END:
                end = at + 2
                if not b"\r\n".startswith(buffer[at:end]):
                    raise ApiError(400, "A chunk of the body is longer than its size says.")
                if len(buffer) < end:
                    break
                at = end
                self._state = _State.SIZE
            elif self._state is _State.TRAILERS:
                room = MAX_TRAILERS - self._trailers
                end = self._line_end(buffer, at, room, "The trailers of the body are larger than")
                if not end:
                    break
                self._check_trailer(bytes(buffer[at:end]))
                at = end
            else:
                break
        del buffer[:at]
        return bytes(data), chunks

    def _line_end(self, buffer: bytearray, at: int, most: int, problem: str) -> int:
        """Where the line at ``at`` ends; 0 while it is incomplete."""
        end = buffer.find(b"\n", at, at + most) + 1
        if not end and len(buffer) - at >= most:
            limit = MAX_TRAILERS if self._state is _State.TRAILERS else most
            raise ApiError(400, f"{problem} {limit} bytes.")
        return end

    def _start_chunk(self, buffer: bytearray, at: int, end: int) -> None:
        match = _SIZE_LINE.fullmatch(buffer, at, end)
        if match is None:
            raise ApiError(400, "The size of a chunk of the body is no hexadecimal number before CR LF.")
        self._extensions += end - 2 - match.end(1)
        if self._extensions > MAX_EXTENSIONS:
            raise ApiError(400, f"The chunk extensions of the body are larger than {MAX_EXTENSIONS} bytes.")
        self._left = int(match[1], 16)
        self._state = _State.DATA if self._left else _State.TRAILERS

    def _check_trailer(self, line: bytes) -> None:
        self._trailers += len(line)
        if line == b"\r\n":
            self._state = _State.DONE
        elif not HEADER_LINES.fullmatch(line):
            raise bad_header(line[:-2] if line.endswith(b"\r\n") else line)
