"""Families at a small but real size against transformers, in float32 and in half precision.

Head sizes, groups, windows, soft caps and experts are as released models have them; prompts come in chunks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from tests.engine.torch.harness import (
    DEVICE,
    Outcome,
    make_engine,
    make_model,
    next_logprobs,
    run_all,
    submit,
)

pytestmark = pytest.mark.gpu

VOCAB = 2000
ON_GPU = DEVICE.type == "cuda"
PROMPTS = (1, 40, 150, 190) if ON_GPU else (40, 130)
"""Their lengths: below and above a chunk, a tile of a kernel, and the window."""
TOKENS = 24 if ON_GPU else 8
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4 if ON_GPU else 2,
    "initializer_range": 0.06,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "mistral": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "sliding_window": 100},
    "qwen2": {"hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
    "gemma2": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 224,  # no power of two, as in Gemma 2 27B
        "sliding_window": 100,
        "attn_logit_softcapping": 5.0,  # scores of random weights are small
        "final_logit_softcapping": 8.0,
        "tie_word_embeddings": False,  # or random weights repeat their input
    },
    "deepseek_v3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "kv_lora_rank": 256,
        "q_lora_rank": 256,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 256,
    },
    "gemma4_text": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 100,
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "intermediate_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "sliding_window": 100,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "phi3": {"hidden_size": 576, "num_attention_heads": 6, "num_key_value_heads": 6},
    "opt": {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "ffn_dim": 1024,
        "word_embed_proj_dim": 512,
        "init_std": 0.06,
    },
    "qwen3_moe": {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
    },
}


class Compared(NamedTuple):
    """Of all generated tokens, by the histories that the engine made: float32[n] each."""

    logprob: NDArray[np.float32]
    """That the engine states for its token."""
    reference: NDArray[np.float32]
    """Of the same token, by transformers."""
    behind: NDArray[np.float32]
    """How far it is behind the likeliest token, by transformers; 0: it is that token."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, transformers.PreTrainedModel]:
    directory = tmp_path_factory.mktemp(request.param)
    model = make_model(request.param, directory, **_COMMON | FAMILIES[request.param])
    model.set_attn_implementation("eager")  # which has soft caps, and rounds as the engine does
    return directory, model


def prompts() -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(3, VOCAB, size=length).tolist() for length in PROMPTS]


def generated(directory: Path, **options: Any) -> dict[int, Outcome]:
    engine = make_engine(
        directory,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=256,
        async_scheduling="auto",
        **options,
    )
    requests = [
        submit(stream, prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        for stream, prompt in enumerate(prompts())
    ]
    return run_all(engine, requests)


def compare(outcomes: dict[int, Outcome], model: transformers.PreTrainedModel) -> Compared:
    columns: list[NDArray[Any]] = []
    for stream, prompt in enumerate(prompts()):
        tokens = outcomes[stream].tokens
        assert len(tokens) == TOKENS
        exact = next_logprobs(model, prompt + tokens[:-1])[len(prompt) - 1 :]
        own = exact.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        stated = [values[0] for _, values, _ in outcomes[stream].logprobs]
        columns.append(np.stack([stated, own.numpy(), (exact.amax(-1) - own).numpy()]))
    return Compared(*np.concatenate(columns, -1))


def test_greedy_tokens_are_those_of_transformers(family: tuple[Path, transformers.PreTrainedModel]) -> None:
    """Token by token: each is the likeliest one after those before it."""
    directory, model = family
    compared = compare(generated(directory, dtype="float32"), model)
    # where two tokens are as good as equal, sums in another order decide
    assert compared.behind.max() < 1e-4
    assert np.count_nonzero(compared.behind) <= 1
    np.testing.assert_allclose(compared.logprob, compared.reference, atol=1e-3)


def test_half_precision_is_as_exact_as_that_of_transformers(
    family: tuple[Path, transformers.PreTrainedModel],
) -> None:
    """Both round; neither is further from float32 than the other."""
    directory, model = family
    outcomes = generated(directory, dtype="bfloat16")
    exact = compare(outcomes, model)
    half = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, attn_implementation="eager"
    )
    rounded = compare(outcomes, half.to(DEVICE).eval())
    error = np.abs(exact.logprob - exact.reference)
    theirs = np.abs(rounded.reference - exact.reference)
    # a router between two experts may take another one: means would tell of it alone
    assert np.median(error) <= 1.5 * np.median(theirs) + 1e-3
    near = 4 * np.quantile(theirs, 0.9)
    assert np.mean(rounded.behind <= near) >= 0.9
    assert np.mean(rounded.behind == 0) >= 0.7
