"""A Hugging Face causal LM with our attention in place of its own."""

import itertools
from typing import Any

import torch
from torch import Tensor

from ...config.options import ServeConfig
from .attention import PagedAttention, find_kernel
from .bloom import replace_attention
from .head import Head
from .layout import StepLayout
from .load import ModelShape, load_model

_instances = itertools.count()


class PagedModel:
    """A causal LM whose layers keep keys and values in a paged cache."""

    def __init__(
        self,
        model_dir: str,
        config: ServeConfig,
        shape: ModelShape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Loads the weights. Raises ConfigError when they cannot be read."""
        from transformers import AttentionInterface, AttentionMaskInterface

        name = f"penstock_paged_{next(_instances)}"
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, _no_mask)
        self._model = load_model(model_dir, config, dtype, device, name)
        if self._model.config.model_type == "bloom":
            replace_attention(self._model, self._attend)
        self.head = Head(
            self._model.get_output_embeddings(), shape.logits_scale, shape.logits_softcap, device
        )
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._attention: PagedAttention | None = None

    def make_cache(self, blocks: int, block_size: int) -> None:
        """The KV cache, once it is known what the weights leave. Needed before the first token."""
        self._attention = PagedAttention(
            self._shape, blocks, block_size, self._dtype, self._device, find_kernel(self._device)
        )

    @property
    def attention(self) -> PagedAttention:
        assert self._attention is not None, "make_cache comes first"
        return self._attention

    def _attend(self, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        return self.attention(*arguments, **options)

    def hidden(self, tokens: Tensor, positions: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        """[S, H]: what ``head`` makes logits of, after the tokens at ``rows`` of a flat batch.

        tokens, positions: int64[T]; rows: int64[S]. Writes the keys and values of all T tokens.
        """
        self.attention.layout = layout
        output = self._model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0].index_select(0, rows)
        return hidden


def _no_mask(*arguments: Any, **options: Any) -> None:
    """Our attention knows what each token may see."""
