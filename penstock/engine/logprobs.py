"""Logprobs of tokens that wait in a slot until their row is due."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..wire.frames import F32, I32, Logprobs
from .rows import joined_logprobs
from .slots import SlotTable


@dataclass(slots=True, frozen=True)
class _Held:
    index: int
    """Index of the token in its slot's history."""
    ids: I32
    values: F32
    rank: int


class HeldLogprobs:
    """Sampled tokens' logprobs, given out with the row that carries the token."""

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self._held: dict[int, list[_Held]] = {}

    def clear(self, slot: int) -> None:
        self._held.pop(slot, None)

    def place(
        self, slots: NDArray[np.intp], due: NDArray[np.bool_], sampled: Logprobs | None
    ) -> Logprobs | None:
        """Logprobs of the rows that are due; their ``token`` indexes the tokens of those rows.

        ``sampled`` has indexes into ``slots`` as ``token``: the token each slot got in this step. Called
        after the tokens are in the history and before the rows are made.
        """
        if sampled is None and not self._held:
            return None
        count = self.table.length[slots] - self.table.sent[slots]
        given = np.where(due, count, 0)
        first = np.cumsum(given) - given
        parts = []
        if sampled is not None:
            row = sampled.token
            at_once = due[row] & (count[row] == 1)
            if at_once.any():
                kept = np.flatnonzero(at_once)
                parts.append(
                    Logprobs(
                        first[row[kept]].astype(np.int32),
                        sampled.ids[kept],
                        sampled.values[kept],
                        sampled.rank[kept],
                    )
                )
            self._hold(slots, sampled, np.flatnonzero(~at_once))
        parts += self._released(slots, due, first)
        return joined_logprobs(parts)

    def _hold(self, slots: NDArray[np.intp], sampled: Logprobs, entries: NDArray[np.intp]) -> None:
        for entry in entries.tolist():
            slot = int(slots[sampled.token[entry]])
            index = int(self.table.length[slot]) - 1
            held = _Held(index, sampled.ids[entry], sampled.values[entry], int(sampled.rank[entry]))
            self._held.setdefault(slot, []).append(held)

    def _released(self, slots: NDArray[np.intp], due: NDArray[np.bool_], first: I32) -> list[Logprobs]:
        if not self._held:
            return []
        parts = []
        for row in np.flatnonzero(due).tolist():
            slot = int(slots[row])
            held = self._held.pop(slot, None)
            if held is None:
                continue
            offset = int(first[row]) - int(self.table.sent[slot])
            parts.append(
                Logprobs(
                    np.array([entry.index + offset for entry in held], np.int32),
                    np.stack([entry.ids for entry in held]),
                    np.stack([entry.values for entry in held]),
                    np.array([entry.rank for entry in held], np.int32),
                )
            )
        return parts
