"""What follows the hidden states: vectors by the modules of sentence-transformers, or numbers of labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence

from penstock.config.errors import ConfigError, one_line
from penstock.engine.pooling.modules import (
    DenseStep,
    LayerNormStep,
    Modules,
    NormalizeStep,
    PoolStep,
    Step,
)
from penstock.engine.torch.pooling.packed_inputs import PackedInputs
from penstock.engine.torch.pooling.token_pooling import pool
from penstock.wire.arrays import I32
from penstock.wire.pooling import PoolingParams


class Head(Protocol):
    """Makes float32 rows of the states [T, H] of packed inputs."""

    def of_inputs(self, states: Tensor, inputs: PackedInputs, skipped: I32) -> Tensor:
        """[B, W]. Raises ValueError if the model makes none."""

    def of_tokens(self, states: Tensor) -> Tensor:
        """[T, W]."""

    def finish(self, rows: Tensor, params: PoolingParams) -> Tensor:
        """Rows as a request asks for them."""


class VectorHead:
    """Pools tokens, and changes vectors by the modules that follow."""

    def __init__(self, modules: Modules, device: torch.device) -> None:
        """Raises ConfigError for weights that cannot be read."""
        steps = list(modules.steps)
        if steps and isinstance(steps[-1], NormalizeStep):
            steps.pop()  # whether vectors are normalized is the request's to say
        pooling = [at for at, step in enumerate(steps) if isinstance(step, PoolStep)]
        first = pooling[0] if pooling else len(steps)
        self._pool = steps[first] if pooling else None
        self._before = [_module(step, device) for step in steps[:first]]
        self._after = [_module(step, device) for step in steps[first + 1 :]]

    def of_inputs(self, states: Tensor, inputs: PackedInputs, skipped: I32) -> Tensor:
        if not isinstance(self._pool, PoolStep):
            raise ValueError("the model makes vectors of tokens only")
        if self._before:
            states = self.of_tokens(states)
        rows = pool(states, inputs, skipped, self._pool.modes)
        for module in self._after:
            rows = module(rows)
        return rows

    def of_tokens(self, states: Tensor) -> Tensor:
        states = states.float()
        for module in self._before:
            states = module(states)
        return states

    def finish(self, rows: Tensor, params: PoolingParams) -> Tensor:
        rows = rows[:, : params.dimensions or None]
        return normalize(rows, dim=-1) if params.normalize else rows


class LabelHead:
    """The classifier of a transformers model whose states are computed apart."""

    def __init__(self, model: Any, activation: str | None) -> None:
        """``model``: for sequences or tokens; its part without head is replaced by what is computed.
        ``activation``: see :attr:`~penstock.engine.pooling.modules.Modules.label_activation`."""
        self._model = model
        self._computed = _Computed(model.base_model)
        setattr(model, model.base_model_prefix, self._computed)
        self._activation = label_activation(activation, int(model.config.num_labels))

    def of_inputs(self, states: Tensor, inputs: PackedInputs, skipped: I32) -> Tensor:
        parts = list(torch.split(states, inputs.lengths.tolist()))
        self._computed.states = padded = pad_sequence(parts, batch_first=True)
        places = torch.arange(padded.shape[1], device=padded.device)
        mask = places < torch.as_tensor(inputs.lengths, device=padded.device)[:, None]
        return self._logits(attention_mask=mask.long())

    def of_tokens(self, states: Tensor) -> Tensor:
        self._computed.states = states[None]
        return self._logits()[0]

    def _logits(self, **options: Any) -> Tensor:
        logits: Tensor = self._model(**options).logits
        self._computed.states = None
        return logits.float()

    def finish(self, rows: Tensor, params: PoolingParams) -> Tensor:
        found: Tensor = self._activation(rows) if params.activate else rows
        return found


def label_activation(name: str | None, labels: int) -> nn.Module:
    """``name``: see :attr:`~penstock.engine.pooling.modules.Modules.label_activation`."""
    name = name or ("Sigmoid" if labels == 1 else "Softmax")
    made: nn.Module = nn.Softmax(-1) if name == "Softmax" else getattr(nn, name)()
    return made


class _Computed(nn.Module):
    """Stands in a model for its part without head."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self._pooler = getattr(base, "pooler", None)
        self._activation = getattr(base, "pooler_activation", None)  # ALBERT's pooler has it outside
        self.states: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        states = self.states
        pooled = None
        if self._pooler is not None and states is not None:
            pooled = self._pooler(states[:, 0] if self._activation is not None else states)
            pooled = pooled if self._activation is None else self._activation(pooled)
        return BaseModelOutputWithPooling(last_hidden_state=states, pooler_output=pooled)


def _module(step: Step, device: torch.device) -> nn.Module:
    """The module of a step, with its weights in float32. Raises ConfigError."""
    if isinstance(step, NormalizeStep):
        return _Normalize()
    made: nn.Module
    if isinstance(step, DenseStep):
        made = _Dense(step)
        directory = step.directory
    elif isinstance(step, LayerNormStep):
        made = _Wrapped(nn.LayerNorm(step.width))
        directory = step.directory
    else:
        what = "after each other" if isinstance(step, PoolStep) else "of logits of tokens"
        raise ConfigError(f"modules.json: {type(step).__name__} {what} cannot be run")
    try:
        made.load_state_dict(_weights(directory))
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{directory}: cannot read the weights: {one_line(error)}") from None
    return made.float().to(device).eval()


class _Normalize(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return normalize(rows, dim=-1)


class _Wrapped(nn.Module):
    """A norm, with the name that its weights have."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.norm(rows)
        return found


class _Dense(nn.Module):
    def __init__(self, step: DenseStep) -> None:
        super().__init__()
        self.linear = nn.Linear(step.inputs, step.outputs, step.bias)
        self._residual = step.residual
        if step.residual and step.inputs != step.outputs:
            self.residual = nn.Linear(step.inputs, step.outputs, bias=False)
        self._activation: nn.Module = getattr(nn, step.activation)()

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self._activation(self.linear(rows))
        if not self._residual:
            return found
        return found + (self.residual(rows) if hasattr(self, "residual") else rows)


def _weights(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    path = directory / "model.safetensors"
    if path.is_file():
        found: dict[str, Tensor] = load_file(path)
    else:
        found = torch.load(directory / "pytorch_model.bin", "cpu", weights_only=True)
    return found
