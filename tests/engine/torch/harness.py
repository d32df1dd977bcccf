"""Tiny random models, and an engine driven step by step without processes or sockets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.config.serve import ServeConfig
from penstock.engine.base import StepRows
from penstock.engine.media.page_supply import PageSupply
from penstock.engine.torch.engine import TorchEngine
from penstock.wire.frames import FinishReason
from penstock.wire.logprobs import Logprobs
from penstock.wire.messages import RoutedExperts, SamplingParams, Submit

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
"""Where engines and what they are compared with run: that of ``pytest --device``."""
VOCAB = 320
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.4,  # wide enough for greedy choices without near ties
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ALL_HEADS: dict[str, Any] = {"num_key_value_heads": 4}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 24,
    "mscale": 1.0,
}
_LATENT: dict[str, Any] = {
    **_ALL_HEADS,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
"""Keys of 24 elements, values of 12."""
_GROUPED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_CHUNKED: dict[str, Any] = {
    "head_dim": 8,
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "attention_chunk_size": 24,
    "no_rope_layer_interval": 2,
    "floor_scale": 8,
    "attn_scale": 0.5,
}
_GEMMA_4: dict[str, Any] = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
_GRID_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**_EXPERTS, "head_dim": 8, "sliding_window": 24},
    "apertus": {},
    "arcee": {},
    "bloom": {"num_attention_heads": 6, "hidden_size": 48},  # ALiBi's slopes differ for no power of two
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 24},
    "cohere2_moe": {"logit_scale": 0.25, "sliding_window": 24, "num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**_LATENT, **_GROUPED_EXPERTS, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**_LATENT, **_GROUPED_EXPERTS, "rope_parameters": _YARN | {"mscale_all_dim": 1.0}},
    "dots1": {**_GROUPED_EXPERTS, "n_shared_experts": 1, "sliding_window": 24},
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": False,
    },
    "exaone4": {"sliding_window": 24},
    "exaone_moe": {**_EXPERTS, "head_dim": 8, "sliding_window": 24, "first_k_dense_replace": 1},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3": {
        "head_dim": 16,
        "sliding_window": 8,  # shorter than a picture
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": False,  # or random weights repeat their input
    },
    "gemma3_text": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma4": {
        **_GEMMA_4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gemma4_text": {
        **_GEMMA_4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 2.0,
        "use_qk_norm": True,
        "n_group": 2,
    },
    "glm4_moe_lite": {**_LATENT, **_GROUPED_EXPERTS},
    "gpt2": {"n_inner": 64},
    "gpt_bigcode": {"n_inner": 64},
    "gpt_neox": _ALL_HEADS,
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 24,
            "truncate": False,
        },
        "head_dim": 16,
        "sliding_window": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.3},
    "granitemoe": {"logits_scaling": 3.0, "num_local_experts": 4, "attention_multiplier": 0.3},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": [2, 2]},
    "idefics3": {},
    "internlm3": {},
    "llama": {},
    "llama4": _CHUNKED,
    "llama4_text": _CHUNKED | {"interleave_moe_layer_step": 2, "num_experts_per_tok": 2},
    "llava": {},
    "llava_next": {},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "ministral": {"head_dim": 8, "sliding_window": 24},
    "ministral3": {"head_dim": 8, "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.5}},
    "mistral": {"sliding_window": 24},
    "mistral3": {
        "model_type": "ministral3",
        "head_dim": 8,
        "rope_parameters": _YARN | {"llama_4_scaling_beta": 0.5},
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 24},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.4, **_ALL_HEADS},
    "phi": _ALL_HEADS,
    "phi3": {},
    "phimoe": {"num_local_experts": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_5_vl": {"rope_parameters": _GRID_ROPE},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen2_vl": {"rope_parameters": _GRID_ROPE},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**_EXPERTS, "head_dim": 16},
    "seed_oss": {"head_dim": 8},
    "smollm3": {},
    "smolvlm": {},
    "solar_open": {**_GROUPED_EXPERTS, "head_dim": 8},
    "stablelm": {},
    "starcoder2": {"sliding_window": 24},
}
IMAGE = VOCAB - 1
"""The image token of models with image input."""
_TOWER: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.4,
}
_LLAVA: dict[str, Any] = {
    "vision_config": _TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
    "image_token_index": IMAGE,
}
_PATCHES: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4, "initializer_range": 0.4}
_IDEFICS = {"vision_config": _TOWER, "scale_factor": 2, "image_token_id": IMAGE}
OTHER_PARTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vision_config": _TOWER | {"image_size": 24},
        "mm_tokens_per_image": 9,
        "image_token_index": IMAGE,
    },
    "llama4": {
        "vision_config": {
            "hidden_size": 24,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": 28,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        "image_token_index": IMAGE,
        "boi_token_index": VOCAB - 2,
        "eoi_token_index": VOCAB - 3,
    },
    "mistral3": {
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "head_dim": 8,
        },
        "image_token_index": IMAGE,
    },
    "gemma4": {},
    "idefics3": _IDEFICS,
    "llava": _LLAVA,
    "llava_next": _LLAVA | {"image_grid_pinpoints": [[32, 32]]},
    "qwen2_5_vl": {
        "vision_config": _PATCHES
        | {
            "hidden_size": 24,
            "out_hidden_size": 32,
            "intermediate_size": 16,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": IMAGE,
    },
    "qwen2_vl": {
        "vision_config": _PATCHES | {"embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
        "image_token_id": IMAGE,
    },
    "smolvlm": _IDEFICS,
}
"""Of models with image input; their text parts have the options of :data:`FAMILIES`."""
_RENAMED = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_OLD_NAMES = {
    "gpt2": _RENAMED,
    "gpt_bigcode": _RENAMED,
    "bloom": _RENAMED | {"hidden_size": "hidden_size", "max_position_embeddings": "seq_length"},
}


def finished() -> None:
    """Waits until the device has done all that was enqueued."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def cpu_only(reason: str) -> pytest.MarkDecorator:
    """Skips what is about the CPU alone where the tests run on another device."""
    return pytest.mark.skipif(DEVICE.type != "cpu", reason=reason)


