"""Logprobs of the synthetic engine, which has no model to take them from.

The sampled token ranks first with probability 1/2, followed by its neighbours in the vocabulary with 1/4, 1/8
and so on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.engine.base import StepRows
from penstock.engine.batch.token_lists import TokenLists
from penstock.wire.arrays import I32
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import SamplingParams

_HALVINGS = np.float32(np.log(0.5))


class MadeUpLogprobs:
    """What the slots' streams have asked for, and the logprobs of their rows."""

    def __init__(self, slots: int, ordinary: I32) -> None:
        """``ordinary``: the tokens that are drawn, ascending."""
        self._ordinary = ordinary
        self._alternatives = np.full(slots, -1, np.int32)
        """Logprobs asked for, per slot; -1: none."""
        self._listed = TokenLists(slots, np.int32)
        """Tokens that have logprobs in place of the likeliest."""
        self._asking = 0
        """Slots that asked for logprobs."""

    def __bool__(self) -> bool:
        return self._asking > 0

    def set(self, slot: int, sampling: SamplingParams) -> None:
        """A stream begins."""
        if sampling.logprobs < 0:
            return
        self._alternatives[slot] = sampling.logprobs
        self._asking += 1
        listed = sampling.logprob_token_ids
        if listed and (row := self._listed.share(slot, listed)) is not None:
            self._listed.fill(row, listed)

    def clear(self, slot: int) -> None:
        """A stream has ended."""
        if self._alternatives[slot] >= 0:
            self._alternatives[slot] = -1
            self._listed.clear(slot)
            self._asking -= 1

    def clear_all(self) -> None:
        for slot in np.flatnonzero(self._alternatives >= 0).tolist():
            self.clear(slot)

    def of_rows(self, rows: StepRows, slots: NDArray[np.intp]) -> Logprobs | None:
        """Logprobs of the rows' tokens, for the streams that asked for them. ``slots``: of the rows."""
        counts = np.ones(len(rows.server), np.int32) if rows.count is None else rows.count
        owners = np.repeat(slots, counts)
        token = np.flatnonzero(self._alternatives[owners] >= 0)
        if not len(token):
            return None
        owners = owners[token]
        asked = self._alternatives[owners]
        index = np.searchsorted(self._ordinary, rows.tokens[token])
        rank = np.concatenate([[0], np.arange(int(asked.max()))]).astype(np.int32)
        ids = self._ordinary[(index[:, None] + rank) % len(self._ordinary)]
        ids[:, rank == 0] = rows.tokens[token, None]  # a script's tokens need not be ordinary ones
        values = np.broadcast_to((rank + 1) * _HALVINGS, ids.shape).astype(np.float32)
        listing = np.flatnonzero(self._listed.counts(owners))
        if len(listing):
            listed = self._listed.grid(owners[listing])
            distance = np.searchsorted(self._ordinary, listed) - index[listing, None]
            columns = slice(1, 1 + listed.shape[1])
            ids[listing, columns] = listed
            values[listing, columns] = (distance % len(self._ordinary) + 1) * _HALVINGS
        absent = np.arange(len(rank)) > asked[:, None]
        ids[absent] = -1
        values[absent] = -np.inf
        return Logprobs(token.astype(np.int32), ids, values, np.ones(len(token), np.int32)).split()
