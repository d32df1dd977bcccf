"""The processor of the synthetic engine: a token for each square of 28 pixels, no model, no transformers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.config.errors import ConfigError
from penstock.media.pages import PageFacts
from penstock.media.prepared import PreparedPicture
from penstock.wire.media.worker import MediaDescription

if TYPE_CHECKING:
    from PIL.Image import Image

SQUARE = 28
"""Pixels of a side, as Qwen2-VL's merged patches have."""
_LOW_TOKENS = 64
_NAMES = ("<image>", "<|image_pad|>", "<|image|>", "[IMG]", "<|vision_pad|>")


def image_token(tokenizer_dir: str) -> tuple[str, int]:
    """The added token that stands for pictures, and its id: one with a usual name, else one that is there and
    stands for nothing else, the tokenizer's last. Raises ConfigError if there is none."""
    added = _added_tokens(tokenizer_dir)
    for name in _NAMES:
        if name in added:
            return name, added[name]
    if not added:
        raise ConfigError(
            f"--synthetic-image-tokens: the tokenizer in {tokenizer_dir} has no added token, such as "
            f"{_NAMES[0]}, to stand for images"
        )
    return max(added.items(), key=lambda item: item[1])


def _added_tokens(tokenizer_dir: str) -> dict[str, int]:
    data = msgspec.json.decode(
        Path(tokenizer_dir, "tokenizer.json").read_bytes(), type=dict[str, msgspec.Raw]
    )
    entries: list[dict[str, Any]] = msgspec.json.decode(data.get("added_tokens", b"[]"))
    return {entry["content"]: entry["id"] for entry in entries}


class SyntheticProcessor:
    """``most_tokens``: of one picture."""

    def __init__(self, tokenizer_dir: str, most_tokens: int) -> None:
        name, self._token = image_token(tokenizer_dir)
        self._most = most_tokens
        self.description = MediaDescription(name, processor="synthetic")
        self.digest = hashlib.blake2b(f"synthetic {most_tokens} {self._token}".encode()).digest()

    def takes_detail(self, detail: str) -> str:
        return "low" if detail == "low" else ""

    def prepare(self, image: Image, detail: str, source_bytes: int) -> PreparedPicture:
        most = min(self._most, _LOW_TOKENS) if detail == "low" else self._most
        width, height = image.size
        columns, rows = (max(1, round(side / SQUARE)) for side in (width, height))
        if columns * rows > most:
            shrink = (most / (columns * rows)) ** 0.5
            columns = max(1, min(most, int(columns * shrink)))
            rows = max(1, min(most // columns, int(rows * shrink)))
        small = image.resize((columns * SQUARE, rows * SQUARE))
        pixels = np.asarray(small, dtype=np.float32).transpose(2, 0, 1)[None] / np.float32(255)
        features = columns * rows
        ids = np.full(features, self._token, dtype="<i4").tobytes()
        facts = PageFacts(ids, features, (1, rows, columns), source_bytes, width * height)
        return PreparedPicture(facts, {"pixel_values": pixels})
