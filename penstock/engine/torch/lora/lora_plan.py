"""Which tokens of a step run through which adapter, computed once per step and used by every layer.

Tokens of one adapter are a group. Groups of similar size are computed together, padded to the largest of them
(decodes); a group that is much larger than the others (a chunk of a prompt) is computed on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.schedule.adapter_room import NO_PLACE
from penstock.engine.torch.transfer import to_device, to_device_together
from penstock.wire.arrays import I32

GROUP_ROWS = 16
"""Rows of padding that cost as much as computing one more group on its own: two small products of matrices
take 8 us on a CPU, 16 rows of rank 64 in a hidden size of 512 as well."""

Ints = NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class PaddedGroups:
    """Groups of the adapters in the places ``first`` to ``last`` - 1, G of them, padded to C tokens each."""

    first: int
    last: int
    places: tuple[int, ...]
    """The places in between that the step uses."""
    source: Tensor
    """int64[G * C]: the token of the batch in each padded row; padding repeats some token."""
    tokens: Tensor
    """int64[n]: the tokens of the batch that are no padding."""
    rows: Tensor
    """int64[n]: their padded rows."""


@dataclass(slots=True, frozen=True)
class SingleGroup:
    """The tokens of one adapter."""

    place: int
    tokens: slice | Tensor
    """Indexes of the batch's tokens: a range, or int64[n]."""


@dataclass(slots=True, frozen=True)
class LoraPlan:
    """The adapters of a step."""

    total: int
    """T: tokens of the batch, with and without an adapter."""
    places: I32
    """int32[P]: places of the adapters that run."""
    padded: PaddedGroups | None
    singles: tuple[SingleGroup, ...]


def plan_lora(places: I32, device: torch.device) -> LoraPlan | None:
    """The plan of a batch. ``places`` int32[T]: each token's place, or NO_PLACE. None: no token has one."""
    tokens = np.flatnonzero(places != NO_PLACE)
    if not len(tokens):
        return None
    tokens = tokens[np.argsort(places[tokens], kind="stable")]
    of_group, starts, counts = np.unique(places[tokens], return_index=True, return_counts=True)
    width = _best_width(int(of_group[-1] - of_group[0]) + 1, counts)
    padded = None
    if width:
        small = counts <= width
        used = tuple(of_group[small].tolist())
        first, last = used[0], used[-1] + 1
        members = tokens[np.repeat(small, counts)]
        within = np.arange(len(tokens)) - np.repeat(starts, counts)
        rows = (places[members] - first) * width + within[np.repeat(small, counts)]
        source = np.full((last - first) * width, members[0])
        source[rows] = members
        padded = PaddedGroups(
            first, last, used, *to_device_together((source, members, rows.astype(np.int64)), device)
        )
    singles = tuple(
        SingleGroup(
            int(of_group[group]), _range(tokens[starts[group] : starts[group] + counts[group]], device)
        )
        for group in np.flatnonzero(counts > width).tolist()
    )
    return LoraPlan(len(places), of_group.astype(np.int32), padded, singles)


def _best_width(span: int, counts: Ints) -> int:
    """The size of the largest group that is to be padded; 0: each is computed on its own.

    ``counts`` int64[P]: the groups' sizes; ``span``: places from the first group's to the last one's.
    """
    ascending = np.sort(counts)
    padding = span * ascending - np.cumsum(ascending)
    alone = np.arange(len(counts) - 1, -1, -1)
    cost = padding + GROUP_ROWS * (alone + 1)
    best = int(cost.argmin())
    return int(ascending[best]) if cost[best] < GROUP_ROWS * len(counts) else 0


def _range(tokens: Ints, device: torch.device) -> slice | Tensor:
    if tokens[-1] - tokens[0] + 1 == len(tokens):
        return slice(int(tokens[0]), int(tokens[-1]) + 1)
    return to_device(tokens, device)
