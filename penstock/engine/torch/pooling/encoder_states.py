"""The last hidden states of texts by an encoder, without padding."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.engine.torch.pooling.bert_layer import replace_bert_layers
from penstock.engine.torch.pooling.packed_attention import PackedAttention
from penstock.engine.torch.pooling.packed_inputs import PackedInputs
from penstock.engine.torch.pooling.packed_linear import can_pack, pack_linears
from penstock.wire.arrays import I32


class EncoderStates:
    """A transformers encoder that computes packed inputs."""

    def __init__(self, base: Any, attend: PackedAttention) -> None:
        """``base``: the model without a head, loaded with ``attend`` as its attention function; faster layers
        replace its own."""
        self._base = base
        self._attend = attend
        self._first = _first_position(base)
        taken = inspect.signature(base.forward).parameters
        self._types = "token_type_ids" in taken and getattr(base.config, "type_vocab_size", 0) > 1
        encoder = getattr(base, "encoder", None)
        self._bias = getattr(encoder, "compute_position_bias", None)
        if encoder is not None and self._bias is not None:
            encoder.compute_position_bias = lambda _: None  # made for the longest input, not for all tokens
        replace_bert_layers(base, attend)
        if can_pack(base.device, base.dtype):
            pack_linears(base)
        base.pooler = None

    def compute(self, ids: I32, inputs: PackedInputs, seconds: I32) -> Tensor:
        """[T, H]: the states of all tokens. ids: int32[T]; seconds: int32[B], see
        :class:`~penstock.engine.pooling.model.PoolingBatch`."""
        places = inputs.places
        columns = {"input_ids": ids.astype(np.int64), "position_ids": places + self._first}
        if self._types:
            second = np.repeat(seconds, inputs.lengths)
            columns["token_type_ids"] = ((second > 0) & (places >= second)).astype(np.int64)
        self._attend.inputs = inputs
        if self._bias is not None:
            self._attend.bias = self._bias(torch.empty(1, int(inputs.lengths[-1]), device=inputs.device))
        output = self._base(**{name: inputs.on_device(each)[None] for name, each in columns.items()})
        states: Tensor = output.last_hidden_state[0]
        return states


def _first_position(base: nn.Module) -> int:
    """RoBERTa's positions begin behind that of the padding token."""
    for module in base.modules():
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int) and isinstance(
            getattr(module, "position_embeddings", None), nn.Embedding
        ):
            return padding + 1
    return 0
