"""Experts split over the ranks: what of a model each rank holds, and how tokens get to the experts of others.

In every layer with experts, each rank gathers the hidden states of all ranks' tokens and where these are
routed, computes what its own experts add to them, and the ranks sum that up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad

from penstock.config.errors import ConfigError
from penstock.engine.torch.process_group import ProcessGroup

IMPLEMENTATION = "penstock_split"
"""Name of the experts' implementation for transformers, see :class:`ExpertParallel`."""


class ExpertParallel:
    """A rank's share of a model's experts, and the implementation of experts that all its layers call.

    Ranks must make the same number of forward passes, and call :meth:`begin_forward` before each.
    """

    def __init__(self, group: ProcessGroup) -> None:
        from transformers.integrations.moe import ExpertsInterface

        self._group = group
        self._own = slice(0, 0)
        """This rank's tokens among those of all."""
        self._most = 0
        """Tokens of the rank that has most."""
        self._real: Tensor | None = None
        """int64[T]: which of ranks x most are tokens; None: all."""
        self._compute = ExpertsInterface()["grouped_mm"]
        ExpertsInterface.register(IMPLEMENTATION, self._forward)

    # -- loading

    def sharded_class(self, model_class: Any) -> Any:
        """A model class whose experts are this rank's alone, so that a checkpoint's others are not read.

        transformers reads of a parameter that is a sharded DTensor its local part only.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu")  # type: ignore[arg-type]

        def construct(model: Any, config: Any) -> None:
            model_class.__init__(model, config)
            for experts, name, whole in self._parameters(model):
                split = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(experts, name, Parameter(split, requires_grad=False))

        # transformers finds out what a class can do by its name and by the source of its module
        return type(model_class.__name__, (model_class,), {"__init__": construct} | _identity(model_class))

    def keep_local_experts(self, model: Any) -> None:
        """Leave this rank's experts in a model, as plain tensors: a model of :meth:`sharded_class`, or one
        that has them all. Raises ConfigError when they cannot be split evenly."""
        for experts, name, parameter in self._parameters(model):
            if isinstance(parameter, torch.distributed.tensor.DTensor):
                own = parameter.to_local()
            else:
                own = parameter.detach().chunk(self._group.size)[self._group.rank].clone()
            setattr(experts, name, Parameter(own, requires_grad=False))
            experts.num_experts = len(own)
            experts._is_expert_parallel = True  # transformers' kernels then pass over experts beyond the last

    def _parameters(self, model: Any) -> list[tuple[Any, str, Tensor]]:
        """(module, name, tensor) of all tensors [experts, ...]."""
        found = [
            (module, name, parameter)
            for path, module in model.named_modules()
            if path.endswith(".experts")
            for name, parameter in module.named_parameters(recurse=False)
        ]
        for _, _, parameter in found:
            if len(parameter) % self._group.size:
                raise ConfigError(
                    f"--data-parallel-size {self._group.size}: the model's {len(parameter)} experts cannot "
                    "be split evenly (--enable-expert-parallel)"
                )
        return found

    # -- a forward pass

    def begin_forward(self, tokens: int, device: torch.device) -> None:
        """Tell the other ranks how many tokens this one brings, at least 1, and hear what they bring."""
        counts = self._group.all_gather(torch.tensor(tokens))
        self._most = int(counts.max())
        end = int(counts[: self._group.rank + 1].sum())
        self._own = slice(end - tokens, end)
        within = torch.arange(self._most) < counts[:, None]
        self._real = None if bool(within.all()) else within.flatten().nonzero()[:, 0].to(device)

    def _forward(self, experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, H] of this rank's tokens, each with K of all experts, int64[T, K], and their weights
        [T, K] → [T, H]"""
        everyone = self._gather_tokens(hidden)
        # one exchange for both: float32 holds the number of any expert
        routes = self._gather_tokens(torch.cat((weights.float(), index.float()), -1))
        shares, chosen = routes.chunk(2, -1)
        local = chosen.long() - self._group.rank * experts.num_experts
        foreign = (local < 0) | (local >= experts.num_experts)
        part: Tensor = self._compute(
            experts,
            everyone,
            local.masked_fill(foreign, experts.num_experts),
            shares.masked_fill(foreign, 0).to(weights.dtype),
        )
        self._group.all_reduce(part)
        return part[self._own]

    def _gather_tokens(self, own: Tensor) -> Tensor:
        """[T, W] of this rank's tokens → those of all ranks' tokens, rank by rank."""
        every = self._group.all_gather(pad(own, (0, 0, 0, self._most - len(own)))).flatten(0, 1)
        return every if self._real is None else every.index_select(0, self._real)


def _identity(model_class: Any) -> dict[str, str]:
    return {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
