"""Drafts by a smaller model that shares the block tables, and has a cache of keys and values of its own."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from penstock.engine.sampling.metadata import SamplingFeature, SamplingMetadata
from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.torch.attention_metadata import token_positions
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.out_of_memory import is_out_of_memory
from penstock.engine.torch.sampling.sampler import Sampler
from penstock.engine.torch.transfer import HostCopy, to_device_together
from penstock.wire.arrays import I32

Slots = NDArray[np.intp]

PAUSE = 64
"""Steps without drafts after one for which the device had no memory."""
WITHOUT = SamplingFeature.GRAMMAR | SamplingFeature.LOGPROBS
"""What drafts are sampled without: a grammar has masks for tokens that are verified."""


class DraftModel:
    """Implements :class:`penstock.engine.speculation.proposer.Proposer`.

    Draft tokens are sampled with the parameters and the random numbers of the tokens that they predict, so a
    good draft model is accepted at any temperature. The model reads what it lacks of a history when it is
    asked for a draft, at most ``max_tokens`` per step; until then the slot has none.
    """

    def __init__(
        self,
        model: PagedModel,
        blocks: BlockTables,
        sampling: SamplingMetadata,
        device: torch.device,
        max_tokens: int,
    ) -> None:
        """``max_tokens``: tokens per forward pass."""
        self._model = model
        self._blocks = blocks
        self._sampling = sampling
        self._table = sampling.table
        self._device = device
        self.sampler: Sampler
        """The model's sampler: it counts the tokens of histories. Set before the first draft."""
        self._max_tokens = max_tokens
        self._computed = np.zeros(self._table.size, np.int32)
        """Tokens of each history, and of the draft behind it, that are in this model's cache."""
        self._paused = 0
        """Steps without drafts that are left."""

    def begin(self, slot: int, scope: int = 0) -> None:
        """Nothing is known of the stream before it has blocks."""

    def restart(self, slot: int) -> None:
        block_size = self._blocks.block_size
        row = self._blocks.table[slot, : int(self._blocks.block_counts[slot])]
        missing = np.flatnonzero(~self._blocks.drafted[row])
        known = int(missing[0]) if len(missing) else len(row)
        self._computed[slot] = min(known * block_size, int(self._table.length[slot]) - 1)

    def reset(self) -> None:
        """What is in cached blocks goes with them."""

    def end(self, slot: int) -> None:
        """The blocks are freed with the model's."""

    def propose(self, slots: Slots, most: I32) -> I32:
        if self._paused:
            self._paused -= 1
            return np.zeros(len(slots), np.int32)
        try:
            return self._propose(slots, most)
        except Exception as error:
            if is_out_of_memory(error):
                self._paused = PAUSE
            raise

    @torch.inference_mode()
    def _propose(self, slots: Slots, most: I32) -> I32:
        most = np.minimum(most, np.maximum(self._model.max_positions - self._table.length[slots], 0))
        counts = np.zeros(len(slots), np.int32)
        asked = np.flatnonzero(most)
        if not len(asked):
            return counts
        ready = asked[self._read_histories(slots[asked])]
        for offset in range(1, int(most[ready].max(initial=0))):
            going = ready[most[ready] > offset]
            start = self._table.length[slots[going]] + np.int32(offset - 1)
            self._run(slots[going], start, np.ones(len(going), np.int32), start + 1)
        counts[ready] = most[ready]
        return counts

    def _read_histories(self, slots: Slots) -> NDArray[np.bool_]:
        """Compute what the cache lacks of the histories, and the first token of each draft. Returns bool[n]:
        the slots that have one; of the others a part of the history was computed."""
        length = self._table.length[slots]
        start = np.minimum(self._computed[slots], length - 1)
        count = length - start
        count = np.clip(self._max_tokens - (np.cumsum(count, dtype=np.int32) - count), 0, count)
        some = count > 0
        self._run(slots[some], start[some], count[some], length[some])
        complete: NDArray[np.bool_] = start + count == length
        return complete

    def _run(self, slots: Slots, start: I32, count: I32, length: I32) -> None:
        """A forward pass over ``count`` tokens of each slot from ``start`` on. Writes a token behind those
        that reach ``length``."""
        order = np.lexsort((start, count > 1))
        slots, start, count, length = slots[order], start[order], count[order], length[order]
        samples = np.flatnonzero(start + count == length)
        singles = int(np.count_nonzero(count == 1))
        batch = Batch(
            slots=slots,
            start=start,
            count=count,
            singles=singles,
            decodes=singles,
            samples=samples,
            generations=self._table.generation[slots[samples]],
        )
        positions, owners = token_positions(batch), np.repeat(slots, count)
        tokens = np.minimum(self._table.history[owners, positions], self._model.vocab_size - 1)
        rows = batch.sampled_rows()
        sent, read = to_device_together((tokens.astype(np.int64), rows.token), self._device)
        hidden = self._model.run(batch, sent, self._blocks, read)
        self._computed[slots] = start + count
        whole = (positions + 1) % self._blocks.block_size == 0
        whole &= positions < self._table.length[owners]
        at = positions[whole] // self._blocks.block_size
        self._blocks.drafted[self._blocks.table[owners[whole], at]] = True
        self._table.history[rows.slots, rows.length] = self._sample(hidden, rows.slots, rows.length)

    def _sample(self, hidden: Tensor, slots: Slots, length: I32) -> I32:
        tokens = [np.zeros(0, np.int32)]
        for first in range(0, len(slots), self._model.head.rows):
            rows = slice(first, first + self._model.head.rows)
            logits = self._model.head(hidden[rows])
            logits = pad(logits, (0, self._sampling.vocab_size - logits.shape[-1]), value=-torch.inf)
            output = self.sampler.sample(logits, slots[rows], length[rows], WITHOUT)
            drafted = HostCopy(output.tokens.clamp(min=0))
            drafted.wait()
            tokens.append(drafted.read().astype(np.int32))
        return np.concatenate(tokens)
