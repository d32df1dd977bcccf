"""PEFT's ``adapter_config.json``: what of it decides how an adapter is run.

The weights decide which layers an adapter has; the configuration gives each its rank and its scaling, and
tells of what the weights alone do not show.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from penstock.adapters.errors import AdapterError, json_problem
from penstock.adapters.layer_patterns import LayerPatterns

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 1 << 16
MAX_ALPHA = 1e9
MAX_PATTERNS = 1 << 15
"""Entries of ``rank_pattern`` and of ``alpha_pattern``: more than the layers of a model of many experts."""

CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of ``init_lora_weights`` (or their beginnings) by which PEFT changes the weights of the base model
when it loads the adapter. An adapter that was converted when it was saved has ``true`` there."""

_Rank: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_RANK)]
_Alpha: TypeAlias = Annotated[float, Meta(ge=-MAX_ALPHA, le=MAX_ALPHA)]


class _Fields(msgspec.Struct):
    """Fields of PEFT's LoraConfig. The others concern training, or which layers have weights."""

    peft_type: str
    r: _Rank = 8
    lora_alpha: _Alpha = 8.0
    use_rslora: bool | None = False
    rank_pattern: Annotated[dict[str, _Rank], Meta(max_length=MAX_PATTERNS)] | None = None
    alpha_pattern: Annotated[dict[str, _Alpha], Meta(max_length=MAX_PATTERNS)] | None = None
    bias: str | None = "none"
    init_lora_weights: Any = True
    # What is not run, unless it is off.
    use_dora: Any = None
    lora_bias: Any = None
    modules_to_save: Any = None
    target_parameters: Any = None
    trainable_token_indices: Any = None
    layer_replication: Any = None
    megatron_config: Any = None
    alora_invocation_tokens: Any = None
    use_qalora: Any = None
    use_bdlora: Any = None
    arrow_config: Any = None
    kasa_config: Any = None
    monteclora_config: Any = None


MUST_BE_OFF = _Fields.__struct_fields__[_Fields.__struct_fields__.index("use_dora") :]
"""Fields that are refused unless they are null, false or empty."""


class PeftConfig:
    """A configuration that can be run."""

    def __init__(self, fields: _Fields) -> None:
        """Raises AdapterError."""
        self._fields = fields
        self._ranks = LayerPatterns(f"{CONFIG_FILE}: rank_pattern", fields.rank_pattern or {})
        self._alphas = LayerPatterns(f"{CONFIG_FILE}: alpha_pattern", fields.alpha_pattern or {})

    def scaling(self, layer: str, rank: int) -> float:
        """Factor of B·A in ``layer``, whose weights have ``rank``. Raises AdapterError if the configuration
        gives the layer another rank."""
        fields = self._fields
        expected = self._ranks.find(layer, fields.r)
        if rank != expected:
            raise AdapterError(f"layer {layer}: its rank is {rank}; {CONFIG_FILE} says {expected}")
        alpha = self._alphas.find(layer, fields.lora_alpha)
        return alpha / (math.sqrt(rank) if fields.use_rslora else rank)


def parse_peft_config(text: bytes) -> PeftConfig:
    """Raises AdapterError."""
    try:
        fields = msgspec.json.decode(text, type=_Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE}: {json_problem(error)}") from None
    if fields.peft_type != "LORA":
        raise AdapterError(f"{CONFIG_FILE}: peft_type is {fields.peft_type!r}; only 'LORA' is run")
    if fields.bias not in (None, "none"):
        raise AdapterError(f"{CONFIG_FILE}: bias is {fields.bias!r}; only 'none' is run")
    for name in MUST_BE_OFF:
        if value := getattr(fields, name):
            raise AdapterError(f"{CONFIG_FILE}: {name} is not supported; it is {_shown(value)}")
    method = fields.init_lora_weights
    if isinstance(method, str) and method.lower().startswith(CHANGED_BASE):
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights is {_shown(method)}, which changes the base model's weights. "
            "Save the adapter with path_initial_model_for_weight_conversion, or, if the model that is served "
            "has the changed weights, set init_lora_weights to true"
        )
    return PeftConfig(fields)


def _shown(value: Any) -> str:
    """A value of the file for a message."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
