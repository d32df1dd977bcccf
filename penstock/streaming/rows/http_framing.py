"""What frames events by size, as columns: HTTP/1.1's chunks, messages of WebSockets, HTTP/2's DATA frames."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.http.http1.chunks import CHUNK_SIZES
from penstock.http.websocket.codec import text_head

Objects: TypeAlias = NDArray[np.object_]

MAX_EVENT = len(CHUNK_SIZES)
"""Larger events are not framed by columns, unless they are chunks with fields."""
MAX_CHUNK = 1 << 20
"""Larger events with fields are not framed by columns."""


def objects(values: Sequence[bytes]) -> Objects:
    """The values as a column."""
    array = np.empty(len(values), np.object_)
    array[:] = values
    return array


CHUNK_HEADERS = objects(CHUNK_SIZES)
"""What precedes an event as a chunk, by its size."""
CHUNK_LENGTHS = np.array([len(line) + size + 2 for size, line in enumerate(CHUNK_SIZES)], np.int64)
"""Bytes of an event as a chunk, by its size."""
FRAME_LENGTHS = objects([size.to_bytes(3, "big") for size in range(MAX_EVENT)])
"""Length fields of frames (RFC 9113 §4.1), by payload size."""


@functools.cache
def _messages() -> tuple[Objects, NDArray[np.int64]]:
    """What precedes an event as a message of a WebSocket, and the bytes of that message, by the event's
    size."""
    heads = objects([text_head(size) for size in range(MAX_EVENT)])
    return heads, np.array([len(head) + size for size, head in enumerate(heads)], np.int64)


def frame_messages(
    headers: Objects, lengths: NDArray[np.int64], sizes: NDArray[np.int64], rows: NDArray[np.intp]
) -> None:
    """Give these ``rows`` the framing of messages. Raises IndexError if one has MAX_EVENT bytes or more."""
    own = sizes.take(rows)
    message_heads, message_lengths = _messages()
    headers[rows], lengths[rows] = message_heads.take(own), message_lengths.take(own)


def chunk_framing(sizes: NDArray[np.int64], limit: int) -> tuple[Objects, NDArray[np.int64]]:
    """What precedes events as chunks, and their bytes as chunks. Raises IndexError if one has ``limit`` bytes
    or more; MAX_EVENT is the least limit."""
    try:
        return CHUNK_HEADERS.take(sizes), CHUNK_LENGTHS.take(sizes)
    except IndexError:  # cheaper than to look for the greatest
        if int(sizes.max()) >= limit:
            raise
    lines = [b"%x\r\n" % size for size in sizes.tolist()]
    return objects(lines), sizes + np.fromiter(map(len, lines), np.int64, len(lines)) + 2
