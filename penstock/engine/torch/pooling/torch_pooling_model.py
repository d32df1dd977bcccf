"""The torch engine's model of vectors, scores and labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.pooling.model import PoolingBatch
from penstock.engine.torch.device import device_name
from penstock.engine.torch.pooling.heads import Head
from penstock.engine.torch.pooling.packed_inputs import PackedInputs
from penstock.wire.arrays import F32, I32
from penstock.wire.pooling import PER_TOKEN, PoolingInfo


class States(Protocol):
    """Computes the last hidden states of whole texts."""

    def compute(self, ids: I32, inputs: PackedInputs, seconds: I32) -> Tensor:
        """[T, H]. ids: int32[T]; seconds: int32[B]."""


class TorchPoolingModel:
    """Computes the inputs of a batch part by part, those of the same length together."""

    def __init__(
        self,
        info: PoolingInfo,
        states: States,
        head: Head,
        *,
        tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """``tokens``: of a part, unless an input alone has more. ``dtype``: of the weights."""
        self.info = info
        self.device = device_name(device)
        self.dtype = str(dtype).removeprefix("torch.")
        self._states = states
        self._head = head
        self._tokens = tokens
        self._place = device

    @torch.inference_mode()
    def compute(self, batch: PoolingBatch) -> Sequence[F32]:
        """See :class:`~penstock.engine.pooling.model.PoolingModel`."""
        counts = [group.inputs for group in batch.groups]
        per_token = np.repeat([group.params.task in PER_TOKEN for group in batch.groups], counts)
        skipped = np.repeat([group.params.skipped for group in batch.groups], counts)
        skipped = np.minimum(skipped, batch.lengths - 1).astype(np.int32)
        ends = np.add.accumulate(batch.lengths, dtype=np.int64)
        starts = ends - batch.lengths
        rows: Tensor | None = None
        token_rows: Tensor | None = None
        for part in self._parts(batch.lengths):
            lengths = batch.lengths[part]
            inputs = PackedInputs(lengths, self._place)
            places = np.repeat(starts[part] - inputs.starts, lengths) + np.arange(inputs.tokens)
            states = self._states.compute(batch.ids[places], inputs, batch.seconds[part])
            wanted = per_token[part]
            if not wanted.all():
                found = self._head.of_inputs(states, inputs, skipped[part])
                rows = _put(rows, len(batch.lengths), part, found)
            if wanted.any():
                token_rows = _put(token_rows, len(batch.ids), places, self._head.of_tokens(states))
        results: list[F32] = []
        first = 0
        for params, count in batch.groups:
            last = first + count
            if params.task in PER_TOKEN:
                assert token_rows is not None
                found = token_rows[int(starts[first]) : int(ends[last - 1])]
            else:
                assert rows is not None
                found = rows[first:last]
            results.append(self._head.finish(found, params).cpu().numpy())
            first = last
        return results

    def _parts(self, lengths: I32) -> list[NDArray[np.intp]]:
        """Indices of inputs by length, so many at a time that they have few tokens."""
        order = np.argsort(lengths, kind="stable")
        ends = np.add.accumulate(lengths[order], dtype=np.int64)
        parts, first, before = [], 0, 0
        while first < len(order):
            last = max(first + 1, int(np.searchsorted(ends, before + self._tokens, "right")))
            parts.append(order[first:last])
            first, before = last, int(ends[last - 1])
        return parts


def _put(rows: Tensor | None, count: int, places: NDArray[np.intp], found: Tensor) -> Tensor:
    """Write rows at their places among ``count`` of them."""
    if rows is None:
        rows = found.new_empty((count, found.shape[1]))
    rows[torch.from_numpy(places).to(found.device)] = found
    return rows
