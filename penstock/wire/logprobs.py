"""Logprobs of generated tokens and of prompt tokens, as sparse columns of a token frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import F32, I32, any_true

ENTRY_CANDIDATES = 128
"""Maximum candidates in one entry of a generated token. A token with more has several entries in a row, so
that those of other streams are not padded to a whole vocabulary."""


@dataclass(slots=True)
class Logprobs:
    """Sparse logprob columns of generated tokens; see the table in :mod:`penstock.wire.frames`."""

    token: I32
    """Ascending; the entries of one token follow each other."""
    ids: I32
    """int32[L, W]"""
    values: F32
    """float32[L, W]"""
    rank: I32

    def select_entries(self, kept: NDArray[np.intp], shifted: I32) -> Logprobs | None:
        """The entries at ``kept``, with the token indexes ``shifted``; None if there are none."""
        if not len(kept):
            return None
        ids, values = self.ids.take(kept, axis=0), self.values.take(kept, axis=0)
        return Logprobs(shifted, ids, values, self.rank[kept])

    def cover(self, tokens: int) -> bool:
        """Whether each of so many tokens has exactly one entry: that of token t is at t."""
        token = self.token
        return len(token) == tokens and token.tobytes() == np.arange(tokens, dtype=token.dtype).tobytes()

    def slice_entries(self, low: int, high: int, start: int) -> Logprobs | None:
        """Entries ``low`` to ``high``, with token indexes relative to ``start``; None: there are none."""
        if low == high:
            return None
        part = slice(low, high)
        return Logprobs(
            self.token[part] - np.int32(start), self.ids[part], self.values[part], self.rank[part]
        )

    def select_tokens(self, kept: NDArray[np.bool_]) -> Logprobs | None:
        """The entries of the tokens in the mask ``kept``, indexed among the kept tokens."""
        entries = np.flatnonzero(kept[self.token])
        shifted = np.cumsum(kept)[self.token[entries]] - 1
        return self.select_entries(entries, shifted.astype(np.int32))

    def split(self) -> Logprobs:
        """Split the candidates into entries of at most ENTRY_CANDIDATES; here every token has one entry."""
        width = self.ids.shape[1]
        if width <= ENTRY_CANDIDATES:
            return self
        parts = -(-width // ENTRY_CANDIDATES)
        beyond = ((0, 0), (0, parts * ENTRY_CANDIDATES - width))
        ids = np.pad(self.ids, beyond, constant_values=-1).reshape(-1, parts, ENTRY_CANDIDATES)
        values = np.pad(self.values, beyond, constant_values=-np.inf).reshape(-1, parts, ENTRY_CANDIDATES)
        kept = ids[:, :, 0] >= 0
        entries = kept.sum(axis=1)
        return Logprobs(
            np.repeat(self.token, entries), ids[kept], values[kept], np.repeat(self.rank, entries)
        )

    def is_split(self) -> bool:
        """Whether some token has several entries; others have the width of those with most."""
        return self.ids.shape[1] >= ENTRY_CANDIDATES and bool(self.continues().any())

    def continues(self) -> NDArray[np.bool_]:
        """bool[L]: the entries that continue the one before them."""
        return np.concatenate(([False], self.token[1:] == self.token[:-1]))

    def moved_by(self, tokens: int) -> Logprobs:
        """Copy the entries, with token indexes increased by ``tokens``."""
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
        return self._take(slice(start, end))

    def remap_rows(self, rows: I32) -> PromptLogprobs | None:
        """The entries with row r moved to ``rows[r]``, ascending; those of rows moved to -1 are omitted."""
        row = rows[self.row]
        order = np.argsort(row, kind="stable")
        order = order[np.searchsorted(row[order], 0) :]
        if not len(order):
            return None
        return replace(self._take(order), row=row[order])

    def _take(self, entries: slice | NDArray[np.intp]) -> PromptLogprobs:
        return PromptLogprobs(
            row=self.row[entries],
            position=self.position[entries],
            ids=self.ids[entries],
            values=self.values[entries],
            rank=self.rank[entries],
        )


def are_sound(logprobs: Logprobs | PromptLogprobs, vocabulary: int, tokens: I32 | None = None) -> bool:
    """Whether no entry is wrong; see :func:`wrong_candidates`. ``tokens``: sound ids that those of the
    entries may be equal to."""
    # A little-endian float32 that is infinite or no number ends with FF or 7F, and an int32 has its sign in
    # its last byte. A server that has slept searches 64 bytes in a tenth of the time of array operations.
    ids, ends = logprobs.ids, logprobs.values.tobytes()[3::4]
    if (b"\xff" in ends or b"\x7f" in ends) and any_true(~(logprobs.values < np.inf)):
        return False
    if not logprobs.rank.tobytes()[3::4].isascii():
        return False
    if tokens is not None and ids.tobytes() == tokens.tobytes():
        return True
    if any_true(ids[:, 0] < 0):
        return False
    # As an unsigned number -1, plus 1, is 0, and what is less is large.
    return int(np.maximum.reduce((ids + np.int32(1)).view(np.uint32), axis=None)) <= vocabulary


def wrong_candidates(logprobs: Logprobs | PromptLogprobs, vocabulary: int) -> NDArray[np.bool_]:
    """bool[L]: entries with an id that is neither below ``vocabulary`` nor -1, without an id for the token
    itself, with a value that is no number or plus infinity, or with a negative rank."""
    ids, values = logprobs.ids, logprobs.values
    wrong = ((ids < -1) | (ids >= vocabulary) | ~(values < np.inf)).any(axis=1)
    wrong |= (ids[:, 0] < 0) | (logprobs.rank < 0)
    return wrong


def concat_logprobs(parts: Sequence[Logprobs]) -> Logprobs | None:
    """All entries in one set of columns, padded to the widest part; None without parts."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return Logprobs(np.concatenate([part.token for part in parts]), *_candidates(parts))


def concat_prompt_logprobs(parts: Sequence[PromptLogprobs]) -> PromptLogprobs | None:
    """All entries in one set of columns, padded to the widest part; None without parts."""
    if len(parts) < 2:
        return parts[0] if parts else None
    row, position = (np.concatenate([getattr(part, name) for part in parts]) for name in ("row", "position"))
    return PromptLogprobs(row, position, *_candidates(parts))


def _candidates(parts: Sequence[Logprobs] | Sequence[PromptLogprobs]) -> tuple[I32, F32, I32]:
    """Ids, values and ranks of all parts, padded to the widest part."""
    width = max(part.ids.shape[1] for part in parts)

    def wide(column: NDArray[Any], missing: float) -> NDArray[Any]:
        return np.pad(column, ((0, 0), (0, width - column.shape[1])), constant_values=missing)

    return (
        np.concatenate([wide(part.ids, -1) for part in parts]),
        np.concatenate([wide(part.values, -np.inf) for part in parts]),
        np.concatenate([part.rank for part in parts]),
    )
