"""Logprobs as sparse columns, of generated tokens and of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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

    def take(self, kept: NDArray[np.intp], shifted: I32) -> Logprobs | None:
        """The entries at ``kept`` with ``shifted`` as their token indexes."""
        if not len(kept):
            return None
        return Logprobs(shifted, self.ids[kept], self.values[kept], self.rank[kept])

    def select_tokens(self, kept: NDArray[np.bool_]) -> Logprobs | None:
        """The entries of the tokens that are ``kept``, which are counted anew."""
        entries = np.flatnonzero(kept[self.token])
        shifted = np.cumsum(kept)[self.token[entries]] - 1
        return self.take(entries, shifted.astype(np.int32))

    def moved_by(self, tokens: int) -> Logprobs:
        """Behind so many other tokens."""
        return replace(self, token=self.token + np.int32(tokens))


@dataclass(slots=True)
class PromptLogprobs:
    """Sparse logprob columns of prompt tokens; see the table in :mod:`penstock.wire.frames`."""

    row: I32
    position: I32
    ids: I32
    """int32[P, W]"""
    values: F32
    """float32[P, W]"""
    rank: I32

    def slice_entries(self, start: int, end: int) -> PromptLogprobs:
        kept = slice(start, end)
        return PromptLogprobs(
            self.row[kept], self.position[kept], self.ids[kept], self.values[kept], self.rank[kept]
        )

    def remap_rows(self, rows: I32) -> PromptLogprobs | None:
        """With row r at ``rows[r]``, ascending; entries of rows that go to -1 are left out."""
        row = rows[self.row]
        order = np.argsort(row, kind="stable")
        order = order[np.searchsorted(row[order], 0) :]
        if not len(order):
            return None
        return PromptLogprobs(
            row[order], self.position[order], self.ids[order], self.values[order], self.rank[order]
        )


def concat_logprobs(parts: Sequence[Logprobs]) -> Logprobs | None:
    """One set of columns, as wide as the widest part."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return Logprobs(np.concatenate([part.token for part in parts]), *_candidates(parts))


def concat_prompt_logprobs(parts: Sequence[PromptLogprobs]) -> PromptLogprobs | None:
    """One set of columns, as wide as the widest part."""
    if len(parts) < 2:
        return parts[0] if parts else None
    row, position = (np.concatenate([getattr(part, name) for part in parts]) for name in ("row", "position"))
    return PromptLogprobs(row, position, *_candidates(parts))


def _candidates(parts: Sequence[Logprobs] | Sequence[PromptLogprobs]) -> tuple[I32, F32, I32]:
    """Ids, values and ranks of all parts."""
    width = max(part.ids.shape[1] for part in parts)

    def wide(column: NDArray[Any], missing: float) -> NDArray[Any]:
        return np.pad(column, ((0, 0), (0, width - column.shape[1])), constant_values=missing)

    return (
        np.concatenate([wide(part.ids, -1) for part in parts]),
        np.concatenate([wide(part.values, -np.inf) for part in parts]),
        np.concatenate([part.rank for part in parts]),
    )
