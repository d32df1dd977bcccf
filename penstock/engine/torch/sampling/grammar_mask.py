"""Applies the masks of grammars and of allowed tokens to logits.

:mod:`penstock.engine.sampling.structured_output` computes the masks of grammars.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.torch.transfer import to_device


class TensorRows:
    """Some rows of tensors [S, ...], or all of them, which are not copied."""

    def __init__(self, rows: NDArray[np.intp], like: Tensor) -> None:
        """``rows``: ascending. ``like``: a tensor of S rows on the device."""
        self._index = None if len(rows) == len(like) else to_device(rows, like.device)

    def select(self, values: Tensor) -> Tensor:
        """A copy of the rows; ``values`` itself if these are all rows."""
        return values if self._index is None else values[self._index]

    def write_back(self, values: Tensor, changed: Tensor) -> None:
        """Write the rows; what :meth:`select` gave, changed in place, is there already if these are all
        rows."""
        if self._index is not None:
            values[self._index] = changed
        elif changed is not values:
            values.copy_(changed)


def apply_token_mask(logits: Tensor, rows: NDArray[np.intp], masks: NDArray[np.uint8]) -> None:
    """Set the logits of tokens whose bit is 0 to -inf. ``masks``: uint8[n, bytes], token t is bit t % 8 of
    byte t // 8."""
    packed = to_device(masks, logits.device)
    index = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bit = torch.ones_like(index).bitwise_left_shift_(index)
    forbidden = (packed[:, :, None] & bit == 0).view(len(packed), -1)[:, : logits.shape[-1]]
    some = TensorRows(rows, logits)
    some.write_back(logits, some.select(logits).masked_fill_(forbidden, -torch.inf))
