"""HTTP/1.1's chunked transfer coding, which frames the bytes of a streamed reply (RFC 9112, section 7.1)."""

from __future__ import annotations

CHUNK_SIZES = [b"%x\r\n" % size for size in range(16384)]
"""Chunk headers by size in bytes, for the loop over token rows: enough for one token's event under the
longest model name allowed."""
LAST_CHUNK = b"0\r\n\r\n"
"""Ends a chunked body."""


def chunk(data: bytes) -> bytes:
    """``data``, not empty, as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)
