"""The architectures that the torch engine supports. Imports no torch, for the supervisor to check them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.config.errors import ConfigError, NeedsVllm
from penstock.engine.pooling.description import Runner, describe_pooling
from penstock.engine.pooling.supported_encoders import BIDIRECTIONAL, SUPPORTED_ENCODERS
from penstock.engine.refused_models import QUANTIZATION_FILES, REFUSED_MODELS

SUPPORTED_MODELS: dict[str, str] = {
    "afmoe": "Trinity (AFMoE)",
    "apertus": "Apertus",
    "arcee": "Arcee AFM",
    "bloom": "BLOOM",
    "cohere": "Command R",
    "cohere2": "Command R7B, Command A",
    "cohere2_moe": "Command A MoE",
    "deepseek_v2": "DeepSeek V2",
    "deepseek_v3": "DeepSeek V3, R1",
    "dots1": "dots.llm1",
    "ernie4_5": "ERNIE 4.5",
    "ernie4_5_moe": "ERNIE 4.5 MoE",
    "exaone4": "EXAONE 4",
    "exaone_moe": "K-EXAONE",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3, with images",
    "gemma3_text": "Gemma 3, text only",
    "gemma4": "Gemma 4: its text part",
    "gemma4_text": "Gemma 4, text only",
    "glm": "GLM-4-9B",
    "glm4": "GLM-4-0414",
    "glm4_moe": "GLM 4.5, 4.6, 4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "gpt2": "GPT-2",
    "gpt_bigcode": "StarCoder, SantaCoder",
    "gpt_neox": "GPT-NeoX, Pythia",
    "gpt_oss": "GPT-OSS, of which MXFP4 weights become bfloat16 or float32",
    "granite": "Granite 3",
    "granitemoe": "Granite 3 MoE",
    "hunyuan_v1_dense": "Hunyuan 0.5B to 7B",
    "hunyuan_v1_moe": "Hunyuan A13B",
    "idefics3": "Idefics 3, with images",
    "internlm3": "InternLM 3",
    "llama": "Llama 1 to 3.3, Yi, SmolLM, TinyLlama and other models of this architecture",
    "llama4": "Llama 4 with image input: its text part",
    "llama4_text": "Llama 4, text only",
    "llava": "LLaVA 1.5 and other models of this architecture, with images",
    "llava_next": "LLaVA 1.6 (NeXT), with images",
    "minimax_m2": "MiniMax M2",
    "ministral": "Ministral",
    "ministral3": "Ministral 3",
    "mistral": "Mistral",
    "mistral3": "Mistral Small 3.1 and later, Ministral 3, with image input: their text parts",
    "mixtral": "Mixtral",
    "nanochat": "nanochat",
    "nemotron": "Nemotron 4, Minitron",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "olmoe": "OLMoE",
    "opt": "OPT",
    "phi": "Phi 1, 1.5, 2",
    "phi3": "Phi 3, Phi 4",
    "phimoe": "Phi 3.5 MoE",
    "qwen2": "Qwen 1.5 (dense), 2, 2.5",
    "qwen2_5_vl": "Qwen 2.5 VL, with images",
    "qwen2_moe": "Qwen 1.5 MoE, 2 MoE",
    "qwen2_vl": "Qwen 2 VL, with images",
    "qwen3": "Qwen 3",
    "qwen3_moe": "Qwen 3 MoE",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM 3",
    "smolvlm": "SmolVLM, with images",
    "solar_open": "Solar Open",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder 2",
}
"""model_type of config.json, and the models that have it. Tests compare each one's greedy output and logprobs
with transformers' own."""


TEXT_PARTS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "idefics3": "llama",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "smolvlm": "llama",
}
"""model_types of models with image input, whose text part is that of ``text_config`` in config.json; and the
model_type of a text part that states none. Of those in
:data:`penstock.engine.torch.media.families.SEEING_FAMILIES` the whole is run, of others the text part."""

FLAT = frozenset({"qwen2_5_vl", "qwen2_vl"})
"""Those of TEXT_PARTS whose released config.json have the text part's fields among their own."""


WITH_EXPERTS = frozenset(
    {
        "afmoe",
        "cohere2_moe",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5_moe",
        "exaone_moe",
        "gemma4_text",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "granitemoe",
        "hunyuan_v1_moe",
        "minimax_m2",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_moe",
        "solar_open",
    }
)
"""model_types with experts, which can be split over ranks."""


