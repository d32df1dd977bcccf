"""Request ids that tell the slot: 16 hexadecimal digits, of which the first 8 name this process's attachment,
the next 4 the slot, and the last 4 count the slot's requests.

Ids of an earlier attachment, which the engine may still run, have another tag.
"""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

MAX_SLOTS = 1 << 16
_NO_REQUEST = 0
"""No key has this value: keys are digits."""

U64 = NDArray[np.uint64]


class RequestIds:
    """The ids of the requests that run, by slot."""

    def __init__(self, slots: int) -> None:
        assert slots <= MAX_SLOTS
        self.slots = slots
        self.tag = secrets.token_hex(4)
        self.tag_word = np.frombuffer(self.tag.encode(), "<u8")[0]
        self._count = [0] * slots
        self._ids: list[str | None] = [None] * slots
        self._slots: dict[str, int] = {}
        self._keys = np.zeros(slots, "<u8")
        """The last 8 digits of each slot's id as a number; 0: no request."""

    def assign(self, slot: int) -> str:
        """A new id for the slot's request."""
        count = self._count[slot] = (self._count[slot] + 1) & 0xFFFF
        request_id = f"{self.tag}{slot:04x}{count:04x}"
        self._ids[slot] = request_id
        self._slots[request_id] = slot
        self._keys[slot] = int.from_bytes(request_id[8:].encode(), "little")
        return request_id

    def of(self, slot: int) -> str:
        """The id of the slot's request."""
        request_id = self._ids[slot]
        assert request_id is not None
        return request_id

    def forget(self, slot: int) -> None:
        """The slot's request has ended."""
        del self._slots[self.of(slot)]
        self._ids[slot] = None
        self._keys[slot] = _NO_REQUEST

    def slots_of(self, keys: U64) -> NDArray[np.intp]:
        """intp[R]: the slots of requests whose ids end in ``keys``; -1: none of these runs."""
        digits = keys & np.uint64(0xFFFFFFFF)
        nibbles = (digits & np.uint64(0x0F0F0F0F)) + np.uint64(9) * (
            (digits >> np.uint64(6)) & np.uint64(0x01010101)
        )
        # The first digit is in the lowest byte.
        slots: NDArray[np.intp] = (
            ((nibbles & np.uint64(0xF)) << np.uint64(12))
            | (nibbles & np.uint64(0xF00))
            | ((nibbles >> np.uint64(12)) & np.uint64(0xF0))
            | ((nibbles >> np.uint64(24)) & np.uint64(0xF))
        ).astype(np.intp)
        beyond = slots >= len(self._keys)
        if np.count_nonzero(beyond):
            slots[beyond] = 0
        others = self._keys[slots] != keys
        if np.count_nonzero(others):
            slots[others] = -1
        return slots

    def slot_of(self, request_id: str) -> int | None:
        """The slot of one id; None: no request with it runs."""
        return self._slots.get(request_id)
