"""Rows of a table that slots share: what the choices of one request have in common is held once."""

from __future__ import annotations

import numpy as np


class SharedRows:
    """Gives each slot the row of its source object; slots with the same object share a row.

    Objects are compared by identity: the choices of a request arrive with the same ones, and comparing long
    lists would cost as much as holding them. A row's object is kept as long as the row, so that no other
    object gets its id.
    """

    def __init__(self, slots: int) -> None:
        self.none = slots
        """The row of slots without a source. It belongs to no source."""
        self.of_slot = np.full(slots, slots, np.intp)
        """int64[slots]: each slot's row."""
        self._row_of: dict[int, int] = {}
        """Rows by the id of their source."""
        self._sources: list[object] = [None] * slots
        self._users = [0] * slots
        self._free = list(range(slots - 1, -1, -1))

    def __len__(self) -> int:
        """Rows in use."""
        return len(self._row_of)

    def acquire(self, slot: int, source: object) -> int | None:
        """Give a slot that has no row the one of ``source``. Returns the row if it is unused so far, for the
        caller to fill it."""
        row = self._row_of.get(id(source))
        is_unused = row is None
        if row is None:
            row = self._free.pop()
            self._row_of[id(source)] = row
            self._sources[row] = source
        self._users[row] += 1
        self.of_slot[slot] = row
        return row if is_unused else None

    def release(self, slot: int) -> int | None:
        """Take the row from a slot, which may have none. Returns it if no slot uses it any longer."""
        row = int(self.of_slot[slot])
        if row == self.none:
            return None
        self.of_slot[slot] = self.none
        self._users[row] -= 1
        if self._users[row]:
            return None
        del self._row_of[id(self._sources[row])]
        self._sources[row] = None
        self._free.append(row)
        return row