UNPACKED = frozenset({("gpt_oss", "mxfp4")})
"""model_type and ``quant_method`` of quantized weights that are taken, as they are unpacked at the start."""


MAX_SIZES = {
    "hidden_size": 1 << 24,
    "num_attention_heads": 1 << 24,
    "num_hidden_layers": 10_000,
    "vocab_size": 1 << 24,
}
"""Sizes that are looked at before anything is made of them, with more than any model has."""


def check_supported(model_dir: Path, *, with_experts: bool = False, runner: Runner = "generate") -> None:
    """Raises ConfigError when config.json cannot be read, when its model_type is not supported for ``runner``
    or, with ``with_experts``, not in WITH_EXPERTS, when its weights are quantized, and when it has no
    sizes."""
    path = model_dir / "config.json"
    try:
        described: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(described, dict) or "model_type" not in described:
        raise NeedsVllm(
            f"{path}: states no model_type, as the config.json of a Hugging Face model does; if vLLM reads "
            "it, take its engine"
        )
    kind = described["model_type"]
    _check_kind(path, "model_type", described)
    pooled = describe_pooling(model_dir, runner)
    if pooled is not None:
        _check_pooling(path, described, with_experts=with_experts)
    if kind in TEXT_PARTS:
        text = described.get("text_config", described if kind in FLAT else None)
        if not isinstance(text, dict):
            raise ConfigError(
                f"{path}: model_type {kind!r} has no text_config, an object that describes its text part"
            )
        own = TEXT_PARTS[kind]
        kind, described = own if text is described else text.get("model_type", own), text | described
        if kind != own:
            _check_kind(path, "text_config: model_type", {"model_type": kind})
    _check_sizes(path, described)
    method = next((name for name in QUANTIZATION_FILES if (model_dir / name).is_file()), None)
    quantization = described.get("quantization_config")
    if not method and isinstance(quantization, dict):
        method = quantization.get("quant_method")
    if (method or quantization) and (kind, method) not in UNPACKED:
        how = f" ({method})" if method else ""
        raise NeedsVllm(
            f"{path}: the weights are quantized{how}, which the torch engine does not run; take vLLM's, or "
            "the model without quantization"
        )
    dense = kind == "gemma4_text" and not described.get("enable_moe_block")
    if with_experts and (dense or kind not in WITH_EXPERTS):
        raise ConfigError(
            f"--enable-expert-parallel: {path} is of model_type {kind!r}, which has no experts that "
            f"can be split; model_types that have are {', '.join(sorted(WITH_EXPERTS))}"
        )


def _check_pooling(path: Path, described: dict[str, Any], *, with_experts: bool) -> None:
    kind = described["model_type"]
    if with_experts:
        raise ConfigError(
            "--enable-expert-parallel: the engines of vectors and labels do not share experts; take --runner "
            "generate, or leave it out"
        )
    for name, value in (("use_bidirectional_attention", True), ("is_causal", False)):
        if described.get(name) is value and kind not in (*SUPPORTED_ENCODERS, *BIDIRECTIONAL):
            raise ConfigError(
                f"{path}: {name} is {value}; of decoders the torch engine runs {', '.join(BIDIRECTIONAL)} so"
            )


def _check_sizes(path: Path, described: dict[str, Any]) -> None:
    for name, most in MAX_SIZES.items():
        size = described.get(name)
        if size is not None and (type(size) is not int or not 1 <= size <= most):
            text = f"{path}: {name} is {size!r:.60}, it has to be an integer from 1 to {most:,}"
            raise ConfigError(text)


def _check_kind(path: Path, name: str, described: dict[str, Any]) -> None:
    kind = described["model_type"]
    if kind in SUPPORTED_MODELS or kind in SUPPORTED_ENCODERS:
        return
    refusal, known = REFUSED_MODELS.get(str(kind)), (*SUPPORTED_MODELS, *SUPPORTED_ENCODERS)
    why = refusal.why if refusal is not None else f"it runs {', '.join(known)}"
    text = f"{path}: {name} {kind!r} is not supported by the torch engine: {why}"
    raise NeedsVllm(text) if refusal is None or refusal.vllm else ConfigError(text)
