"""Pictures for tests, made without any library."""

from __future__ import annotations

import base64
import random
import struct
import zlib


def png(width: int, height: int, seed: int = 0) -> bytes:
    """An RGB picture; those of different seeds differ."""
    row = bytes((seed * 37 + column) % 256 for column in range(3 * width))
    return _png(width, height, row * height)


def noise(width: int, height: int, seed: int = 0) -> bytes:
    """One that takes three bytes per pixel."""
    return _png(width, height, random.Random(seed).randbytes(3 * width * height))


def _png(width: int, height: int, pixels: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + pixels[at : at + 3 * width] for at in range(0, len(pixels), 3 * width))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows, 1)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def data_url(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode()}"
