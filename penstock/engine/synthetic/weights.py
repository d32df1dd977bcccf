"""Weights of the synthetic engine: one byte, which all its tokens tell.

A file has a tensor ``version``, uint8[1]; others in a file of a whole model are ignored. With a version V
other than 0, every token that is drawn has an index among the ordinary tokens of the vocabulary that is V
modulo 256. So whoever receives tokens knows by which weights each was made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from penstock.engine.weights.tensor_files import TensorFiles, shown
from penstock.engine.weights.weight_loader import WeightPlan
from penstock.wire.arrays import I32
from penstock.wire.weights.desired import WeightSource

VERSION = "version"
VERSIONS = 256


class SyntheticPlan:
    """A version that has been read."""

    def __init__(self, version: int, count: int) -> None:
        """``count``: tensors in the files."""
        self.version, self.count = version, count

    def close(self) -> None:
        """The files are closed."""


class SyntheticWeights:
    """Loads versions, and marks what is drawn by the present one."""

    def __init__(self) -> None:
        self._version = 0

    def plan(self, sources: Sequence[WeightSource]) -> SyntheticPlan:
        files = TensorFiles(sources)
        unknown = sorted(files.named - {VERSION})
        if unknown:
            raise ValueError(f"the model has no parameter for {shown(unknown)}")
        tensor = files.tensors.get(VERSION)
        if tensor is None and sources:
            raise ValueError(f"no weights for {VERSION}")
        if tensor is None:
            return SyntheticPlan(0, 0)
        if tensor.shape != (1,) or tensor.dtype != "U8":
            raise ValueError(f"{VERSION} is {tensor.dtype} {list(tensor.shape)}, not U8 [1]")
        return SyntheticPlan(tensor.data[0], files.count)

    def load(self, plan: WeightPlan, *, drop_cache: bool, in_step: bool, tick: Callable[[], None]) -> int:
        assert isinstance(plan, SyntheticPlan)  # this loader has made it
        self._version = plan.version
        return plan.count

    def checksum(self) -> str:
        covered = f"{VERSION} uint8 [1]\n".encode() + bytes([self._version])
        return hashlib.sha256(covered).hexdigest()

    def mark(self, indexes: I32, size: int) -> I32:
        """Indexes among ``size`` tokens that tell the version, near those that are drawn."""
        if not self._version:
            return indexes
        period = min(VERSIONS, size)
        marked: I32 = indexes - indexes % period + self._version % period
        marked[marked >= size] -= period
        return marked
