"""Applies the masks of grammars and of allowed tokens to logits.

:mod:`penstock.engine.sampling.structured_output` computes the masks of grammars.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.torch.transfer import to_device


def row_indexes(rows: NDArray[np.intp], like: Tensor) -> Tensor:
    return to_device(rows, like.device)


def select_rows(logits: Tensor, rows: NDArray[np.intp]) -> Tensor:
    """The given rows (ascending); ``logits`` itself if these are all rows."""
    return logits if len(rows) == len(logits) else logits[row_indexes(rows, logits)]


def put_rows(logits: Tensor, rows: NDArray[np.intp], changed: Tensor) -> None:
    """Write back the result of :func:`select_rows`."""
    if changed is not logits:
        logits[row_indexes(rows, logits)] = changed


def apply_token_mask(logits: Tensor, rows: NDArray[np.intp], masks: NDArray[np.uint8]) -> None:
    """Set the logits of tokens whose bit is 0 to -inf. ``masks``: uint8[n, bytes], token t is bit t % 8 of
    byte t // 8."""
    packed = to_device(masks, logits.device)
    index = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bit = torch.ones_like(index).bitwise_left_shift_(index)
    forbidden = (packed[:, :, None] & bit == 0).view(len(packed), -1)[:, : logits.shape[-1]]
    chosen = select_rows(logits, rows)
    put_rows(logits, rows, chosen.masked_fill_(forbidden, -torch.inf))
