"""The sampler's output: tokens and logprobs, on the device for the next step and on the host for the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.batch.logprobs import read_candidates
from penstock.engine.torch.transfer import to_host
from penstock.wire.arrays import I32
from penstock.wire.logprobs import Logprobs


@dataclass(slots=True, frozen=True)
class TopLogprobs:
    """Logprobs of L rows of a batch: W candidates each, the sampled token first."""

    row: NDArray[np.intp]
    """int64[L]: indexes of the rows."""
    wanted: I32
    """int32[L]: candidates beside the sampled token that each row asked for, at most W - 1."""
    ids: Tensor
    """int64[L, W]"""
    values: Tensor
    """float32[L, W]"""
    rank: Tensor
    """int64[L]: the sampled token's rank, from 1."""

    def to_host(self) -> TopLogprobs:
        return TopLogprobs(self.row, self.wanted, *map(to_host, (self.ids, self.values, self.rank)))

    def read_logprobs(self) -> Logprobs:
        """All tensors must be on the host."""
        columns = (each.numpy() for each in (self.ids, self.values, self.rank))
        return read_candidates(self.row, self.wanted, *columns)


@dataclass(slots=True, frozen=True)
class SamplerOutput:
    """Sampled tokens of S rows, and logprobs of those that asked for them."""

    tokens: Tensor
    """int64[S]"""
    candidates: TopLogprobs | None = None

    def to_host(self) -> SamplerOutput:
        """A copy on the host, which may be read once the device has finished."""
        return SamplerOutput(to_host(self.tokens), self.candidates and self.candidates.to_host())

    def read_tokens(self) -> tuple[I32, Logprobs | None]:
        """int32[S] and the logprobs; all tensors must be on the host."""
        logprobs = None if self.candidates is None else self.candidates.read_logprobs()
        return self.tokens.numpy().astype(np.int32), logprobs
