"""The interface of methods that draft tokens."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.wire.arrays import I32


class Proposer(Protocol):
    """Proposes tokens that may follow the histories of slots."""

    def begin(self, slot: int, scope: int = 0) -> None:
        """A stream was given the slot. The slot's history is its prompt, of a resumed stream with output.

        ``scope``, int64: streams with different ones share nothing.
        """
        ...

    def restart(self, slot: int) -> None:
        """The stream was given KV blocks, at its beginning or after a preemption."""
        ...

    def propose(self, slots: NDArray[np.intp], most: I32) -> I32:
        """Write at most ``most`` int32[n] tokens behind each history, at ``table.history[slot, length]``.

        All tokens of the histories are on the host, and ``length + most`` is below ``max_model_len``. Returns
        int32[n]: the number of tokens.
        """
        ...

    def reset(self) -> None:
        """Forget the outputs of earlier streams."""
        ...

    def end(self, slot: int) -> None:
        """The stream leaves the slot, whose history is still there."""
        ...
