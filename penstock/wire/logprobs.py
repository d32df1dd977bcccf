"""Logprobs as sparse columns, of generated tokens and of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import F32, I32


@dataclass(slots=True)
class Logprobs:
    """Sparse logprob columns of a set of tokens; see the table in :mod:`penstock.wire.frames`."""

    token: I32
    ids: I32
    """int32[L, W]"""
    values: F32
    """float32[L, W]"""
    rank: I32

    @property
    def width(self) -> int:
        return int(self.ids.shape[1])

    def take(self, kept: NDArray[np.intp], shifted: I32) -> Logprobs | None:
        """The entries at ``kept`` with ``shifted`` as their token indexes."""
        if not len(kept):
            return None
        return Logprobs(shifted, self.ids[kept], self.values[kept], self.rank[kept])

    def of_tokens(self, kept: NDArray[np.bool_]) -> Logprobs | None:
        """The entries of the tokens that are ``kept``, which are counted anew."""
        entries = np.flatnonzero(kept[self.token])
        shifted = np.cumsum(kept)[self.token[entries]] - 1
        return self.take(entries, shifted.astype(np.int32))

    def ascending(self) -> Logprobs | None:
        """The entries in the order that the wire has them; None when there are none."""
        if not len(self.token):
            return None
        if (self.token[1:] > self.token[:-1]).all():
            return self
        order = np.argsort(self.token)
        return self.take(order, self.token[order])

    def widened(self, width: int) -> Logprobs:
        if width == self.width:
            return self
        extra = ((0, 0), (0, width - self.width))
        return Logprobs(
            self.token,
            np.pad(self.ids, extra, constant_values=-1),
            np.pad(self.values, extra, constant_values=-np.inf),
            self.rank,
        )


@dataclass(slots=True)
class PromptLogprobs:
    """Sparse logprob columns of prompt tokens; see the table in :mod:`penstock.wire.frames`."""

    row: I32
    place: I32
    ids: I32
    """int32[P, W]"""
    values: F32
    """float32[P, W]"""
    rank: I32

    def part(self, start: int, end: int) -> PromptLogprobs:
        kept = slice(start, end)
        return PromptLogprobs(
            self.row[kept], self.place[kept], self.ids[kept], self.values[kept], self.rank[kept]
        )

    def moved(self, rows: I32) -> PromptLogprobs | None:
        """With row r at ``rows[r]``, ascending; entries of rows that go to -1 are left out."""
        row = rows[self.row]
        order = np.argsort(row, kind="stable")
        order = order[np.searchsorted(row[order], 0) :]
        if not len(order):
            return None
        return PromptLogprobs(
            row[order], self.place[order], self.ids[order], self.values[order], self.rank[order]
        )


def joined_prompts(parts: Sequence[PromptLogprobs]) -> PromptLogprobs | None:
    """One set of columns, as wide as the widest part."""
    if len(parts) < 2:
        return parts[0] if parts else None
    width = max(part.ids.shape[1] for part in parts)
    extra = [((0, 0), (0, width - part.ids.shape[1])) for part in parts]
    return PromptLogprobs(
        np.concatenate([part.row for part in parts]),
        np.concatenate([part.place for part in parts]),
        np.concatenate(
            [np.pad(part.ids, wide, constant_values=-1) for part, wide in zip(parts, extra, strict=True)]
        ),
        np.concatenate(
            [
                np.pad(part.values, wide, constant_values=-np.inf)
                for part, wide in zip(parts, extra, strict=True)
            ]
        ),
        np.concatenate([part.rank for part in parts]),
    )
