"""What an engine offers whose weights can be replaced while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.wire.weights.desired import WeightSource


class BrokenWeights(RuntimeError):
    """A copy has failed in the middle, and what was there before could not be brought back: the engine must
    not compute anything, and is ended."""


class WeightPlan(Protocol):
    """Files that are open and have been checked."""

    def close(self) -> None:
        """Close the files."""
        ...


class WeightLoader(Protocol):
    """Replaces an engine's weights in place, between two steps."""

    def plan(self, sources: Sequence[WeightSource]) -> WeightPlan:
        """Open what turns the present weights into those that ``sources`` describe, and check the name, shape
        and type of every tensor. Changes nothing. Raises ValueError, which names the tensor."""
        ...

    def load(self, plan: WeightPlan, *, drop_cache: bool, in_step: bool, tick: Callable[[], None]) -> int:
        """Copy the tensors of a plan, and close it. Nothing is being computed.

        ``drop_cache``: forget what was computed with other weights; streams that run are computed again.
        ``in_step``: return when all ranks that split a model have copied theirs. ``tick`` is called between
        tensors. Returns the number of tensors in the files. Raises BrokenWeights; after any other exception
        the weights are as they were.
        """
        ...

    def checksum(self) -> str:
        """Hexadecimal SHA-256 of all parameters: names in order, types, shapes, bytes. Raises ValueError if
        they are not in memory."""
        ...
