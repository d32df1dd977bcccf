"""Splits the bytes that a client sends into requests. Bytes are parsed when they are asked for, and not
before: those of a request behind the one in progress wait."""

from __future__ import annotations

from penstock.http.errors import ApiError
from penstock.http.http1.chunked_body import CHUNKS_PER_TURN, ChunkedBody
from penstock.http.http1.known_heads import read_head
from penstock.http.http1.request_head import RequestHead, check_start

MAX_EMPTY_LINES = 8
"""Empty lines that are ignored before a request; old clients send one after a body (RFC 9112 §2.2)."""
_HEAD_END = b"\r\n\r\n"


class RequestReader:
    """The requests of one connection: :meth:`read_head`, then :meth:`read_body` until
    :attr:`body_complete`."""

    __slots__ = ("_buffer", "_chunked", "_empty_lines", "_left", "_max_head_bytes", "_searched", "chunks")

    def __init__(self, max_head_bytes: int) -> None:
        self._max_head_bytes = max_head_bytes
        self._buffer = bytearray()
        """What has come and is not parsed."""
        self._searched = 0
        """Bytes of it in which no head ends."""
        self._empty_lines = 0
        self._left = 0
        """Bytes of a body with a length that have not come."""
        self._chunked: ChunkedBody | None = None
        self.chunks = 0
        """Chunks that the latest :meth:`read_body` has decoded."""

    @property
    def waiting(self) -> int:
        """Bytes that have come and are not parsed."""
        return len(self._buffer)

    @property
    def body_complete(self) -> bool:
        """Whether the body of the latest request has been read to its end."""
        return not self._left and self._chunked is None

    @property
    def body_left(self) -> int | None:
        """Bytes of the body that have not been read; None if their number is unknown."""
        return None if self._chunked is not None else self._left

    @property
    def has_rest(self) -> bool:
        """Whether the rest of a body with a length has come."""
        return self._chunked is None and len(self._buffer) >= self._left

    @property
    def chunked(self) -> bool:
        """Whether the body that is being read is chunked."""
        return self._chunked is not None

    @property
    def has_more(self) -> bool:
        """Whether another :meth:`read_body` would find more without further bytes."""
        return self.chunked and self.chunks == CHUNKS_PER_TURN

    def receive(self, data: bytes) -> None:
        self._buffer += data

    def clear(self) -> None:
        """Forget what has come, and that the body has a rest."""
        self._buffer.clear()
        self._searched = self._left = 0
        self._chunked, self.chunks = None, 0

    def take_rest(self) -> bytes:
        """All that is not parsed: it is of another protocol."""
        rest = bytes(self._buffer)
        self._buffer = bytearray()
        return rest

    def read_head(self) -> RequestHead | None:
        """The head of the next request; None while it is incomplete. Raises ApiError."""
        buffer = self._buffer
        while buffer.startswith(b"\r\n"):
            del buffer[:2]
            self._empty_lines += 1
            if self._empty_lines > MAX_EMPTY_LINES:
                raise ApiError(400, f"There are more than {MAX_EMPTY_LINES} empty lines before a request.")
        if not buffer or buffer == b"\r":
            return None
        limit = self._max_head_bytes
        end = buffer.find(_HEAD_END, max(0, self._searched - 3), limit) + 4
        if end < 4:
            if len(buffer) > limit:
                raise ApiError(
                    431,
                    f"The request line and headers are larger than the {limit} bytes allowed by "
                    "--max-header-bytes.",
                )
            check_start(buffer, self._searched)
            self._searched = len(buffer)
            return None
        head = read_head(bytes(buffer[:end]))
        del buffer[:end]
        self._searched = self._empty_lines = 0
        if head.length is None:
            self._chunked = ChunkedBody()
        else:
            self._left = head.length
        return head

    def read_body(self) -> bytes:
        """What has come of the body since the last call. Raises ApiError."""
        buffer, chunked = self._buffer, self._chunked
        if chunked is not None:
            data, self.chunks = chunked.take(buffer)
            if chunked.done:
                self._chunked = None
            return data
        self.chunks = 0
        if len(buffer) <= self._left:
            data = bytes(buffer)
            buffer.clear()
        else:
            data = bytes(buffer[: self._left])
            del buffer[: self._left]
        self._left -= len(data)
        return data
