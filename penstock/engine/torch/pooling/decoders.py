"""Vectors, labels and scores by decoders, alone or beside the text of the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from penstock.config.serve import ServeConfig
from penstock.engine.pooling.beside_text import TextAndVectors
from penstock.engine.pooling.description import PoolingDescription
from penstock.engine.pooling.engine import PoolingEngine
from penstock.engine.pooling.modules import LogitScore, Modules, PoolStep, read_modules
from penstock.engine.torch.engine import TorchEngine
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_loader import Head as HeadKind
from penstock.engine.torch.model_loader import read_shape
from penstock.engine.torch.pooling.decoder_states import DecoderStates
from penstock.engine.torch.pooling.heads import Head, VectorHead, label_activation
from penstock.engine.torch.pooling.packed_inputs import PackedInputs
from penstock.engine.torch.pooling.torch_pooling_model import TorchPoolingModel
from penstock.engine.torch.supported_models import SUPPORTED_MODELS
from penstock.wire.arrays import I32
from penstock.wire.pooling import PoolingInfo, PoolingParams


class LastTokenHead:
    """The classifier of a decoder, which reads the state of the last token, or of each."""

    def __init__(self, classifier: nn.Module, activation: nn.Module) -> None:
        self._classifier = classifier
        self._activation = activation

    def of_inputs(self, states: Tensor, inputs: PackedInputs, skipped: I32) -> Tensor:
        last = inputs.on_device(inputs.starts + inputs.lengths - 1)
        return self.of_tokens(states[last])

    def of_tokens(self, states: Tensor) -> Tensor:
        logits: Tensor = self._classifier(states)
        return logits.float()

    def finish(self, rows: Tensor, params: PoolingParams) -> Tensor:
        found: Tensor = self._activation(rows) if params.activate else rows
        return found


class _TokenScore(nn.Module):
    """The logit of a token, less that of another, by the output projection of a decoder."""

    def __init__(self, model: PagedModel, step: LogitScore) -> None:
        super().__init__()
        self._model = model
        self._step = step

    def forward(self, states: Tensor) -> Tensor:
        head = self._model.head
        logits = torch.cat([head(rows) for rows in torch.split(states, head.rows)])
        found = logits[:, self._step.true_token]
        if self._step.false_token is not None:
            found = found - logits[:, self._step.false_token]
        return found[:, None]


def runs_causally(transformer: Any) -> bool:
    """Whether a model is a decoder whose tokens attend to those before them. ``transformer``: its
    configuration by transformers."""
    both = getattr(transformer, "use_bidirectional_attention", None)
    return transformer.model_type in SUPPORTED_MODELS and not both


def load_decoder(
    config: ServeConfig,
    modules: Modules,
    kind: HeadKind,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[DecoderStates, Head]:
    """A decoder that makes no text, and what follows its states. Raises ConfigError."""
    directory, score = str(modules.transformer), _score(modules)
    model = PagedModel(
        directory,
        replace(config, enable_lora=False),
        read_shape(directory, config.runner),
        dtype=dtype,
        device=device,
        head="text" if score else kind,
    )
    longest = min(config.max_model_len or model.max_positions, model.max_positions)
    states = _states(model, config, max(longest, config.max_num_batched_tokens), device)
    if score:
        return states, LastTokenHead(_TokenScore(model, score), label_activation(modules.label_activation, 1))
    if kind == "none":
        return states, VectorHead(_of_decoder(modules), device)
    activation = label_activation(modules.label_activation, model.labels)
    return states, LastTokenHead(model.classifier, activation)


def beside(
    config: ServeConfig, text: TorchEngine, description: PoolingDescription, model_dir: str
) -> TextAndVectors:
    """The engine of a decoder's text, and its vectors, by the same weights. Raises ConfigError."""
    modules = read_modules(Path(model_dir))
    longest = min(text.info.max_model_len, config.max_num_batched_tokens)
    info = PoolingInfo(
        tasks=tuple(map(int, description.tasks)), width=description.width, generates=True, max_tokens=longest
    )
    states = _states(text.model, config, longest, text.device)
    model = TorchPoolingModel(
        info,
        states,
        VectorHead(_of_decoder(modules), text.device),
        tokens=longest,
        device=text.device,
        dtype=text.model.dtype,
    )
    pooling = PoolingEngine(config, model, msgspec.structs.replace(text.info, pooling=info))
    return TextAndVectors(config, text, pooling, states.free)


def _states(model: PagedModel, config: ServeConfig, tokens: int, device: torch.device) -> DecoderStates:
    texts = min(tokens, config.max_num_seqs)
    return DecoderStates(model, texts=texts, tokens=tokens, block_size=config.block_size, device=device)


def _score(modules: Modules) -> LogitScore | None:
    return next((step for step in modules.steps if isinstance(step, LogitScore)), None)


def _of_decoder(modules: Modules) -> Modules:
    """Without files that say more, a decoder's vector is the state of its last token."""
    return modules if modules.stated else replace(modules, steps=(PoolStep(modes=("lasttoken",)),))
