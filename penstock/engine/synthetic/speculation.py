"""Steps of several tokens per stream, as speculative decoding makes them, without drafts or a model.

A step of a stream has the token that it has anyway, and those of a draft that are accepted: each one with the
same probability, as long as all before it were. Whether the token at a position is accepted depends on the
stream's random state and the position alone. Tokens do not depend on it at all, so a stream has the same
tokens whatever the number per step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.engine.base import ACCEPTED_PER_POSITION
from penstock.engine.batch.slots import SlotTable
from penstock.engine.sampling.rng import U64, token_indexes
from penstock.wire.arrays import I8, I32

_ACCEPTANCE = np.uint64(0xACCE97ED)
"""Makes draws of acceptance others than those of tokens."""
_RESOLUTION = 1 << 30


class SyntheticSpeculation:
    """Appends a step's tokens to the slots of streams."""

    def __init__(
        self,
        table: SlotTable,
        state: U64,
        draw: Callable[[NDArray[np.intp]], I32],
        *,
        tokens_per_step: int,
        acceptance_rate: float,
    ) -> None:
        """``state``: random state by slot; ``draw``: the next token of each of some slots."""
        self._table = table
        self._state = state
        self._draw = draw
        self._threshold = round(acceptance_rate * _RESOLUTION)
        self._drafts = self._draft_tokens = 0
        self._accepted = np.zeros(tokens_per_step - 1, np.int64)
        """Accepted tokens by their place in the draft."""

    def append(self, slots: NDArray[np.intp]) -> I8:
        """Append one token to every slot, and the accepted ones of its draft; a stream's first token has
        none. Returns int8[R], the FinishReason of each: a stream gets no token after its end."""
        table, width = self._table, len(self._accepted)
        begun = table.length[slots] > table.prompt_len[slots]
        finish = table.append_and_check_stop(slots, self._draw(slots))
        going = np.flatnonzero(begun & (finish == 0))
        room = table.end[slots[going]] - table.length[slots[going]]
        self._drafts += len(going)
        self._draft_tokens += int(np.minimum(room, width).sum())
        for place in range(width):
            going = going[self._is_accepted(slots[going])]
            if not len(going):
                break
            self._accepted[place] += len(going)
            tokens = self._draw(slots[going])
            finish[going] = table.append_and_check_stop(slots[going], tokens)
            going = going[finish[going] == 0]
        return finish

    def _is_accepted(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        """bool[R]: whether a draft has the next token of each slot."""
        if self._threshold == _RESOLUTION:
            return np.ones(len(slots), np.bool_)
        position = self._table.length[slots] - self._table.base[slots]
        accepted: NDArray[np.bool_] = (
            token_indexes(self._state[slots] ^ _ACCEPTANCE, position, _RESOLUTION) < self._threshold
        )
        return accepted

    def metrics(self) -> dict[str, float]:
        """As in :meth:`penstock.engine.base.Engine.metrics`."""
        accepted: list[int] = self._accepted.tolist()
        figures: dict[str, float] = {
            "spec_decode_drafts_total": self._drafts,
            "spec_decode_draft_tokens_total": self._draft_tokens,
            "spec_decode_accepted_tokens_total": sum(accepted),
        }
        for place, count in enumerate(accepted):
            figures[f"{ACCEPTED_PER_POSITION}{place}"] = count
        return figures
