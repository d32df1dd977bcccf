"""Reads numbers, choices and texts from a fuzzer's bytes, so that every input is one structured case."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class ByteSource:
    """Consumes ``data`` from its front. Once it is used up, every number is 0 and every text is empty."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        """Whether bytes are left."""
        return self._at < len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def number(self, size: int = 4) -> int:
        """An unsigned number of ``size`` bytes."""
        return int.from_bytes(self.take(size), "little")

    def signed(self) -> int:
        """A number of four bytes, as an int32."""
        return int.from_bytes(self.take(4).ljust(4, b"\0"), "little", signed=True)

    def below(self, most: int) -> int:
        """A number in [0, most)."""
        return (self.byte() if most <= 256 else self.number()) % most

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def flag(self) -> bool:
        return bool(self.byte() & 1)

    def take(self, size: int) -> bytes:
        """At most ``size`` bytes."""
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def text(self, most: int = 24) -> str:
        """At most ``most`` bytes as UTF-8; what is not UTF-8 is replaced."""
        return self.take(self.below(most + 1)).decode(errors="replace")

    def rest(self) -> bytes:
        return self.take(len(self._data))

    def pieces(self, whole: bytes, most: int = 6) -> list[bytes]:
        """``whole``, cut at up to ``most`` places. Two bytes for each place."""
        cuts = sorted(self.number(2) % (len(whole) + 1) for _ in range(self.below(most + 1)))
        edges = [0, *cuts, len(whole)]
        return [whole[start:end] for start, end in itertools.pairwise(edges)]
