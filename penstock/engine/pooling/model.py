"""The interface of a model that makes vectors, scores or labels: what a step gives it, what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.wire.arrays import F32, I32
from penstock.wire.pooling import PoolingInfo, PoolingParams


class PoolingGroup(NamedTuple):
    """Consecutive inputs of a batch for which the same was asked: those of one stream."""

    params: PoolingParams
    """``lengths`` and ``seconds`` are those of the whole stream: the batch has its own."""
    inputs: int


class PoolingBatch(NamedTuple):
    """Inputs of one step, of any streams."""

    ids: I32
    """int32[T]: token ids, input after input."""
    lengths: I32
    """int32[B]: tokens of each input, at least one."""
    seconds: I32
    """int32[B]: index of the first token of an input's second text; 0: it has none."""
    groups: Sequence[PoolingGroup]
    """In the order of the inputs, B inputs together."""


class PoolingModel(Protocol):
    """Computes in the engine's thread."""

    info: PoolingInfo
    device: str
    """Where it computes, such as ``cpu``."""
    dtype: str
    """Of its numbers, such as ``float32``; empty: it has none."""

    def compute(self, batch: PoolingBatch) -> Sequence[F32]:
        """One matrix per group, float32[N, W]: N is the number of its inputs, or of their tokens for a task
        of :data:`~penstock.wire.pooling.PER_TOKEN`. Rows are in the order of the inputs. An exception ends
        the streams of the batch that cause it: the engine tries each by itself."""
        ...
