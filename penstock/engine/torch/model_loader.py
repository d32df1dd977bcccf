"""Reads a model's shape from config.json, and loads its weights into a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.config.errors import ConfigError, one_line
from penstock.config.serve import ServeConfig
from penstock.engine.model_length import longest_text
from penstock.engine.pooling.description import Runner
from penstock.engine.pooling.supported_encoders import SUPPORTED_ENCODERS
from penstock.engine.torch.expert_parallel import IMPLEMENTATION, ExpertParallel
from penstock.engine.torch.experts import pick_experts
from penstock.engine.torch.host_reads import remove_host_reads
from penstock.engine.torch.out_of_memory import is_out_of_memory
from penstock.engine.torch.supported_models import TEXT_PARTS, WITH_EXPERTS, check_supported
from penstock.engine.torch.transformers_imports import import_transformers, made_without_compiler
from penstock.engine.torch.weight_map import TEXT_NAMES

MADE_WHOLE = frozenset({"longrope", "proportional"})
"""Rotary embeddings that :func:`made_without_compiler` cannot make."""
Head = Literal["text", "seeing", "none", "labels", "token_labels"]
"""What a model has besides its layers: an output projection, that and an encoder of pictures, nothing, or a
classifier of texts or tokens."""
_CLASSES: dict[Head, tuple[str, str]] = {
    "text": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    "seeing": ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),
    "none": ("AutoModel", "MODEL_MAPPING"),
    "labels": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),
    "token_labels": ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING"),
}
"""transformers' names of the class that makes it, and of the table of model types that it has."""
NAMES_SHOWN = 3
"""Maximum tensor names in an error."""
UNSTATED_LENGTH = 2048
"""Maximum length of a model whose config.json states none, and whose positions have none: BLOOM's training
length."""


@dataclass(slots=True, frozen=True)
class ModelShape:
    """A model's dimensions, for the KV cache, the LM head and the request checks."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    """Of queries and keys."""
    value_size: int
    """Head size of values; DeepSeek's differ."""
    vocab_size: int
    max_positions: int
    dtype: torch.dtype | None
    """dtype of the weights, from config.json."""
    alibi: bool
    """Whether the model uses ALiBi instead of position embeddings."""
    logits_scale: float
    """Factor of the logits (Granite, Command R)."""
    logits_softcap: float | None
    """Bound of the logits by a tanh (Gemma 2)."""
    unlike: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """KV heads and head size of the layers in which they are others (Gemma 4)."""
    reused: Mapping[int, int] = field(default_factory=dict)
    """Layers that attend to keys and values of an earlier layer, and that layer (Gemma 4)."""

    def cached(self, layer: int) -> tuple[int, int, int]:
        """KV heads, and the head size of keys and of values, in the cache of a layer."""
        if layer not in self.unlike:
            return self.kv_heads, self.head_size, self.value_size
        kv_heads, size = self.unlike[layer]
        return kv_heads, size, size

    def passing(self) -> ModelShape:
        """For pages of which no step continues another one's: layers of the same sizes take turns with
        them."""
        first: dict[tuple[int, int, int], int] = {}
        turns = {layer: first.setdefault(self.cached(layer), layer) for layer in range(self.layers)}
        return replace(self, reused={layer: other for layer, other in turns.items() if layer != other})