def make_model(kind: str, directory: Path, **changes: Any) -> transformers.PreTrainedModel:
    """A random model of a family, saved to ``directory``; the same for the same arguments on any device."""
    torch.manual_seed(0)
    known = transformers.AutoConfig.for_model(kind)
    options = _SMALL | FAMILIES[kind] | changes
    if kind in _OLD_NAMES:
        options = {_OLD_NAMES[kind].get(key, key): value for key, value in options.items()}
        for absent in ("intermediate_size", "num_key_value_heads"):
            options.pop(absent)
    if kind in OTHER_PARTS:
        names = "tie_word_embeddings", *OTHER_PARTS[kind]
        whole = OTHER_PARTS[kind] | {name: options[name] for name in names if name in options}
        text = {name: value for name, value in options.items() if name not in OTHER_PARTS[kind]}
        options = whole | {"text_config": text}
    config = type(known)(**options)
    seeing = kind in OTHER_PARTS
    auto = transformers.AutoModelForImageTextToText if seeing else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    for name, bias in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith("e_score_correction_bias"):  # zeros in a new model, and learned
            bias.data.uniform_(-0.5, 0.5)
        if name.endswith("mm_input_projection_weight"):  # likewise
            bias.data.normal_(std=0.4)
    model.save_pretrained(directory)
    return model.to(DEVICE)


SMALL_ENGINE: dict[str, Any] = {
    "max_num_seqs": 64,
    "kv_cache_memory": 32 << 20,
    "threads": 1,
    "device": DEVICE.type,
    "async_scheduling": "off",  # on any device; tests of it set it
}


def make_engine(
    directory: Path | str, draft_dir: str | None = None, pages: PageSupply | None = None, **options: Any
) -> TorchEngine:
    config = ServeConfig(**(SMALL_ENGINE | options))
    return TorchEngine(config, str(directory), lambda text, fraction: None, draft_dir=draft_dir, pages=pages)


