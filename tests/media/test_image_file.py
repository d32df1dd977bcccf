from __future__ import annotations

import io
import random
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image, ImageOps

from penstock.media.image_file import PictureLimits, open_picture
from penstock.media.refused import Refused
from tests.media import picture_files as files

LIMITS = PictureLimits()


def reference(data: bytes) -> Image.Image:
    """As transformers.image_utils.load_image reads a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def refused(data: bytes, limits: PictureLimits = LIMITS) -> str:
    with pytest.raises(Refused) as error:
        open_picture(data, limits)
    return f"{error.value.code}: {error.value.message}"


def grey16() -> Image.Image:
    image = Image.new("I;16", (8, 8))
    image.putdata([at * 999 for at in range(64)])
    return image


GOOD: dict[str, Callable[[], bytes]] = {
    "png": lambda: files.encoded(files.picture(), "PNG"),
    "png of 1 bit": lambda: files.encoded(files.picture(mode="1"), "PNG"),
    "png, grey": lambda: files.encoded(files.picture(mode="L"), "PNG"),
    "png, grey, 16 bits": lambda: files.encoded(grey16(), "PNG"),
    "png, RGB, 16 bits": lambda: files.png(8, 8, depth=16, color=2),
    "png, grey with alpha": lambda: files.encoded(files.picture(mode="LA"), "PNG"),
    "png with alpha": lambda: files.encoded(files.picture(mode="RGBA"), "PNG"),
    "png, palette": lambda: files.encoded(files.picture(mode="P"), "PNG"),
    "png, transparent palette": lambda: files.encoded(
        files.picture(mode="P"), "PNG", transparency=b"\0\x80" * 9
    ),
    "png, transparent color": lambda: files.encoded(files.picture(), "PNG", transparency=(0, 0, 0)),
    "png with text": lambda: files.encoded(files.picture(), "PNG", exif=files.exif(6), dpi=(72, 72)),
    "apng": lambda: files.encoded(
        files.picture(), "PNG", save_all=True, append_images=[files.picture().rotate(180)]
    ),
    "jpeg": lambda: files.encoded(files.picture(), "JPEG"),
    "jpeg, grey": lambda: files.encoded(files.picture(mode="L"), "JPEG"),
    "jpeg, CMYK": lambda: files.encoded(files.picture(mode="CMYK"), "JPEG"),
    "jpeg, progressive": lambda: files.encoded(
        files.picture(), "JPEG", progressive=True, comment=b"\xff\xd9" * 9
    ),
    "jpeg, RGB": lambda: files.encoded(files.picture(), "JPEG", keep_rgb=True),
    "jpeg with restarts": lambda: files.encoded(files.picture(), "JPEG", restart_marker_blocks=1),
    "jpeg with fill bytes": lambda: files.after_start(files.encoded(files.picture(), "JPEG"), b"\xff\xff"),
    "jpegs": lambda: files.encoded(files.picture(), "MPO", save_all=True, append_images=[files.picture()]),
    "webp": lambda: files.encoded(files.picture(), "WEBP"),
    "webp, lossless": lambda: files.encoded(files.picture(), "WEBP", lossless=True),
    "webp with alpha": lambda: files.encoded(files.picture(mode="RGBA"), "WEBP", exif=files.exif(8)),
    "webp, animated": lambda: files.encoded(
        files.picture(), "WEBP", save_all=True, append_images=[files.picture().rotate(180)]
    ),
    "gif": lambda: files.encoded(files.picture(), "GIF", comment=b"x" * 999),
    "gif, transparent": lambda: files.encoded(files.picture(mode="P"), "GIF", transparency=3),
    "gif, animated": lambda: files.encoded(
        files.picture(mode="P"), "GIF", save_all=True, append_images=[files.picture(mode="P").rotate(180)]
    ),
    "bmp": lambda: files.encoded(files.picture(), "BMP"),
    "bmp, palette": lambda: files.encoded(files.picture(mode="P"), "BMP"),
    "bmp with alpha": lambda: files.encoded(files.picture(mode="RGBA"), "BMP"),
} | {
    f"{kind}, orientation {way}": lambda kind=kind, way=way: files.encoded(  # type: ignore[misc]
        files.picture(), kind, exif=b"Exif\0\0" + files.exif(way)
    )
    for kind in ("JPEG", "PNG", "WEBP")
    for way in range(10)
}


@pytest.mark.parametrize("name", GOOD)
def test_pixels_are_those_that_transformers_reads(name: str) -> None:
    data = GOOD[name]()
    wanted, found = reference(data), open_picture(data, LIMITS)
    assert (found.mode, found.size, found.tobytes()) == ("RGB", wanted.size, wanted.tobytes())
    # Processors lay pictures with it over white.
    assert found.info.get("transparency") == wanted.info.get("transparency")


@pytest.mark.parametrize("name", ["png", "jpeg", "jpeg, progressive", "webp", "gif", "bmp"])
def test_what_follows_a_picture_is_not_read(name: str) -> None:
    data = GOOD[name]()
    wanted = open_picture(data, LIMITS).tobytes()
    assert (
        open_picture(data + b"PK\3\4" + files.png(9, 9) + b"\xff\xd8\xff\xd9" * 99, LIMITS).tobytes()
        == wanted
    )


@pytest.mark.parametrize("name", ["png", "jpeg", "jpeg, progressive", "webp", "gif", "bmp"])
def test_a_truncated_file_is_refused(name: str) -> None:
    data = GOOD[name]()
    for size in [*range(16, len(data) - 8, len(data) // 16), len(data) - 9]:
        assert refused(data[:size]).startswith("invalid: "), size


def test_xmp_tells_the_orientation_where_exif_does_not() -> None:
    xmp = b'<x:xmpmeta tiff:Orientation="6"/>'
    jpeg = files.after_start(GOOD["jpeg"](), files.segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp))
    text = files.chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)
    raw = b"\nexif\n" + b"%8d\n" % len(files.exif(8)) + files.exif(8).hex().encode() + b"\n"
    profile = files.chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw))
    for data in (jpeg, files.png(3, 5, text), files.png(3, 5, profile)):
        found, wanted = open_picture(data, LIMITS), reference(data)
        assert found.size == wanted.size != Image.open(io.BytesIO(data)).size
        assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "invalid: its bytes are no picture"),
        (b"hello", "invalid: its bytes are no picture"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "invalid: the picture is an SVG"),
        (b'\xef\xbb\xbf <?xml version="1.0"?><svg/>', "invalid: the picture is an SVG"),
        (b"<!doctype html>", "invalid: the picture is an HTML page"),
        (b"II*\0" + bytes(20), "invalid: the picture is a TIFF"),
        (b"\0\0\1\0" + bytes(20), "invalid: the picture is an ICO"),
        (b"%PDF-1.7", "invalid: the picture is a PDF"),
        (b"\0\0\0\x18ftypheic", "invalid: the picture is a HEIC"),
        (b"\0\0\0\x18ftypavif", "invalid: the picture is an AVIF"),
        (b"\0\0\0\x18ftypisom", "invalid: the picture is a video"),
        (b"\x1f\x8b\x08", "invalid: the picture is a gzip file"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "invalid: the picture is a PostScript file"),
        (b"8BPS\0\1", "invalid: the picture is a PSD"),
        (b"\xff\x0a", "invalid: the picture is a JPEG XL"),
        (b"\x89PNG\r\n\x1a\n", "invalid: the picture's file is damaged or cut short"),
        (b"\xff\xd8\xff", "invalid: the picture's file is damaged or cut short"),
    ],
)
def test_other_files_are_refused_by_name(data: bytes, said: str) -> None:
    assert refused(data).startswith(said)


def webp_header(width: int, height: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + size


def repeated_frame_header() -> bytes:
    """The first says 24 x 16 pixels, the second 60000 x 60000."""
    data = GOOD["jpeg"]()
    at = data.index(b"\xff\xc0")
    again = files.segment(0xC0, b"\x08" + struct.pack(">HH", 60000, 60000) + data[at + 9 : at + 19])
    return data[:at] + again + data[at:]


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "100 megapixels": (
        lambda: files.png(10_000, 10_000),
        "too_large: the picture has 10000 x 10000 pixels; at most 64,000,000",
    ),
    "a side": (
        lambda: files.png(1, 40_000),
        "too_large: the picture has 1 x 40000 pixels; at most 32,768 a side",
    ),
    "a strip": (
        lambda: files.png(1, 201),
        "too_large: the picture has 1 x 201 pixels; one side is at most 200 times",
    ),
    "no pixel": (lambda: files.png(0, 3), "invalid: the picture has 0 x 3 pixels"),
    "webp": (lambda: webp_header(16_383, 16_383), "too_large: the picture has 16383 x 16383"),
    "webp, huge": (lambda: webp_header(1 << 24, 1 << 8), "too_large: the picture has 16777216 x 256"),
    "gif": (lambda: b"GIF89a" + b"\xff" * 4 + files.gif(1)[10:], "too_large: the picture has 65535 x 65535"),
    "a gif's frame": (
        lambda: files.gif(1).replace(b",\0\0\0\0\1\0\1\0", b",\0\0\0\0\xff\xff\xff\xff"),
        "too_large: the picture has 65535 x 65535",
    ),
    "bmp": (lambda: b"BM" + bytes(12) + struct.pack("<IiiHHI", 40, 60_000, -60_000, 1, 1, 0), "too_large: "),
    "bmp, compressed": (
        lambda: b"BM" + bytes(12) + struct.pack("<IiiHHI", 40, 8000, 8000, 1, 8, 1),
        "invalid: the picture is a compressed BMP",
    ),
    "two sizes": (repeated_frame_header, "invalid: "),
    "scans": (
        lambda: files.scans(files.encoded(Image.new("L", (4096, 4096)), "JPEG", progressive=True), 200),
        "too_large: the JPEG has 206 scans; at most 128 are served of one with 4096 x 4096 pixels",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_before_they_are_decoded(
    name: str, allocated: Callable[[Callable[[], Any]], int]
) -> None:
    make, said = BOMBS[name]
    data = make()
    found = ""

    def attempt() -> None:
        nonlocal found
        found = refused(data)

    assert allocated(attempt) < 8 << 20
    assert found.startswith(said)


LONG: dict[str, tuple[Callable[[], bytes], str]] = {
    "10,000 frames of gif": (
        lambda: files.gif(10_000),
        "too_large: the picture has 10,000 frames; at most 1,000",
    ),
    "10,000 frames of webp": (
        lambda: files.animated_webp(10_000),
        "too_large: the picture has 10,000 frames",
    ),
    "10,000 frames of png": (
        lambda: files.png(1, 1, *[files.chunk(b"fcTL", bytes(26))] * 10_000),
        "too_large: the picture has 10,000 frames",
    ),
    "blocks of gif": (
        lambda: files.gif(1, b"!\xfe" + b"\1x" * 200_000 + b"\0"),
        "too_large: the picture's file has",
    ),
    "chunks of png": (
        lambda: files.png(1, 1, *[files.chunk(b"tEXt", b"")] * 140_000),
        "too_large: the picture's file has more than 131,072 blocks",
    ),
    "segments of jpeg": (
        lambda: files.after_start(GOOD["jpeg"](), *[files.segment(0xFE, b"")] * 140_000),
        "too_large: the picture's file has",
    ),
}


@pytest.mark.parametrize("name", LONG)
def test_frames_and_blocks_are_counted_only_so_far(name: str) -> None:
    make, said = LONG[name]
    assert refused(make()).startswith(said)


METADATA: dict[str, Callable[[], bytes]] = {
    "exif of 300 MB": lambda: files.after_start(
        GOOD["jpeg"](), files.segment(0xE1, b"Exif\0\0" + files.exif(1, 5000) + bytes(5000))
    ),
    "exif, many": lambda: files.after_start(GOOD["jpeg"](), *[files.segment(0xE1, b"Exif\0\0MM")] * 5_000),
    "profiles": lambda: files.after_start(
        GOOD["jpeg"](), *[files.segment(0xE2, b"ICC_PROFILE\0\1\1" + bytes(60_000))] * 100
    ),
    "comments of gif": lambda: files.gif(1, b"!\xfe" + (b"\xff" + b"x" * 255) * 10_000 + b"\0"),
    "iCCP of 256 MB": lambda: files.png(
        2, 2, files.chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(1 << 24), 9) * 16)
    ),
    "zTXt, many": lambda: files.png(
        2, 2, *[files.chunk(b"zTXt", b"x\0\0" + zlib.compress(bytes(1 << 20)))] * 99
    ),
    "a raw profile of 16 MB": lambda: files.png(
        2, 2, files.chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(bytes(1 << 24), 9))
    ),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_costs_nothing(name: str, allocated: Callable[[Callable[[], Any]], int]) -> None:
    data = METADATA[name]()
    assert allocated(lambda: open_picture(data, LIMITS)) < len(data) + (2 << 20)


def test_limits_are_the_callers() -> None:
    data = GOOD["png"]()
    assert refused(data, PictureLimits(max_bytes=len(data) - 1)).startswith(
        f"too_large: the picture's file has {len(data)} bytes"
    )
    assert refused(data, PictureLimits(max_pixels=383)).startswith(
        "too_large: the picture has 24 x 16 pixels"
    )
    assert refused(GOOD["gif, animated"](), PictureLimits(max_frames=1)).startswith(
        "too_large: the picture has 2"
    )
    assert open_picture(data, PictureLimits(len(data), 384, 24, 1)).size == (24, 16)
    assert open_picture(files.png(200, 1), LIMITS).size == (200, 1)


def test_any_bytes_are_a_picture_or_refused() -> None:
    chance = random.Random(7)
    samples = [make() for make in GOOD.values()]
    for _ in range(3000):
        data = bytearray(chance.choice(samples))
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(min(len(data), chance.choice([32, 128, 1 << 20])))] = chance.choice(
                [0, 1, 127, 128, 255, chance.randrange(256)]
            )
        if chance.random() < 0.2:
            del data[chance.randrange(len(data)) :]
        message = ""
        try:
            assert open_picture(bytes(data), PictureLimits(max_pixels=100_000)).mode == "RGB"
        except Refused as error:
            message = error.message
        assert "0x" not in message
