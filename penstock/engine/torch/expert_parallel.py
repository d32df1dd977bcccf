"""Expert parallelism: each rank holds its share of a model's experts, and tokens are exchanged between ranks.

In every layer with experts, each rank gathers the hidden states and the routes of all ranks' tokens, computes
its own experts' contributions, and the ranks sum these (all-gather, all-reduce).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad

from penstock.config.errors import ConfigError
from penstock.engine.torch.process_group import ProcessGroup
from penstock.engine.torch.transfer import to_device

IMPLEMENTATION = "penstock_split"
"""Name under which :class:`ExpertParallel` is registered as transformers' experts implementation."""


class ExpertParallel:
    """A rank's share of a model's experts, and the experts implementation that all its layers call.

    All ranks must make the same number of forward passes, and call :meth:`begin_forward` before each.
    """

    def __init__(self, group: ProcessGroup) -> None:
        from transformers.integrations.moe import ExpertsInterface

        self._group = group
        self._own = slice(0, 0)
        """This rank's tokens among all ranks' tokens."""
        self._most = 0
        """Maximum number of tokens of a rank."""
        self._real: Tensor | None = None
        """int64[T]: which of ranks x most are not padding; None: all."""
        self._compute = ExpertsInterface()["grouped_mm"]
        ExpertsInterface.register(IMPLEMENTATION, self._forward)

    @property
    def share(self) -> tuple[int, int]:
        """This rank's part of the experts, and the number of parts."""
        return self._group.rank, self._group.size

    # -- loading

    def sharded_class(self, model_class: Any) -> Any:
        """A model class with this rank's experts only, so that the others are not read from the checkpoint.

        transformers reads only the local part of a parameter that is a sharded DTensor.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = DeviceMesh.from_group(torch.distributed.group.WORLD, "cpu")  # type: ignore[arg-type]

        def construct(model: Any, config: Any) -> None:
            model_class.__init__(model, config)
            for experts, name, whole in self._parameters(model):
                split = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
                setattr(experts, name, Parameter(split, requires_grad=False))

        # transformers derives what a class supports from its name and its module's source
        return type(model_class.__name__, (model_class,), {"__init__": construct} | _identity(model_class))

    def keep_local_experts(self, model: Any) -> None:
        """Reduce a model to this rank's experts, as plain tensors. The model is of :meth:`sharded_class`, or
        has all experts. Raises ConfigError when they cannot be split evenly."""
        for experts, name, parameter in self._parameters(model):
            if isinstance(parameter, torch.distributed.tensor.DTensor):
                own = parameter.to_local()
            else:
                own = parameter.detach().chunk(self._group.size)[self._group.rank].clone()
            setattr(experts, name, Parameter(own, requires_grad=False))
            experts.num_experts = len(own)
            experts._is_expert_parallel = True  # transformers' kernels then skip experts beyond the last

    def _parameters(self, model: Any) -> list[tuple[Any, str, Tensor]]:
        """(module, name, tensor) of all expert tensors [experts, ...]."""
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
        """Exchange the number of tokens of each rank; ``tokens`` is this rank's, at least 1."""
        counts = self._group.all_gather(torch.tensor(tokens))
        self._most = int(counts.max())
        end = int(counts[: self._group.rank + 1].sum())
        self._own = slice(end - tokens, end)
        within = np.arange(self._most) < counts.numpy()[:, None]
        self._real = None if within.all() else to_device(np.flatnonzero(within), device)

    def _forward(self, experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, H] of this rank's tokens, with the index int64[T, K] and the weights [T, K] of each
        token's K experts among all → [T, H]"""
        everyone = self._gather_tokens(hidden)
        # one exchange for both: float32 represents any expert's index exactly
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
        """[T, W] of this rank's tokens → that of all ranks' tokens, rank by rank."""
        every = self._group.all_gather(pad(own, (0, 0, 0, self._most - len(own)))).flatten(0, 1)
        return every if self._real is None else every.index_select(0, self._real)


def _identity(model_class: Any) -> dict[str, str]:
    return {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
