"""Pictures made in the process, and requests that have them: as many different ones as are asked for."""

from __future__ import annotations

import base64
import io
import math
import zlib

import msgspec
import numpy as np

from penstock.bench.errors import BenchError

PATH = "/v1/chat/completions"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TEXT = "What is in this picture?"


def side_of(megapixels: float) -> int:
    """Width of a square picture."""
    return max(28, round(math.sqrt(megapixels * 1e6)))


class Png:
    """A picture of smooth colours, of which there are as many files as numbers: each has its own comment.

    Most of the base64 is made once, as a load of pictures needs the CPU for the server.
    """

    def __init__(self, megapixels: float) -> None:
        side = side_of(megapixels)
        ramp = np.linspace(0, 255, side, dtype=np.float32)
        noise = np.random.default_rng(1).integers(0, 2, (side, side), dtype=np.uint8)
        rows = np.zeros((side, 1 + 3 * side), np.uint8)  # each begins with its filter, 0
        for channel, level in enumerate((ramp[:, None], ramp[None, :], ramp[::-1, None])):
            rows[:, 1 + channel :: 3] = level.astype(np.uint8) + noise
        size = side.to_bytes(4, "big")
        begin = _SIGNATURE + _chunk(b"IHDR", size + size + b"\x08\x02\0\0\0")
        begin += _chunk(b"IDAT", zlib.compress(rows.tobytes(), 1))
        pad = -(len(begin) + 12) % 3
        self._begin = base64.b64encode(begin + _chunk(b"tEXt", b"a" * pad))

    def url(self, number: int) -> bytes:
        """The data: URL of a file."""
        end = _chunk(b"tEXt", b"number\0%d" % number) + _chunk(b"IEND", b"")
        return b"data:image/png;base64," + self._begin + base64.b64encode(end)


def jpeg_url(megapixels: float) -> bytes:
    """The data: URL of a JPEG file. Raises BenchError where there is no Pillow."""
    try:
        from PIL import Image
    except ImportError:
        raise BenchError("a JPEG file needs Pillow: .venv/bin/pip install pillow") from None
    side, file = side_of(megapixels), io.BytesIO()
    pixels = np.random.default_rng(2).integers(0, 255, (side // 16, side // 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((side, side)).save(file, "JPEG", quality=80)
    return b"data:image/jpeg;base64," + base64.b64encode(file.getvalue())


def picture_body(model: str, url: bytes, *, tokens: int = 1) -> bytes:
    """The request of a chat completion."""
    image = {"type": "image_url", "image_url": {"url": msgspec.Raw(b'"%b"' % url)}}
    return _body(model, [{"type": "text", "text": _TEXT}, image], tokens)


def text_body(model: str, text: str, *, tokens: int = 1) -> bytes:
    """A request without a picture."""
    return _body(model, text, tokens)


def _body(model: str, content: object, tokens: int) -> bytes:
    messages = [{"role": "user", "content": content}]
    return msgspec.json.encode(
        {"model": model, "max_tokens": tokens, "ignore_eos": True, "messages": messages}
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return len(data).to_bytes(4, "big") + kind + data + checksum.to_bytes(4, "big")