def submit(
    stream: int, prompt: Sequence[int], interval: int = 1, resumed: int = 0, **sampling: Any
) -> Submit:
    settings = {"max_tokens": 16, "seed": stream, "temperature": 0.0} | sampling
    return Submit(
        stream,
        np.array(prompt, "<i4").tobytes(),
        SamplingParams(**settings),
        interval=interval,
        resumed=resumed,
    )


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Tokens per row."""
    finish: FinishReason = FinishReason.NONE
    error: str = ""
    logprobs: list[tuple[list[int], list[float], int]] = field(default_factory=list)
    prompt: dict[int, tuple[list[int], list[float], int]] = field(default_factory=dict)
    """Logprobs of prompt tokens by their places."""
    experts: RoutedExperts | None = None


class Driver:
    """Steps an engine and gathers what each stream gets, checking order and single ends."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.outcomes: dict[int, Outcome] = {}

    def submit(self, request: Submit) -> None:
        self.outcomes[request.stream] = Outcome()
        self.engine.submit(0, request)

    def step(self) -> None:
        self.take(self.engine.step())

    def take(self, rows: StepRows) -> None:
        for _, message in rows.routed:
            self.outcomes[message.stream].experts = message
        counts = np.ones(len(rows.stream), np.int32) if rows.count is None else rows.count
        finishes = np.zeros(len(rows.stream), np.int8) if rows.finish is None else rows.finish
        ends = np.cumsum(counts)
        for row, stream in enumerate(rows.stream.tolist()):
            outcome = self.outcomes[stream]
            assert outcome.finish is FinishReason.NONE, "a row after the end"
            outcome.positions.append(int(rows.position[row]))
            outcome.rows.append(int(counts[row]))
            outcome.tokens += rows.tokens[ends[row] - counts[row] : ends[row]].tolist()
            outcome.finish = FinishReason(int(finishes[row]))
            if rows.logprobs is not None:
                outcome.logprobs += entries(rows.logprobs, int(ends[row] - counts[row]), int(ends[row]))
            if rows.prompt is not None:
                assert not (outcome.tokens and row in rows.prompt.row), "prompt logprobs after a token"
                for at in np.flatnonzero(rows.prompt.row == row):
                    ids, values = rows.prompt.ids[at].tolist(), rows.prompt.values[at].tolist()
                    place = int(rows.prompt.position[at])
                    assert place not in outcome.prompt, "a prompt token twice"
                    outcome.prompt[place] = (ids, values, int(rows.prompt.rank[at]))
        for failure in rows.failed:
            self.outcomes[failure.stream].error = failure.message

    def run(self, most: int = 5000) -> dict[int, Outcome]:
        for _ in range(most):
            if not self.engine.has_work():
                return self.outcomes
            self.step()
        raise AssertionError(f"streams still run after {most} steps")


ROUNDED = 0.0 if DEVICE.type == "cpu" else 0.05
"""Of the streams that are compared: those that may differ. A GPU adds up products of another number of rows
in another order, by which in float32 about one token in 20,000 of these models turns into another."""


def equal(expected: object, found: object) -> None:
    assert found == expected


def assert_alike(
    expected: Mapping[int, Any], found: Mapping[int, Any], check: Callable[[Any, Any], None] = equal
) -> None:
    """Streams are what is expected, as ``check`` compares them, but for those that a GPU rounds otherwise."""
    differences = []
    for stream, each in expected.items():
        try:
            check(each, found[stream])
        except AssertionError as difference:
            differences.append(difference)
    if len(differences) > (max(1, ROUNDED * len(expected)) if ROUNDED else 0):
        raise differences[0]


def entries(logprobs: Logprobs, start: int, end: int) -> list[tuple[list[int], list[float], int]]:
    return [
        (logprobs.ids[place].tolist(), logprobs.values[place].tolist(), int(logprobs.rank[place]))
        for place in np.flatnonzero((logprobs.token >= start) & (logprobs.token < end))
    ]


def run_all(engine: TorchEngine, requests: Iterable[Submit]) -> dict[int, Outcome]:
    driver = Driver(engine)
    for request in requests:
        driver.submit(request)
    return driver.run()


@torch.inference_mode()
def top_logprobs(model: transformers.PreTrainedModel, tokens: Sequence[int], most: int) -> Any:
    """[T, most] ids and logprobs of the likeliest tokens after each of ``tokens``, by transformers itself."""
    return next_logprobs(model, tokens).topk(most, -1)


@torch.inference_mode()
def next_logprobs(model: transformers.PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """float32[T, V] on the CPU: logprobs of what follows each of ``tokens``, by transformers itself."""
    logits = model(torch.tensor([list(tokens)], device=model.device)).logits[0].float()
    return torch.log_softmax(logits, -1).cpu()


@torch.inference_mode()
def generate(model: transformers.PreTrainedModel, prompt: Sequence[int], tokens: int) -> list[int]:
    """transformers' own greedy continuation, up to ``tokens`` tokens, EOS included."""
    ids = torch.tensor([list(prompt)], device=model.device)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=2
    )
    continued: list[int] = output[0, len(prompt) :].tolist()
    return continued
