"""What the files of pictures are made of, read before anything is decoded.

Each format's blocks are walked within bounds, and what decoding needs is kept. Comments, profiles, text,
thumbnails, further frames and whatever follows a picture's end are left out, as theirs are the parsers whose
time and memory grow with a file's tricks. Of the metadata the orientation alone changes pixels; it is read
here.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import NamedTuple

from penstock.media.refused import Refused

MAX_BLOCKS = 1 << 17
"""Chunks, segments and data blocks of one file: they are walked in 0.1 s."""
MAX_SCANNED_PIXELS = 1 << 31
"""Pixels times scans of a progressive JPEG: each scan, of 35 bytes, is a pass over the whole picture, 0.7 ns
per pixel. Encoders write 10 to 20."""
_MAX_METADATA = 1 << 16
"""Bytes of EXIF or XMP that are looked at."""
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
# A marker in JPEG's data: not an escaped 255, a restart or a fill byte.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_UNSUPPORTED: tuple[tuple[re.Pattern[bytes], str], ...] = (
    (re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:\?xml|svg|!DOCTYPE svg)", re.IGNORECASE), "an SVG"),
    (re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!DOCTYPE|html|head|body)", re.IGNORECASE), "an HTML page"),
    (re.compile(rb"II[*+]\x00|MM\x00[*+]"), "a TIFF"),
    (re.compile(rb"\x00\x00[\x01\x02]\x00"), "an ICO"),
    (re.compile(rb"\s*%PDF-"), "a PDF"),
    (re.compile(rb".{4}ftypavi[fs]", re.DOTALL), "an AVIF"),
    (re.compile(rb".{4}ftyp(?:hei|hev|mif1|msf1)", re.DOTALL), "a HEIC"),
    (re.compile(rb".{4}ftyp|\x1aE\xdf\xa3", re.DOTALL), "a video"),
    (re.compile(rb"\xff\x0a|\x00\x00\x00\x0cJXL "), "a JPEG XL"),
    (re.compile(rb"\xff\x4f\xff\x51|\x00\x00\x00\x0cjP  "), "a JPEG 2000"),
    (re.compile(rb"8BPS"), "a PSD"),
    (re.compile(rb"%!PS"), "a PostScript file"),
    (re.compile(rb"\x1f\x8b"), "a gzip file"),
)


class Container(NamedTuple):
    format: str
    """Pillow's name."""
    width: int
    height: int
    """As the file says, before the orientation."""
    data: bytes
    """A file with the first frame and without metadata."""
    orientation: int = 1
    """EXIF's, 1 to 8."""
    frames: int = 1
    passes: int = 1
    """How often a decoder goes over all pixels."""


def read_container(data: bytes) -> Container:
    """Raises Refused for what is no picture of a served format, by its first bytes, or a broken one."""
    for magic, read in _READERS:
        if magic.match(data):
            try:
                return read(data)
            except (IndexError, ValueError, zlib.error):
                raise Refused("invalid", "the picture's file is damaged or cut short") from None
    for pattern, name in _UNSUPPORTED:
        if pattern.match(data[:256]):
            raise Refused("invalid", f"the picture is {name}; PNG, JPEG, WebP, GIF and BMP are served")
    raise Refused("invalid", "its bytes are no picture; PNG, JPEG, WebP, GIF and BMP are served")


def _number(data: bytes, at: int, size: int, order: str = "big") -> int:
    """Raises IndexError beyond the end."""
    if at < 0 or at + size > len(data):
        raise IndexError
    return int.from_bytes(data[at : at + size], "little" if order == "little" else "big")


def _bounded(blocks: int) -> None:
    if blocks > MAX_BLOCKS:
        raise Refused("too_large", f"the picture's file has more than {MAX_BLOCKS:,} blocks")


def _png(data: bytes) -> Container:
    kept, exif, xmp, frames, at, blocks = [data[:8]], b"", b"", 0, 8, 0
    kind = b""
    while kind != b"IEND":
        _bounded(blocks := blocks + 1)
        size, kind = _number(data, at, 4), data[at + 4 : at + 8]
        end = at + 12 + size
        _number(data, end - 4, 4)
        if (kind == b"IHDR") != (at == 8):
            raise ValueError
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            kept.append(data[at:end])
        elif kind == b"fcTL":
            frames += 1
        elif size <= _MAX_METADATA:
            body = data[at + 8 : end - 4]
            if kind == b"eXIf":
                exif = exif or body
            elif kind == b"iTXt" and body.startswith(b"XML:com.adobe.xmp\0\0"):
                xmp = body
            elif kind == b"zTXt" and body.startswith(b"Raw profile type exif\0\0"):
                text = zlib.decompressobj().decompress(body[23:], 2 * _MAX_METADATA)
                exif = exif or bytes.fromhex(b"".join(text.split(b"\n")[3:]).decode("latin-1"))
        at = end
    return Container(
        "PNG",
        _number(data, 16, 4),
        _number(data, 20, 4),
        b"".join(kept),
        _orientation(exif, xmp),
        frames or 1,
    )


