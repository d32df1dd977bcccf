"""The pieces of a frame's rows as an array; most of it stays from one frame of the same streams to the next.

A row of the array is one event: length, head, texts, lists, tail. It has cells for each token of the frame's
longest row; the others stay empty, which costs less than to place every piece of every frame by an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.streaming.rows.http_framing import Objects, objects
from penstock.streaming.rows.token_fields import TokenFields
from penstock.wire.arrays import I32
from penstock.wire.regroup import token_order

_NO_TEXT = b""
MAX_WIDTH = 16
"""Cells for the tokens of a row that no frame has too many of."""
MAX_EMPTY = 3
"""Empty cells per token in wider frames."""


def fits_grid(rows: int, tokens: int, width: int) -> bool:
    """Whether a grid has not too many empty cells for ``rows`` with ``tokens`` in all, at most ``width``
    each."""
    return width <= MAX_WIDTH or rows * width <= (1 + MAX_EMPTY) * tokens


class RowTexts(NamedTuple):
    """What the rows of some tokens say: texts, and the items of fields by token."""

    texts: Objects
    """Of the tokens, row after row."""
    counts: I32 | None
    """Tokens per row; None: one."""
    items: Sequence[Objects] = ()
    """[T, pieces] for each list of the rows' fields."""
    characters: NDArray[np.int64] | None = None
    """Characters of each row's text, where its place is counted."""

    def take(self, rows: NDArray[np.intp]) -> RowTexts:
        """The texts of the rows at these indexes, in this order."""
        counts, characters = self.counts, self.characters
        tokens = rows if counts is None else token_order(counts, rows)
        return RowTexts(
            self.texts.take(tokens),
            None if counts is None else counts.take(rows),
            [cells[tokens] for cells in self.items],
            None if characters is None else characters.take(rows),
        )

    def joined(self) -> list[bytes]:
        """The text of each row."""
        if self.counts is None:
            texts: list[bytes] = self.texts.tolist()
            return texts
        return self._joined_by_row(self.texts)

    def joined_items(self) -> list[list[bytes]]:
        """For each list the items of each row."""
        return [self._joined_by_row(cells) for cells in self.items]

    def _joined_by_row(self, cells: Objects) -> list[bytes]:
        pieces: list[bytes] = cells.ravel().tolist()
        counts = np.ones(len(cells), np.intp) if self.counts is None else self.counts
        ends = (counts.cumsum() * (cells.size // max(len(cells), 1))).tolist()
        return [b"".join(pieces[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


class RowGrid:
    """Pieces of R rows."""

    __slots__ = ("_cells", "_heads", "_places", "_shape", "_starts", "_tails", "bounds", "fields")

    def __init__(
        self, heads: Objects, tails: Objects, starts: NDArray[np.intp], fields: TokenFields | None = None
    ) -> None:
        """``heads``, ``tails``: [R]. ``starts``: rows at which parts of the grid begin that are written
        apart. ``fields``: of all rows; their closing is part of the tails."""
        self._heads, self._tails = heads, tails
        self._starts = starts
        self.fields = fields
        self.bounds: list[int] = []
        """Index of the first piece of each part, and the number of pieces."""
        self._shape: list[tuple[int, int]] = []

    @property
    def width(self) -> int:
        """Cells for the texts of a row."""
        return self._shape[0][0]

    def _resize(self, shape: list[tuple[int, int]]) -> None:
        """Make room for the texts and each list: so many tokens per row, so many cells per token."""
        self._shape = shape
        openings = () if self.fields is None else self.fields.openings
        width = 3 + len(openings) + sum(most * pieces for most, pieces in shape)
        self._cells: NDArray[np.object_] = np.empty((len(self._heads), width), np.object_)
        self._cells[:, 1], self._cells[:, -1] = self._heads, self._tails
        self._places: list[NDArray[np.object_]] = []
        """The cells of the texts and of each list: [R, tokens, cells]."""
        at = 2
        for opening, (most, pieces) in zip((None, *openings), shape, strict=False):
            if opening is not None:
                self._cells[:, at] = opening
                at += 1
            self._places.append(self._cells[:, at : at + most * pieces].reshape(-1, most, pieces))
            at += most * pieces
        self.bounds = [*(width * self._starts).tolist(), self._cells.size]

    def fill(self, lengths: Objects, texts: RowTexts) -> None:
        """Set what changes from frame to frame. ``lengths``: [R]; ``texts``: at least one per row."""
        given, counts, items, _ = texts
        most = 1 if counts is None else int(np.maximum.reduce(counts))
        if not fits_grid(len(lengths), len(given), most):
            columns = [objects(row) for row in (texts.joined(), *texts.joined_items())]
            counts, most = None, 1
            given, items = columns[0], [column[:, None] for column in columns[1:]]
        shape = [(most, 1), *((most, cells.shape[1]) for cells in items)]
        if shape != self._shape:
            self._resize(shape)
        self._cells[:, 0] = lengths
        even = counts is None or len(given) == most * len(lengths)
        mask = None if even else np.arange(most) < counts[:, None]  # type: ignore[index]
        for place, cells in zip(self._places, (given[:, None], *items), strict=True):
            if mask is None:
                place[...] = cells.reshape(place.shape)
            else:
                place[...] = _NO_TEXT
                place[mask] = cells

    def set_tails(self, rows: NDArray[np.intp], tails: Objects) -> None:
        """Set the tails of some rows, for this frame."""
        self._cells[rows, -1] = tails

    def pieces(self) -> list[bytes]:
        """All pieces, row after row."""
        found: list[bytes] = self._cells.ravel().tolist()
        return found

    def events(self) -> list[bytes]:
        """Each row without its length."""
        return [b"".join(row) for row in self._cells[:, 1:].tolist()]
