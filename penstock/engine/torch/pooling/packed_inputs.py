"""Inputs that follow each other without padding: [T, …] of all their tokens."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.torch.transfer import to_device
from penstock.wire.arrays import I32


class EqualInputs(NamedTuple):
    """Neighbours of the same length."""

    tokens: slice
    inputs: int
    length: int


class PackedInputs:
    """The layout of B inputs with T tokens together. Those of the same length are neighbours, so that their
    attention is one call."""

    def __init__(self, lengths: I32, device: torch.device) -> None:
        """``lengths``: int32[B], sorted."""
        self.lengths = lengths
        self.device = device
        ends = np.add.accumulate(lengths, dtype=np.int64)
        self.starts = ends - lengths
        """int64[B]: index of each input's first token."""
        self.tokens = int(ends[-1])

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def equal(self) -> list[EqualInputs]:
        """All inputs, in order."""
        changes = np.flatnonzero(np.diff(self.lengths)) + 1
        bounds = [0, *changes.tolist(), len(self.lengths)]
        found = []
        for first, last in pairwise(bounds):
            start, length = int(self.starts[first]), int(self.lengths[first])
            count = last - first
            found.append(EqualInputs(slice(start, start + count * length), count, length))
        return found

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """int64[T]: each token's index in its input."""
        found: NDArray[np.int64] = np.arange(self.tokens) - np.repeat(self.starts, self.lengths)
        return found

    def on_device(self, column: NDArray[np.int64]) -> Tensor:
        return to_device(column, self.device)
