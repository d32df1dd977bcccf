"""Drafts: guesses of the tokens that follow a history, which the model confirms or rejects in one step."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I32


class Proposer(Protocol):
    """Proposes tokens that may follow the histories of slots. A draft costs time if it is wrong, and never
    changes the output."""

    def begin(self, slot: int) -> None:
        """A stream was given the slot; ``table.history[slot, :length]`` is its prompt (of a resumed stream
        with its output)."""

    def propose(self, slots: NDArray[np.intp], most: I32) -> I32:
        """Write at most ``most[i]`` >= 0 draft tokens behind each history, at ``table.history[slot, length :
        length + count]``. Returns int32[n], the counts.

        ``slots`` are distinct. All tokens of the histories are on the host, and length + most[i] is below
        max_model_len. Histories may have grown by any number of tokens since the last call, or by none.
        """

    def end(self, slot: int) -> None:
        """The stream leaves; ``table.length`` and ``table.base`` still describe it."""
