"""Bounds the bytes of replies that a gateway holds to read them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_HELD_BYTES = 256 << 20
"""Bytes of all replies together: whole ones until they are complete, and incomplete events of streams."""


@dataclass(slots=True)
class HeldBytes:
    """Counts bytes that are held."""

    most: int = MAX_HELD_BYTES
    held: int = 0

    def reserve_bytes(self, count: int) -> bool:
        """Whether ``count`` more bytes may be held; they are counted then. Fewer (a negative count) always
        may."""
        if count > 0 and self.held + count > self.most:
            return False
        self.held += count
        return True

    def release_bytes(self, count: int) -> None:
        """So many bytes are no longer held."""
        self.held -= count
