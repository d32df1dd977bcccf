"""Files of pictures for tests, made here: good ones of each format, and hostile ones."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

from PIL import Image


def picture(width: int = 24, height: int = 16, mode: str = "RGB") -> Image.Image:
    """A gradient, so that no two corners are alike."""
    image = Image.new("RGB", (width, height))
    image.putdata(
        [(x * 9 % 256, y * 13 % 256, (x + y) * 5 % 256) for y in range(height) for x in range(width)]
    )
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image.convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *between: bytes, depth: int = 1, color: int = 0) -> bytes:
    """All zeros; ``between``: chunks before the data."""
    row = 1 + (width * depth * {0: 1, 2: 3, 6: 4}[color] + 7) // 8
    deflate = zlib.compressobj(9)
    data = b"".join(deflate.compress(bytes(row)) for _ in range(height)) + deflate.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    body = chunk(b"IHDR", header) + b"".join(between) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def exif(orientation: int, entries: int = 0) -> bytes:
    """A block of EXIF, of ``entries`` more that each claim all of its 64 KiB."""
    first = struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)
    more = b"".join(struct.pack(">HHII", 0x9000 + at, 7, 60_000, 8) for at in range(entries))
    return b"MM\0*" + struct.pack(">IH", 8, 1 + entries) + first + more + bytes(4)


def segment(marker: int, data: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data


def after_start(jpeg: bytes, *segments: bytes) -> bytes:
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def scans(jpeg: bytes, more: int) -> bytes:
    """A progressive JPEG with its last scan repeated."""
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return jpeg[:-2] + last * more + b"\xff\xd9"


def gif(frames: int, *between: bytes) -> bytes:
    """Frames of one black pixel; ``between``: blocks before each."""
    frame = b",\0\0\0\0\1\0\1\0\0\2\2D\1\0"
    return b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff" + (b"".join(between) + frame) * frames + b";"


def animated_webp(frames: int) -> bytes:
    """Of one pixel; each frame the same."""
    still = encoded(Image.new("RGB", (1, 1)), "WEBP", lossless=True)[12:]
    frame = bytes(6) + bytes(6) + b"\x0a\0\0\0" + still
    body = b"VP8X" + struct.pack("<I", 10) + b"\2\0\0\0" + bytes(6)
    body += b"ANIM" + struct.pack("<I", 6) + bytes(6)
    body += (b"ANMF" + struct.pack("<I", len(frame)) + frame + bytes(len(frame) % 2)) * frames
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body
