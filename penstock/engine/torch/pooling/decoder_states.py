"""The last hidden states of texts by a decoder, with the attention of the engine of text."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.engine.schedule.batch import EMPTY, Batch
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.torch.attention import PagedAttention
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.pooling.packed_inputs import PackedInputs
from penstock.engine.torch.transfer import to_device
from penstock.wire.arrays import I32


class DecoderStates:
    """Computes whole texts, of which nothing is kept: layers take turns with pages for one of them."""

    def __init__(
        self, model: PagedModel, *, texts: int, tokens: int, block_size: int, device: torch.device
    ) -> None:
        """At most ``texts`` with ``tokens`` together are computed at once. Raises ConfigError when there is
        no memory for their pages."""
        self._model = model
        self._device = device
        blocks = tokens // block_size + texts
        self._blocks = BlockTables(texts, blocks, block_size, tokens)
        self._pages: PagedAttention | None = None
        self._allocate()

    def _allocate(self) -> PagedAttention:
        if self._pages is None:
            self._pages = self._model.make_passing_cache(self._blocks.blocks + 1, self._blocks.block_size)
        return self._pages

    def free(self) -> None:
        """Free the pages, until the next texts are computed."""
        self._pages = None

    @torch.inference_mode()
    def compute(self, ids: I32, inputs: PackedInputs, seconds: I32) -> Tensor:
        """[T, H]: the states of all tokens. ids: int32[T]; ``seconds`` make no difference."""
        pages, blocks, lengths = self._allocate(), self._blocks, inputs.lengths
        slots = np.arange(len(lengths), dtype=np.intp)
        blocks.allocate(slots, -(-lengths // blocks.block_size))
        try:
            batch = Batch(
                slots=slots,
                start=np.zeros_like(lengths),
                count=lengths,
                singles=0,
                decodes=0,
                samples=EMPTY.samples,
                generations=EMPTY.generations,
            )
            return self._model.states(batch, to_device(ids.astype(np.int64), self._device), blocks, pages)
        finally:
            for slot in slots.tolist():
                blocks.free(blocks.take_blocks(slot))
