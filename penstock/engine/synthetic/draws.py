"""Draws the tokens of a synthetic engine: a function of a stream's random state and the position, but for the
ends of reasoning that has used up its budget."""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from penstock.engine.batch.slots import SlotTable
from penstock.engine.lora.adapter_table import LoadedAdapter
from penstock.engine.sampling.rng import stream_state, token_indexes
from penstock.engine.sampling.thinking_budget import FREE, ThinkingBudgets
from penstock.engine.synthetic.adapters import seed_of
from penstock.engine.synthetic.weights import SyntheticWeights
from penstock.wire.arrays import I32
from penstock.wire.messages import Submit
from penstock.wire.submits import prompt_without_output


class TokenDraws:
    """The next tokens of slots."""

    def __init__(self, table: SlotTable, ordinary: I32, weights: SyntheticWeights) -> None:
        """``ordinary``: the tokens to draw from."""
        self._table = table
        self._ordinary = ordinary
        self._weights = weights
        self.state = np.zeros(table.size, np.uint64)
        """Random state of each slot's stream."""
        self._thinking = ThinkingBudgets(table)
        self._limited = np.zeros(table.size, np.bool_)
        """Slots whose reasoning is limited."""

    def begin(self, slot: int, request: Submit, adapter: LoadedAdapter | None) -> None:
        """A stream gets a slot."""
        self.clear(slot)
        self.state[slot] = stream_state(_seed(request) ^ seed_of(adapter))
        if request.sampling.thinking is not None:
            self._thinking.set(slot, request.sampling.thinking)
            self._limited[slot] = True

    def see(self, slot: int, features: int) -> None:
        """The stream's tokens depend on these features, too."""
        self.state[slot] ^= np.uint64(stream_state(features))

    def clear(self, slot: int) -> None:
        """The stream leaves its slot."""
        if self._limited[slot]:
            self._thinking.clear(slot)
            self._limited[slot] = False

    def draw(self, slots: NDArray[np.intp]) -> I32:
        """The next token of each slot."""
        length = self._table.length[slots]
        position = length - self._table.base[slots]
        size = len(self._ordinary)
        tokens: I32 = self._ordinary[
            self._weights.mark(token_indexes(self.state[slots], position, size), size)
        ]
        rows = np.flatnonzero(self._limited[slots])
        if len(rows):
            forced = self._thinking.next_tokens(slots[rows], length[rows])
            tokens[rows] = np.where(forced == FREE, tokens[rows], forced)
        return tokens


def _seed(request: Submit) -> int:
    """The seed of a stream's tokens; at temperature 0 the prompt, without resumed output, stands for it."""
    if request.sampling.temperature:
        return request.sampling.seed
    return zlib.crc32(prompt_without_output(request))