def _jpeg(data: bytes) -> Container:
    kept, exif, xmp, at, blocks, scans = [data[:2]], b"", b"", 2, 0, 0
    frame = b""
    while True:
        _bounded(blocks := blocks + 1)
        while _number(data, at, 1) == 0xFF and data[at + 1 : at + 2] == b"\xff":
            at += 1
        if data[at] != 0xFF:
            raise ValueError
        marker = _number(data, at + 1, 1)
        if marker == 0xD9:
            kept.append(b"\xff\xd9")
            break
        end = at + 2 + _number(data, at + 2, 2)
        body = data[at + 4 : end]
        if 0xE0 <= marker <= 0xEF or marker == 0xFE:
            if marker == 0xE1:
                exif = exif or (body[6:] if body.startswith(b"Exif\0\0") else b"")
                xmp = xmp or (body if body.startswith(b"http://ns.adobe.com/xap/1.0/\0") else b"")
            elif body.startswith((b"JFIF\0", b"Adobe")) and marker in (0xE0, 0xEE) and blocks < 64:
                kept.append(data[at:end])
        else:
            if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
                if frame:
                    raise ValueError
                frame = body
            if marker == 0xDA:
                scans += 1
                found = _MARKER.search(data, end)
                end = found.start() if found else len(data)
            kept.append(data[at:end])
        if end >= len(data):
            # The decoder says what is missing.
            break
        at = end
    return Container(
        "JPEG",
        _number(frame, 3, 2),
        _number(frame, 1, 2),
        b"".join(kept),
        _orientation(exif, xmp),
        passes=max(1, scans),
    )


def _gif(data: bytes) -> Container:
    at, blocks, frames = 13, 0, 0
    if data[10] & 0x80:
        at += 3 << (data[10] & 7) + 1
    kept, control = [data[:at]], b""
    while (kind := _number(data, at, 1)) != 0x3B:
        start = at
        if kind == 0x21:
            label, at = _number(data, at + 1, 1), at + 2
        elif kind == 0x2C:
            flags, at = _number(data, at + 9, 1), at + 11
            if flags & 0x80:
                at += 3 << (flags & 7) + 1
            label, frames = 0, frames + 1
        else:
            raise ValueError
        while size := _number(data, at, 1):
            _bounded(blocks := blocks + 1)
            at += size + 1
        at += 1
        _bounded(blocks := blocks + 1)
        if label == 0xF9 and not frames:
            control = data[start:at]
        elif kind == 0x2C and frames == 1:
            kept += [control, data[start:at], b";"]
    if not frames:
        raise ValueError
    return Container(
        "GIF", _number(data, 6, 2, "little"), _number(data, 8, 2, "little"), b"".join(kept), frames=frames
    )


def _webp(data: bytes) -> Container:
    end = 8 + _number(data, 4, 4, "little")
    _number(data, end - 1, 1)
    kind = data[12:16]
    if kind == b"VP8X":
        width, height = (1 + _number(data, at, 3, "little") for at in (24, 27))
    elif kind == b"VP8L":
        bits = _number(data, 21, 4, "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    else:
        width, height = (_number(data, at, 2, "little") & 0x3FFF for at in (26, 28))
    exif, xmp, at, blocks, frames = b"", b"", 12, 0, 0
    while at + 8 <= end:
        _bounded(blocks := blocks + 1)
        kind, size = data[at : at + 4], _number(data, at + 4, 4, "little")
        body = data[at + 8 : at + 8 + min(size, _MAX_METADATA)]
        if kind == b"EXIF":
            exif = body.removeprefix(b"Exif\0\0")
        elif kind == b"XMP ":
            xmp = body
        frames += kind == b"ANMF"
        at += 8 + size + (size & 1)
    return Container("WEBP", width, height, data[:end], _orientation(exif, xmp), frames or 1)


def _bmp(data: bytes) -> Container:
    header = _number(data, 14, 4, "little")
    if header == 12:
        return Container("BMP", _number(data, 18, 2, "little"), _number(data, 20, 2, "little"), data)
    width, height = _number(data, 18, 4, "little"), _number(data, 22, 4, "little")
    if header not in (40, 52, 56, 64, 108, 124) or _number(data, 30, 4, "little") not in (0, 3):
        raise Refused("invalid", "the picture is a compressed BMP, which is not served")
    # Negative: the first row is the uppermost.
    return Container("BMP", width, min(height, (1 << 32) - height), data)


def _orientation(exif: bytes, xmp: bytes) -> int:
    """As EXIF says, else XMP; 1 where neither does."""
    try:
        order = {b"II": "little", b"MM": "big"}[exif[:2]]
        at = _number(exif, 4, 4, order)
        for entry in range(at + 2, at + 2 + 12 * min(512, _number(exif, at, 2, order)), 12):
            if _number(exif, entry, 2, order) == 0x0112:
                value = _number(exif, entry + 8, 2, order)
                return value if 1 <= value <= 8 else 1
    except (IndexError, KeyError):
        pass
    found = _XMP_ORIENTATION.search(xmp)
    value = int(found[1]) if found else 1
    return value if 1 <= value <= 8 else 1


_READERS: tuple[tuple[re.Pattern[bytes], Callable[[bytes], Container]], ...] = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), _png),
    (re.compile(rb"\xff\xd8\xff"), _jpeg),
    (re.compile(rb"RIFF....WEBPVP8[ LX]", re.DOTALL), _webp),
    (re.compile(rb"GIF8[79]a"), _gif),
    (re.compile(rb"BM.{12}", re.DOTALL), _bmp),
)
