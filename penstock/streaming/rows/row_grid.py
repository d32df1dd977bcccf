"""The pieces of a frame's rows as an array; most of it stays from one frame of the same streams to the next.

A row of the array is one event: length, head, texts, tail. It has cells for each token of the frame's
longest row; the others stay empty, which costs less than to place every piece of every frame by an index.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.streaming.rows.http_framing import Objects, objects
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
    """What the rows of some tokens say."""

    texts: Objects
    """Of the tokens, row after row; or of each row, with the lists of its fields."""
    counts: I32 | None
    """Tokens per row; None: one text."""
    characters: NDArray[np.int64] | None = None
    """Characters of each row's text, where its place is counted."""

    def take(self, rows: NDArray[np.intp]) -> RowTexts:
        """The texts of the rows at these indexes, in this order."""
        counts, characters = self.counts, self.characters
        return RowTexts(
            self.texts.take(rows if counts is None else token_order(counts, rows)),
            None if counts is None else counts.take(rows),
            None if characters is None else characters.take(rows),
        )

    def joined(self) -> list[bytes]:
        """The text of each row."""
        texts: list[bytes] = self.texts.tolist()
        if self.counts is None:
            return texts
        ends = self.counts.cumsum().tolist()
        return [b"".join(texts[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


class RowGrid:
    """Pieces of R rows."""

    __slots__ = ("_cells", "_heads", "_starts", "_tails", "bounds", "width")

    def __init__(self, heads: Objects, tails: Objects, starts: NDArray[np.intp]) -> None:
        """``heads``, ``tails``: [R]. ``starts``: rows at which parts of the grid begin that are written
        apart."""
        self._heads, self._tails = heads, tails
        self._starts = starts
        self.bounds: list[int] = []
        """Index of the first piece of each part, and the number of pieces."""
        self.width = 0
        """Cells for the texts of a row."""

    def _resize(self, width: int) -> None:
        self.width = width
        self._cells: NDArray[np.object_] = np.empty((len(self._heads), width + 3), np.object_)
        self._cells[:, 1], self._cells[:, -1] = self._heads, self._tails
        self.bounds = [*((width + 3) * self._starts).tolist(), self._cells.size]

    def fill(self, lengths: Objects, texts: RowTexts) -> None:
        """Set what changes from frame to frame. ``lengths``: [R]; ``texts``: at least one per row."""
        given, counts, _ = texts
        most = 1 if counts is None else int(np.maximum.reduce(counts))
        if not fits_grid(len(lengths), len(given), most):
            given, counts, most = objects(texts.joined()), None, 1
        if most != self.width:
            self._resize(most)
        self._cells[:, 0] = lengths
        place = self._cells[:, 2:-1]
        if counts is None or len(given) == most * len(lengths):
            place[...] = given.reshape(-1, most)
        else:
            place[...] = _NO_TEXT
            place[np.arange(most) < counts[:, None]] = given

    def set_tails(self, rows: NDArray[np.intp], tails: Objects) -> None:
        """Set the tails of some rows, for this frame."""
        self._cells[rows, -1] = tails

    def pieces(self) -> list[bytes]:
        """All pieces, row after row."""
        found: list[bytes] = self._cells.ravel().tolist()
        return found
