"""The features of pictures in a forward pass, in the place of the embeddings of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.media.spans import FeatureRows
from penstock.engine.torch.transfer import to_device


class Features(NamedTuple):
    """Those that a step computes with, R of them."""

    rows: Tensor
    """int64[R]: indexes of their tokens in the flat batch; on the device."""
    values: Tensor
    """[R, H]"""
    pictures: Sequence[NDArray[np.intp]]
    """``rows`` of each picture, on the host."""

    @classmethod
    def of(cls, parts: Iterable[tuple[FeatureRows, Tensor]], device: torch.device) -> Features | None:
        """From the rows of each picture, and all of its features [F, H]; None: there are none."""
        rows, values = [], []
        for part, features in parts:
            rows.append(part.rows)
            values.append(features[part.first : part.last])
        if not rows:
            return None
        return cls(to_device(np.concatenate(rows).astype(np.int64), device), torch.cat(values), rows)

    def reach(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[T]: the last position that each token of the flat batch attends to, where the tokens of a
        picture that are next to each other see each other in both directions (Gemma 3). ``positions``
        int64[T]: in the histories."""
        reach = positions.copy()
        for rows in self.pictures:
            ends = np.append(np.flatnonzero(np.diff(positions[rows]) > 1), len(rows) - 1)
            reach[rows] = np.repeat(positions[rows[ends]], np.diff(ends, prepend=-1))
        return reach

    def embed(self, embedding: Any, tokens: Tensor) -> Tensor:
        """[T, H]: what layers compute with for tokens int64[T], by the model's own ``embedding``, which may
        scale. It need not have the token of pictures."""
        embedded: Tensor = embedding(tokens.index_fill(0, self.rows, 0))
        return embedded.index_copy(0, self.rows, self.values.to(embedded.dtype))
