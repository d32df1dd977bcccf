"""Repetition, presence and frequency penalties, from token counts that are updated as a stream grows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.sampling.metadata import SamplingMetadata

Slots = NDArray[np.intp]

MIN_WIDTH = 64


class TokenCounts:
    """The distinct tokens of penalised slots and their counts, on the model's device.

    ``tokens`` and ``counts`` are int32[slots, width]: the n-th distinct token of a slot, and its occurrences
    in the output (0: only in the prompt; -1: there is no n-th token). A step adds one token to each row, so
    its cost depends on the number of distinct tokens, not on the vocabulary. Memory is allocated with the
    first penalised row, and doubles when a row needs it.
    """

    def __init__(self, metadata: SamplingMetadata) -> None:
        self._metadata = metadata
        self._known = np.zeros(metadata.table.size, np.int32)
        """Upper bound of each slot's distinct tokens."""
        self._tokens: Tensor | None = None
        self._counts: Tensor | None = None

    def counts_of(self, slots: Slots, device: torch.device) -> tuple[Tensor, Tensor]:
        """int64[n, W] tokens and int32[n, W] counts of the slots' current histories."""
        table, counted = self._metadata.table, self._metadata.counted
        fresh = table.length[slots] - counted[slots] != 1
        fresh |= counted[slots] < 0
        grown = self._known[slots] + 1
        listed = [self._distinct(slot) for slot in slots[fresh].tolist()]
        grown[fresh] = [len(tokens) for tokens, _ in listed]
        self._known[slots] = grown
        most = int(grown.max())
        tokens, counts = self._room(most, device)
        for slot, (known, count) in zip(slots[fresh].tolist(), listed, strict=True):
            counts[slot] = -1
            tokens[slot, : len(known)] = torch.from_numpy(known).to(device)
            counts[slot, : len(known)] = torch.from_numpy(count).to(device)
        if not fresh.all():
            self._add(slots[~fresh], most, tokens, counts)
        counted[slots] = table.length[slots]
        at = torch.from_numpy(slots).to(device)
        return tokens[at, :most].long(), counts[at, :most]

    def _distinct(self, slot: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Distinct tokens of a slot's history, and the occurrences of each in its output."""
        table = self._metadata.table
        base, length = int(table.base[slot]), int(table.length[slot])
        known, index = np.unique(table.history[slot, :length], return_inverse=True)
        return known, np.bincount(index[base:], minlength=len(known)).astype(np.int32)

    def _add(self, slots: Slots, width: int, tokens: Tensor, counts: Tensor) -> None:
        """Count the last token of each slot: in its own column, or in the first free one if it is new."""
        table = self._metadata.table
        last = torch.from_numpy(table.history[slots, table.length[slots] - 1]).to(tokens.device)
        at = torch.from_numpy(slots).to(tokens.device)
        count = counts[at, :width]
        same = (tokens[at, :width] == last[:, None]) & (count >= 0)
        column = torch.where(same.any(-1), same.int().argmax(-1), (count >= 0).sum(-1))
        tokens[at, column] = last
        counts[at, column] = counts[at, column].clamp(min=0) + 1

    def _room(self, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        tokens, counts = self._tokens, self._counts
        if tokens is None or counts is None or tokens.shape[1] < width:
            slots, wide = self._metadata.table.size, MIN_WIDTH
            while wide < width:
                wide *= 2
            wider = torch.zeros((slots, wide), dtype=torch.int32, device=device)
            empty = torch.full((slots, wide), -1, dtype=torch.int32, device=device)
            if tokens is not None and counts is not None:
                wider[:, : tokens.shape[1]] = tokens
                empty[:, : counts.shape[1]] = counts
            tokens, counts = self._tokens, self._counts = wider, empty
        return tokens, counts


def penalize(
    logits: Tensor, tokens: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Apply the penalties to float32[n, V] logits in place, as vLLM and OpenAI define them.

    ``tokens`` and ``counts`` are of :meth:`TokenCounts.counts_of`, the others float32[n, 1]. The repetition
    penalty divides positive logits and multiplies negative ones, for tokens of prompt and output; presence
    and frequency penalties are subtracted, for tokens of the output.
    """
    before = logits.gather(-1, tokens)
    after = torch.where(before > 0, before / repetition, before * repetition)
    after -= frequency * counts.clamp(min=0) + presence * (counts > 0)
    change = torch.where((counts >= 0) & before.isfinite(), after - before, 0.0)
    logits.scatter_add_(-1, tokens, change)
