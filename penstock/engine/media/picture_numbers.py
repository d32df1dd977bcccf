"""Prompts with pictures as the prefix cache compares them: in the place of a picture's tokens, which are the
same for every picture, is a number of its own, below all token ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from penstock.wire.media.items import Media, MediaItem

MAX_KNOWN = 1 << 16
"""Pictures whose number is known, at 200 bytes each. One that comes again after so many others gets another
number: its blocks are computed again."""
_LEAST = -(1 << 31)


class PictureNumbers:
    """Gives each picture a number, never one that another picture has had."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = -1
        self._latest: tuple[bytes, Media, bytes] = b"", (), b""
        """Prompt, pictures and what they became: choices of a request share them."""

    def in_place(self, prompt: bytes, media: Media) -> bytes | None:
        """The prompt (int32) with numbers in the place of its pictures' tokens; None: all were used up."""
        if prompt is self._latest[0] and media is self._latest[1]:
            return self._latest[2]
        tokens = np.frombuffer(prompt, "<i4").copy()
        for item in media:
            span = tokens[item.offset : item.offset + item.length]
            number = self._number(item, span.tobytes())
            if number is None:
                return None
            span[:] = number
        self._latest = prompt, media, tokens.tobytes()
        return self._latest[2]

    def _number(self, item: MediaItem, span: bytes) -> int | None:
        """The number is of the span's tokens and grid as well: what has it has the same length."""
        digest = blake2b(span, digest_size=16, key=item.key)
        digest.update(repr(item.grid).encode())
        name = digest.digest()
        known = self._numbers.get(name)
        if known is None:
            if self._next < _LEAST:
                return None
            known, self._next = self._next, self._next - 1
            self._numbers[name] = known
            if len(self._numbers) > MAX_KNOWN:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(name)
        return known


def picture_keys(
    pictures: Sequence[MediaItem], start: int, size: int, blocks: int
) -> list[list[list[object]]]:
    """The pictures in each of ``blocks`` blocks of ``size`` tokens from position ``start`` on, as vLLM's
    events tell them: key (hex), and where it begins, relative to the block."""
    keys: list[list[list[object]]] = [[] for _ in range(blocks)]
    for item in pictures:
        first, last = item.offset - start, item.offset + item.length - 1 - start
        for block in range(max(0, first // size), min(blocks - 1, last // size) + 1):
            keys[block].append([item.key.hex(), first - block * size])
    return keys
