"""A Hugging Face causal LM with our attention in place of its own."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from penstock.config.options import ServeConfig
from penstock.engine.torch.attention import PagedAttention, find_kernel
from penstock.engine.torch.attention_metadata import AttentionMetadata, dummy_attention_metadata
from penstock.engine.torch.bloom import replace_attention
from penstock.engine.torch.expert_parallel import ExpertParallel
from penstock.engine.torch.lm_head import LMHead
from penstock.engine.torch.memory import release_memory
from penstock.engine.torch.model_loader import ModelShape, load_model

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
        experts: ExpertParallel | None = None,
    ) -> None:
        """Loads the weights, of experts that are split this rank's. Raises ConfigError when they cannot be
        read."""
        from transformers import AttentionInterface, AttentionMaskInterface

        self._name = f"penstock_paged_{next(_instances)}"
        AttentionInterface.register(self._name, self._attend)
        AttentionMaskInterface.register(self._name, _no_mask)
        self._model_dir = model_dir
        self._config = config
        self._experts = experts
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._cache_size = 0, 0
        self._attention: PagedAttention | None = None
        self._model: Any = None
        self._head: LMHead | None = None
        self._load_weights()

    def _load_weights(self) -> None:
        """To the device, from files or from the host's memory."""
        if self._model is None:
            model = load_model(
                self._model_dir, self._config, self._dtype, self._device, self._name, self._experts
            )
            if model.config.model_type == "bloom":
                replace_attention(model, self._attend)
            self._model = model
        else:
            self._model.to(self._device)
        shape = self._shape
        self._head = LMHead(
            self._model.get_output_embeddings(), shape.logits_scale, shape.logits_softcap, self._device
        )

    def make_cache(self, blocks: int, block_size: int) -> None:
        """The KV cache, once it is known what the weights leave. Needed before the first token."""
        self._cache_size = blocks, block_size
        self._attention = PagedAttention(
            self._shape, blocks, block_size, self._dtype, self._device, find_kernel(self._device)
        )

    # -- sleep

    def sleep(self, *, drop_weights: bool) -> None:
        """Give memory back: the cache with all it holds, and the weights, which go to the host's memory,
        where they stay if that is the device, or nowhere."""
        self._attention = self._head = None
        if drop_weights:
            self._model = None
        else:
            self._model.to("cpu")
        release_memory(self._device)

    def wake_up(self) -> None:
        """Have the memory again, with an empty cache. Raises what a lack of memory raises, asleep as before,
        and ConfigError when the weights cannot be read."""
        dropped = self._model is None
        try:
            self._load_weights()
            self.make_cache(*self._cache_size)
        except BaseException:
            self.sleep(drop_weights=dropped)
            raise

    # -- the forward pass

    @property
    def head(self) -> LMHead:
        assert self._head is not None, "it sleeps"
        return self._head

    @property
    def attention(self) -> PagedAttention:
        assert self._attention is not None, "make_cache comes first, and it does not sleep"
        return self._attention

    def _attend(self, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        return self.attention(*arguments, **options)

    def hidden(self, tokens: Tensor, positions: Tensor, layout: AttentionMetadata, rows: Tensor) -> Tensor:
        """[S, H]: what ``head`` makes logits of, after the tokens at ``rows`` of a flat batch.

        tokens, positions: int64[T]; rows: int64[S]. Writes the keys and values of all T tokens.
        """
        if self._experts is not None:
            self._experts.begin_forward(len(tokens), self._device)
        self.attention.layout = layout
        output = self._model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0].index_select(0, rows)
        return hidden

    def dummy_run(self) -> None:
        """A pass for other ranks' tokens alone; brings one that nobody heeds."""
        attention = self.attention
        layout = dummy_attention_metadata(attention.keys[0].shape[2], attention.geometry, self._device)
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        self.hidden(zero, zero, layout, zero)


def _no_mask(*arguments: Any, **options: Any) -> None:
    """Our attention knows what each token may see."""
