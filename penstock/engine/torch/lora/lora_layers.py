"""LoRA in a model's linear layers: stacked weights of the running adapters, added to each layer's output.

A layer computes y = W x + B (A x) for the tokens of an adapter; B includes the adapter's scaling. The weights
of all places are stacked in one tensor per layer, so that a step with many adapters takes as few operations
as one with a single one. Layers that read the same input share the first product.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.config.errors import ConfigError
from penstock.engine.torch.lora.lora_plan import LoraPlan
from penstock.engine.torch.memory import zeros

LayerSizes = dict[str, tuple[int, int]]
"""Output and input features by the layer's path."""
_IN_DECODER = re.compile(r"\.(?:layers|h)\.\d+\.")
_EXPERTS = ".experts."
_SHARING = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Names of layers of one module that read the same tensor."""


@dataclass(slots=True)
class AdapterWeights:
    """One adapter's layers in host memory, in the model's dtype."""

    rank: int
    """Largest rank of a layer."""
    layers: Mapping[str, tuple[Tensor, Tensor]]
    """Weights by path: A [r, in], and B with its scaling, transposed: [r, out]."""


class SharedInput:
    """M layers that read the same input, with the stacked weights of their adapters.

    ``a``: [places, max rank, M, in]; ``b``: M tensors [places, max rank, out]. Ranks below the maximum, and
    layers that an adapter leaves alone, have zeros.
    """

    def __init__(self, paths: list[str], sizes: LayerSizes, places: int, rank: int, like: Tensor) -> None:
        """``like``: a tensor of the dtype and device."""
        width = sizes[paths[0]][1]
        self.paths = paths
        self.a = zeros((places, rank, len(paths), width), like.dtype, like.device)
        self.b = [zeros((places, rank, sizes[path][0]), like.dtype, like.device) for path in paths]
        self._input: Tensor | None = None
        """The input of the products in ``_reduced``."""
        self._reduced: list[Tensor] = []

    def put(self, place: int, weights: AdapterWeights, stale: int) -> None:
        """Bring weights to a place. ``stale``: rank of those that it had."""
        rows = max(stale, weights.rank)
        for member, path in enumerate(self.paths):
            found = weights.layers.get(path)
            a, b = self.a[place, :rows, member], self.b[member][place, :rows]
            rank = 0
            if found is not None:
                rank = len(found[0])
                a[:rank].copy_(found[0], non_blocking=True)
                b[:rank].copy_(found[1], non_blocking=True)
            a[rank:].zero_()
            b[rank:].zero_()

    def add(self, member: int, plan: LoraPlan, ranks: list[int], values: Tensor, output: Tensor) -> None:
        """Add the adapters' part to the output [T, out] of a member for ``values`` [..., in], in place.
        ``ranks``: of each place."""
        if self._input is not values:
            self._reduced = [*self._reduce(plan, ranks, values.reshape(-1, values.shape[-1]))]
            self._input = values
        stacked = self.b[member]
        reduced = iter(self._reduced)
        padded = plan.padded
        if padded is not None:
            part = next(reduced)[member]
            rank = part.shape[-1]
            grown = torch.bmm(part, stacked[padded.first : padded.last, :rank]).flatten(0, 1)
            output.index_add_(0, padded.tokens, grown.index_select(0, padded.rows))
        for single, parts in zip(plan.singles, reduced, strict=True):
            weight = stacked[single.place, : parts.shape[-1]]
            if isinstance(single.tokens, slice):
                output[single.tokens].addmm_(parts[member], weight)
            else:
                output.index_add_(0, single.tokens, parts[member] @ weight)

    def _reduce(self, plan: LoraPlan, ranks: list[int], values: Tensor) -> Iterator[Tensor]:
        """A x of each part of the plan: [M, G, C, r] of the padded groups, [M, n, r] of single ones."""
        members, width = len(self.paths), values.shape[-1]
        padded = plan.padded
        if padded is not None:
            rank = max(ranks[place] for place in padded.places)
            rows = values.index_select(0, padded.source).view(padded.last - padded.first, -1, width)
            stacked = self.a[padded.first : padded.last, :rank].flatten(1, 2)
            reduced = torch.bmm(rows, stacked.transpose(1, 2))
            yield reduced.view(*rows.shape[:2], rank, members).permute(3, 0, 1, 2).contiguous()
        for single in plan.singles:
            rank = ranks[single.place]
            stacked = self.a[single.place, :rank].flatten(0, 1)
            reduced = values[single.tokens] @ stacked.T
            yield reduced.view(-1, rank, members).permute(2, 0, 1).contiguous()

    def forget_input(self) -> None:
        """The layers that read it are done."""
        self._input = None
        self._reduced = []


class LoraLayers:
    """The layers of a model that adapters may change. ``plan``: of the forward pass; None: no adapter runs,
    and layers compute what they would without this class."""

    def __init__(self, model: Any, places: int, rank: int) -> None:
        """Wrap the model's layers, for ``places`` adapters of up to ``rank``; :meth:`allocate` is next."""
        targets = {path: module for path, module in model.named_modules() if _is_target(path, module)}
        self.sizes: LayerSizes = {path: _size(module) for path, module in targets.items()}
        self.plan: LoraPlan | None = None
        self._like = next(iter(targets.values())).weight
        self._most = places, rank
        self._ranks: list[int] = []
        """Rank of the adapter at each place."""
        self._shared: list[SharedInput] = []
        self._sharing = [*_sharing(list(targets), self.sizes)]
        self._layers = [path for paths in self._sharing for path in paths]
        self._changes = np.zeros((places, len(self._layers)), np.bool_)
        """bool[places, layers]: the layers that the adapter in each place changes."""
        self._active: list[bool] = []
        """Whether the step's adapters change each layer."""
        self._latest: SharedInput | None = None
        """The one that keeps its input: layers that share one follow each other."""
        for index, paths in enumerate(self._sharing):
            for member, path in enumerate(paths):
                self._wrap(targets[path], self._layers.index(path), index, member)

    def allocate(self) -> None:
        """Allocate the stacks, with no adapter in any place. Raises ConfigError when there is no memory for
        them."""
        places, rank = self._most
        self._ranks = [0] * places
        try:
            self._shared = [
                SharedInput(paths, self.sizes, places, rank, self._like) for paths in self._sharing
            ]
        except (MemoryError, torch.OutOfMemoryError):
            raise ConfigError(
                f"--max-loras {places}, --max-lora-rank {rank}: there is no memory for the adapters' weights"
            ) from None

    def free(self) -> None:
        """Free the stacks."""
        self._shared = []

    def put(self, place: int, weights: AdapterWeights) -> None:
        """Bring an adapter to a place; steps that were launched before are not affected."""
        for shared in self._shared:
            shared.put(place, weights, self._ranks[place])
        self._ranks[place] = weights.rank
        self._changes[place] = [path in weights.layers for path in self._layers]

    @contextmanager
    def filled(self) -> Iterator[None]:
        """As if every place had an adapter of the largest rank that changes all layers, of zeros.
        No place may have an adapter."""
        places, rank = self._most
        self._ranks = [rank] * places
        self._changes[:] = True
        try:
            yield
        finally:
            self._ranks = [0] * places
            self._changes[:] = False

    def begin(self, plan: LoraPlan | None) -> None:
        """Set the plan of the next forward pass."""
        self.plan = plan
        if plan is not None:
            self._active = [bool(changes) for changes in self._changes[plan.places].sum(0).tolist()]

    def end(self) -> None:
        """The forward pass is enqueued."""
        self.plan = None
        self._forget_input()

    def _forget_input(self) -> None:
        if self._latest is not None:
            self._latest.forget_input()
            self._latest = None

    def _wrap(self, module: Any, layer: int, index: int, member: int) -> None:
        original: Callable[[Tensor], Tensor] = module.forward

        def forward(values: Tensor) -> Tensor:
            output = original(values)
            plan = self.plan
            if plan is not None and self._active[layer]:
                flat = output.view(-1, output.shape[-1])
                assert len(flat) == plan.total, "a layer that does not read all tokens"
                shared = self._shared[index]
                if shared is not self._latest:  # or the inputs of all layers would stay in memory
                    self._forget_input()
                    self._latest = shared
                shared.add(member, plan, self._ranks, values, flat)
            return output

        module.forward = forward


def _is_target(path: str, module: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    # not a subclass whose forward returns something else, such as the router of Phi 3.5 MoE
    linear = type(module).forward in (nn.Linear.forward, Conv1D.forward)
    return linear and _EXPERTS not in path and _IN_DECODER.search(path) is not None


def _size(module: Any) -> tuple[int, int]:
    """Output and input features. The weight of GPT-2's Conv1D is [in, out], that of nn.Linear [out, in]."""
    first, second = module.weight.shape
    return (first, second) if isinstance(module, nn.Linear) else (second, first)


def _sharing(paths: list[str], sizes: LayerSizes) -> Iterator[list[str]]:
    """The paths in groups that read the same input."""

    def key(path: str) -> tuple[str, int, int]:
        parent, _, name = path.rpartition(".")
        alike = [index for index, names in enumerate(_SHARING) if name in names]
        return (parent, alike[0], sizes[path][1]) if alike else (path, -1, 0)

    for _, group in groupby(sorted(paths, key=key), key):
        yield list(group)
