"""Loading a Hugging Face causal LM, with our attention in place of its own."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config.errors import ConfigError
from ...config.options import ServeConfig
from .attention import PagedAttention
from .head import Head
from .layout import StepLayout

SUPPORTED = frozenset(
    {"gemma", "gemma2", "gpt2", "llama", "mistral", "mixtral", "opt", "phi", "phi3", "qwen2", "qwen3"}
    | {"qwen2_moe", "qwen3_moe"}
)
"""model_type of the architectures whose greedy output is tested to equal transformers' own."""

_instances = itertools.count()


@dataclass(slots=True, frozen=True)
class ModelShape:
    """What the KV cache and the request checks need to know."""

    layers: int
    kv_heads: int
    head_size: int
    vocab_size: int
    max_positions: int


def pick_device(config: ServeConfig) -> torch.device:
    """Raises ConfigError when CUDA is asked for and there is none."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("--device cuda: PyTorch finds no CUDA device here")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def pick_dtype(config: ServeConfig, model_dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """auto: float32 on a CPU, whose half-precision arithmetic is slow; the model's own elsewhere."""
    if config.dtype != "auto":
        named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        return named[config.dtype]
    return torch.float32 if device.type == "cpu" or model_dtype is None else model_dtype


def read_shape(model_dir: str) -> ModelShape:
    """The model's shape from its config.json. Raises ConfigError for an unsupported architecture."""
    from transformers import AutoConfig

    path = Path(model_dir) / "config.json"
    try:
        kind = json.loads(path.read_text()).get("model_type")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if kind not in SUPPORTED:
        known = ", ".join(sorted(SUPPORTED))
        raise ConfigError(
            f"{path}: model_type {kind!r} is not supported by the torch engine; it runs {known}"
        )
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    heads = int(config.num_attention_heads)
    described: dict[str, Any] = config.to_dict()
    return ModelShape(
        layers=int(config.num_hidden_layers),
        kv_heads=int(described.get("num_key_value_heads") or heads),
        head_size=int(described.get("head_dim") or config.hidden_size // heads),
        vocab_size=int(config.vocab_size),
        max_positions=int(config.max_position_embeddings),
    )


class PagedModel:
    """A causal LM whose layers keep keys and values in a paged cache."""

    def __init__(
        self,
        model_dir: str,
        dtype: torch.dtype,
        device: torch.device,
        make_attention: Callable[[], PagedAttention],
    ) -> None:
        """Raises ConfigError when the weights cannot be read."""
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # progress goes to the supervisor
        name = f"penstock_paged_{next(_instances)}"
        self.attention: PagedAttention | None = None
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, _no_mask)
        try:
            self._model = AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=dtype, attn_implementation=name, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model {model_dir}: {error}") from None
        self._model.to(device).eval()
        self.head = Head(self._model.get_output_embeddings(), _final_softcap(self._model.config), device)
        self.attention = make_attention()

    def _attend(self, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        assert self.attention is not None
        return self.attention(*arguments, **options)

    def hidden(self, tokens: Tensor, positions: Tensor, layout: StepLayout, rows: Tensor) -> Tensor:
        """[S, H]: what ``head`` makes logits of, after the tokens at ``rows`` of a flat batch.

        tokens, positions: int64[T]; rows: int64[S]. Writes the keys and values of all T tokens.
        """
        assert self.attention is not None
        self.attention.layout = layout
        output = self._model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0].index_select(0, rows)
        return hidden


def _final_softcap(config: Any) -> float | None:
    softcap: float | None = config.to_dict().get("final_logit_softcapping")
    return softcap


def _no_mask(*arguments: Any, **options: Any) -> None:
    """Our attention knows what each token may see."""
