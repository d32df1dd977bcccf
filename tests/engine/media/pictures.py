"""Pictures in a store, prompts with them, and schedulers that take them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from penstock.engine.media.engine_media import EngineMedia
from penstock.engine.media.page_supply import PageSupply
from penstock.media.pages import PageFacts, sealed
from penstock.media.store import MediaStore
from penstock.wire.media.items import MediaItem
from tests.engine.paged import IMAGE, Driver, Encoder, make_scheduler

MARK = 3


def key(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def file_of(name: str, features: int) -> bytes:
    """A sealed file."""
    facts = PageFacts(b"", features)
    return b"".join(bytes(piece) for piece in sealed(facts, {"pixel_values": np.arange(features)}))


class Pictures:
    """A store, and an encoder."""

    def __init__(self, directory: Path) -> None:
        self.store = MediaStore(str(directory), 1 << 20)
        self.supply = PageSupply(self.store)
        self.encoder = Encoder()

    def put(self, *names: str, features: int = 6) -> None:
        """Prepare pictures."""
        for name in names:
            self.store.put(key(name), [file_of(name, features)]).close()

    def store_file(self, name: str) -> Path:
        return Path(self.store.directory, key(name).hex())

    def driver(
        self, *, cache_tokens: int = 24, step_tokens: int = 64, whole_spans: bool = False, **more: Any
    ) -> Driver:
        scheduler = make_scheduler(max_num_batched_tokens=step_tokens, **more)
        scheduler.take_pictures(
            EngineMedia(
                scheduler.table,
                IMAGE,
                self.encoder,
                self.supply,
                cache_tokens=cache_tokens,
                step_tokens=step_tokens,
                whole_spans=whole_spans,
            )
        )
        return Driver(scheduler)


@contextmanager
def pictures_in(directory: Path) -> Iterator[Pictures]:
    """What is closed at the end."""
    pictures = Pictures(directory)
    try:
        yield pictures
    finally:
        pictures.supply.close()
        pictures.store.close()


def prompt(*parts: str | int, features: int = 6) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Tokens and pictures: a number is so many tokens of text, a name a picture of ``features`` image tokens
    between two marks."""
    tokens: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            tokens += [10 + len(tokens) % 7] * part
        else:
            size = len(file_of(part, features))
            media.append(MediaItem(key(part), len(tokens), features + 2, size))
            tokens += [MARK, *[IMAGE] * features, MARK]
    return tokens, tuple(media)
