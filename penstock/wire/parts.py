"""Long parts of ZMQ messages, cut into pieces.

ZMQ reserves the memory for a part as soon as its length is announced, also before the peer has shown its key.
So tcp sockets take only short parts (``ZMQ_MAXMSGSIZE``), and what is longer crosses as several. Processes of
one host trust each other: there a part stays whole, and is received without a copy.

A part of exactly :data:`PIECE_BYTES` continues in the next one; the last piece is shorter, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

Part: TypeAlias = bytes | memoryview
"""A part as it was received: a long one may be a view of the memory that ZMQ received it into."""
AnyPart = TypeVar("AnyPart", bytes, Part)
PIECE_BYTES = 1 << 16
"""Maximum size of a part on the wire."""


def split_parts(parts: list[bytes]) -> list[bytes]:
    """``parts`` as they cross the wire over tcp; the same list when all are short."""
    for part in parts:
        if len(part) >= PIECE_BYTES:
            return [piece for each in parts for piece in _pieces(each)]
    return parts


def mark_whole(parts: list[bytes]) -> list[bytes]:
    """``parts`` as they cross the wire on one host: whole. One that would count as a piece is followed by its
    rest, which is empty."""
    for part in parts:
        if len(part) == PIECE_BYTES:
            return [
                piece for each in parts for piece in ((each, b"") if len(each) == PIECE_BYTES else (each,))
            ]
    return parts


def _pieces(part: bytes) -> list[bytes]:
    return [part[start : start + PIECE_BYTES] for start in range(0, len(part) + 1, PIECE_BYTES)]


def join_parts(pieces: list[AnyPart]) -> list[AnyPart]:
    """Undo :func:`split_parts` and :func:`mark_whole`; the same list when no part has pieces. A missing last
    piece counts as empty."""
    for piece in pieces:
        if len(piece) == PIECE_BYTES:
            return _join_parts(pieces)
    return pieces


def _join_parts(pieces: Sequence[AnyPart]) -> list[AnyPart]:
    parts: list[AnyPart] = []
    gathered: list[AnyPart] = []
    for piece in pieces:
        gathered.append(piece)
        if len(piece) != PIECE_BYTES:
            parts.append(b"".join(gathered) if len(gathered) > 1 else piece)
            gathered = []
    if gathered:
        parts.append(b"".join(gathered))
    return parts
