"""Decodes the file of a picture, within bounds. The only module that imports Pillow."""

from __future__ import annotations

from io import BytesIO
from typing import NamedTuple

from PIL import Image

from penstock.media.containers import MAX_SCANNED_PIXELS, Container, read_container
from penstock.media.refused import Refused

# Sizes are checked here, before and after Pillow has read a header.
Image.MAX_IMAGE_PIXELS = None

MAX_RATIO = 200
"""Longer side to shorter one, as Qwen2-VL has it. Processors that scale the shorter side to theirs (CLIP: to
336 pixels) would make 3.7 billion pixels of 1 x 32768."""
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class PictureLimits(NamedTuple):
    """What one picture may be."""

    max_bytes: int = 32 << 20
    """Of its file."""
    max_pixels: int = 64_000_000
    """Width times height. Decoding takes at most 20 bytes for each."""
    max_side: int = 1 << 15
    max_frames: int = 1000
    """Of an animation, of which the first is served."""


def open_picture(data: bytes, limits: PictureLimits) -> Image.Image:
    """The picture, or an animation's first frame, in RGB and upright, as ``transformers`` reads its file.
    Raises Refused."""
    if len(data) > limits.max_bytes:
        raise Refused(
            "too_large",
            f"the picture's file has {len(data):,} bytes; at most {limits.max_bytes:,} are served",
        )
    container = read_container(data)
    _check_size(container.width, container.height, limits)
    _check_work(container, limits)
    try:
        image: Image.Image = Image.open(BytesIO(container.data), formats=[container.format])
        _check_size(*image.size, limits)
        image.load()
        if isinstance(image.info.get("transparency"), bytes):
            # A palette's, which conversion leaves out with a warning. A single color stays: processors look.
            del image.info["transparency"]
        image = image if image.mode == "RGB" else image.convert("RGB")
    except Refused:
        raise
    except Exception:  # noqa: BLE001  (whatever Pillow's parsers raise; some messages have addresses of memory)
        raise Refused("invalid", f"the picture's {container.format} file is damaged or cut short") from None
    method = _TRANSPOSE.get(container.orientation)
    return image if method is None else image.transpose(method)


def _check_size(width: int, height: int, limits: PictureLimits) -> None:
    if not width or not height:
        raise Refused("invalid", f"the picture has {width} x {height} pixels")
    if width * height > limits.max_pixels:
        raise Refused(
            "too_large",
            f"the picture has {width} x {height} pixels; at most {limits.max_pixels:,} in all are served",
        )
    if max(width, height) > limits.max_side:
        raise Refused(
            "too_large",
            f"the picture has {width} x {height} pixels; at most {limits.max_side:,} a side are served",
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise Refused(
            "too_large",
            f"the picture has {width} x {height} pixels; one side is at most {MAX_RATIO} times the other",
        )


def _check_work(container: Container, limits: PictureLimits) -> None:
    if container.frames > limits.max_frames:
        raise Refused(
            "too_large",
            f"the picture has {container.frames:,} frames; at most {limits.max_frames:,} are served",
        )
    passes = MAX_SCANNED_PIXELS // (container.width * container.height)
    if container.passes > passes:
        raise Refused(
            "too_large",
            f"the JPEG has {container.passes:,} scans; at most {passes:,} are served of one with "
            f"{container.width} x {container.height} pixels",
        )