def pick_dtype(config: ServeConfig, model_dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of ``--dtype``; auto: float32 on a CPU, where half precision is slow, else the model's."""
    if config.dtype != "auto":
        named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        return named[config.dtype]
    return torch.float32 if device.type == "cpu" or model_dtype is None else model_dtype


def read_shape(model_dir: str, runner: Runner = "generate") -> ModelShape:
    """The shape of a decoder from its config.json. Raises ConfigError for an unsupported architecture, and
    one that is not for ``runner``."""
    check_supported(Path(model_dir), runner=runner)
    config = read_config(model_dir)
    try:
        return _shape_of(config)
    except _ODD_CONFIG as error:
        raise _odd_config(model_dir, error) from None


_ODD_CONFIG = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What code that reads a model's configuration raises for values that it does not expect."""


def _odd_config(model_dir: str, error: Exception) -> ConfigError:
    what = f"{type(error).__name__}: {one_line(error)}"
    return ConfigError(f"{model_dir}/config.json describes no model that can be made: {what}")


def _shape_of(config: Any) -> ModelShape:
    described: dict[str, Any] = config.to_dict()
    heads = int(config.num_attention_heads)
    kv_heads = 1 if described.get("multi_query") else int(described.get("num_key_value_heads") or heads)
    head_size = int(described.get("head_dim") or config.hidden_size // heads)
    value_size = head_size
    if described.get("kv_lora_rank"):  # latent attention, whose keys and values are expanded for every head
        kv_heads = heads
        head_size = int(described["qk_nope_head_dim"]) + int(described["qk_rope_head_dim"])
        value_size = int(described["v_head_dim"])
    return ModelShape(
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        value_size=value_size,
        vocab_size=int(config.vocab_size),
        max_positions=longest_text(described) or UNSTATED_LENGTH,
        dtype=config.dtype if isinstance(config.dtype, torch.dtype) else None,
        alibi=config.model_type == "bloom",
        logits_scale=described.get("logit_scale", 1.0) / described.get("logits_scaling", 1.0),
        logits_softcap=described.get("final_logit_softcapping"),
        unlike={
            int(layer): (
                int(changes.get("num_key_value_heads", kv_heads)),
                int(changes.get("head_dim", head_size)),
            )
            for layer, changes in (described.get("per_layer_config") or {}).items()
        },
        reused=_reused_layers(config),
    )


def _reused_layers(config: Any) -> dict[int, int]:
    """:attr:`ModelShape.reused` by transformers' configuration."""
    reused: dict[int, int] = {}
    stored: dict[str, int] = {}
    for layer, mode in enumerate(getattr(config, "kv_sharing_modes", ())):
        kind = config.layer_types[layer]
        if mode == "reuse":
            reused[layer] = stored[kind]
        else:
            stored[kind] = layer
    return reused


def read_config(model_dir: str, head: Head = "text") -> Any:
    """transformers' configuration of the model; of its text part, if it has others and does not see."""
    import_transformers()
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ConfigError(f"{model_dir}/config.json: {one_line(error)}") from None
    if config.model_type not in TEXT_PARTS or head == "seeing":
        return config
    text = config.text_config
    text.dtype = text.dtype or config.dtype
    text.tie_word_embeddings = config.tie_word_embeddings  # of these transformers reads the whole model's
    return text


def _ropes(described: dict[str, Any]) -> list[dict[str, Any]]:
    """A model's rotary embeddings, by the types of its layers if they differ."""
    ropes: dict[str, Any] = described.get("rope_parameters") or {}
    return [ropes, *(of_layers for of_layers in ropes.values() if isinstance(of_layers, dict))]


def load_model(
    model_dir: str,
    config: ServeConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    experts: ExpertParallel | None = None,
    head: Head = "text",
) -> Any:
    """A transformers causal LM on ``device``, or its layers with another ``head``; one that sees has such an
    LM as a part (``media/language_part.py``). ``attention``: the registered name of the attention function
    for text. ``experts``: loads only this rank's share of the experts; None:
    all.

    Raises ConfigError when the weights cannot be read, or do not match config.json.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # progress is reported to the supervisor
    logging.set_verbosity_error()  # its warnings are ConfigErrors here
    torch.set_float32_matmul_precision("highest")  # float32 is no TF32, whatever the environment asks for
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if head == "seeing":
        options["attn_implementation"] = {"text_config": attention, "vision_config": "sdpa"}
    if experts is not None:
        options["experts_implementation"] = IMPLEMENTATION
    elif read_config(model_dir).model_type in WITH_EXPERTS:
        options["experts_implementation"] = pick_experts(dtype, device)
    if config.load_format == "dummy":
        model = _random_model(model_dir, config.seed, device, options, head)
    else:
        model = _read_model(model_dir, config.load_format == "safetensors", options, experts, head)
    if experts is not None:
        experts.keep_local_experts(model)
    if model.config.model_type not in SUPPORTED_ENCODERS:
        remove_host_reads(model)
    _make_parameters(model)
    return model.to(device).eval()


def _make_parameters(model: Any) -> None:
    """Make parameters of buffers that a checkpoint has, as the biases that training gives to routers. They
    are then replaced with the other weights."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                delattr(module, name)
                setattr(module, name, torch.nn.Parameter(buffer, requires_grad=False))


def _unused(name: str, head: Head) -> bool:
    """Whether a tensor belongs to BERT's own pooler, which embedders do without."""
    return head in ("none", "token_labels") and name.rpartition("pooler.")[1] != ""


def _class_for(head: Head, config: Any) -> Any:
    """transformers' class that makes the model of a configuration. Raises ConfigError if there is none."""
    from transformers.models.auto import modeling_auto

    name, table = _CLASSES[head]
    if head != "text" and type(config) not in getattr(modeling_auto, table):
        raise ConfigError(f"transformers has no {name} of model_type {config.model_type!r}")
    return getattr(modeling_auto, name)


def _random_model(
    model_dir: str, seed: int, device: torch.device, options: dict[str, Any], head: Head
) -> Any:
    config = read_config(model_dir, head)
    torch.manual_seed(seed)
    try:
        with torch.device(device):
            return _class_for(head, config).from_config(config, **options)
    except (*_ODD_CONFIG, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise _odd_config(model_dir, error) from None


def _read_model(
    model_dir: str,
    only_safetensors: bool,
    options: dict[str, Any],
    experts: ExpertParallel | None,
    head: Head,
) -> Any:
    from safetensors import SafetensorError
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, Mxfp4Config

    config = read_config(model_dir, head)
    model_class: Any = _class_for(head, config)
    if getattr(config, "quantization_config", None) is not None:
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    if experts is not None:
        model_class = experts.sharded_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    try:
        # their factors and zeros are of the meta device, and do not go with frequencies of the CPU
        kinds = {rope.get("rope_type") for rope in _ropes(config.get_text_config().to_dict())}
        with made_without_compiler() if kinds.isdisjoint(MADE_WHOLE) else nullcontext():
            model, report = model_class.from_pretrained(
                model_dir,
                config=config,
                key_mapping=None if head == "seeing" else TEXT_NAMES,
                local_files_only=True,
                use_safetensors=only_safetensors or None,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"model {model_dir}: cannot read the weights: {one_line(error)}") from None
    except _ODD_CONFIG as error:
        raise _odd_config(model_dir, error) from None
    mismatched = [
        f"{name} is {list(found)}, not {list(wanted)}"
        for name, found, wanted in sorted(report["mismatched_keys"])
    ]
    for what, names in (
        ("tensors of another shape than config.json states", mismatched),
        ("no weights for", sorted(name for name in report["missing_keys"] if not _unused(name, head))),
        ("errors in the weights", sorted(report["error_msgs"])),
    ):
        if names:
            shown = ", ".join(names[:NAMES_SHOWN]) + (", …" if len(names) > NAMES_SHOWN else "")
            raise ConfigError(f"model {model_dir}: {what} ({len(names)}): {shown}")
    return model
