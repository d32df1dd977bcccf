"""Long parts of ZMQ messages, cut into pieces.

ZMQ reserves the memory for a part as soon as its length is announced, also before the peer has shown its key.
So sockets take only short parts (``ZMQ_MAXMSGSIZE``), and what is longer crosses as several.

A part of exactly :data:`PIECE_BYTES` continues in the next one; the last piece is shorter, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence

PIECE_BYTES = 1 << 16
"""Maximum size of a part on the wire."""


def cut(parts: list[bytes]) -> list[bytes]:
    """``parts`` as they cross the wire; the same list when all are short."""
    for part in parts:
        if len(part) >= PIECE_BYTES:
            return [piece for each in parts for piece in _pieces(each)]
    return parts


def _pieces(part: bytes) -> list[bytes]:
    return [part[start : start + PIECE_BYTES] for start in range(0, len(part) + 1, PIECE_BYTES)]


def joined(pieces: list[bytes]) -> list[bytes]:
    """What was :func:`cut`; the same list when all are short. A missing last piece counts as empty."""
    for piece in pieces:
        if len(piece) >= PIECE_BYTES:
            return _joined(pieces)
    return pieces


def _joined(pieces: Sequence[bytes]) -> list[bytes]:
    parts: list[bytes] = []
    gathered: list[bytes] = []
    for piece in pieces:
        gathered.append(piece)
        if len(piece) < PIECE_BYTES:
            parts.append(b"".join(gathered))
            gathered = []
    if gathered:
        parts.append(b"".join(gathered))
    return parts
