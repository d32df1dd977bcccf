"""Runs what the scheduler chose: tokens to the device, the model, sampled tokens back."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...wire.frames import I32, Logprobs
from ..base import StepRows
from ..blocks import BlockTables
from ..rows import joined_logprobs
from ..sampling import SamplingColumns
from ..scheduler import Batch
from .layout import lay_out, token_positions
from .model import PagedModel
from .sampler import Sampler, candidates

_NO_TOKENS = np.zeros(0, np.int32)


class Runner:
    """One forward pass per step."""

    def __init__(
        self,
        model: PagedModel,
        blocks: BlockTables,
        sampling: SamplingColumns,
        device: torch.device,
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._sampling = sampling
        self._sampler = Sampler(sampling)
        self._device = device

    @torch.inference_mode()
    def run(self, batch: Batch) -> tuple[I32, Logprobs | None, StepRows | None]:
        """The forward pass: the sampled tokens, int32[len(batch.samples)], their logprobs, and rows with
        those of prompts."""
        positions = token_positions(batch)
        owners = np.repeat(batch.slots, batch.count)
        tokens = self._sampling.table.history[owners, positions]
        slots = batch.slots[batch.samples]
        kept = np.cumsum(batch.count)[batch.samples] - 1
        prompts = self._sampling.prompts
        scored = prompts.due(owners, positions) if prompts.asking else _NO_TOKENS
        self._sampling.prepare(slots)
        hidden = self._model.hidden(
            self._to_device(tokens),
            self._to_device(positions),
            lay_out(batch, self._blocks, self._model.attention.geometry, self._device),
            self._to_device(np.concatenate((kept, scored))),
        )
        rows = None
        if len(scored):
            rows = self._score(hidden[len(kept) :], owners[scored], positions[scored] + 1)
        return *self._sample(hidden[: len(kept)], slots), rows

    def _sample(self, hidden: torch.Tensor, slots: NDArray[np.intp]) -> tuple[I32, Logprobs | None]:
        """A few rows at a time, as logits are large; no row's token depends on other rows."""
        tokens = np.zeros(len(slots), np.int32)
        parts = []
        for first in range(0, len(slots), self._model.head.rows):
            rows = slice(first, first + self._model.head.rows)
            tokens[rows], logprobs = self._sampler.sample(self._model.head(hidden[rows]), slots[rows])
            if logprobs is not None:
                logprobs.token += np.int32(first)
                parts.append(logprobs)
        return tokens, joined_logprobs(parts)

    def _score(self, hidden: torch.Tensor, slots: NDArray[np.intp], places: NDArray[np.int64]) -> StepRows:
        """Logprobs of the prompt tokens at ``places``, a few rows at a time like sampled tokens."""
        columns = self._sampling.prompts
        chosen, wanted = self._sampling.table.history[slots, places], columns.alternatives[slots]
        parts = []
        for first in range(0, len(slots), self._model.head.rows):
            rows = slice(first, first + self._model.head.rows)
            raw = torch.log_softmax(self._model.head(hidden[rows]), -1)
            parts.append(Logprobs(_NO_TOKENS, *candidates(raw, chosen[rows], wanted[rows])))
        whole = joined_logprobs(parts)
        assert whole is not None
        return columns.rows(slots, places, whole.ids, whole.values, whole.rank)

    def _to_device(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)
