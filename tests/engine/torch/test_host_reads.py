"""Models without host reads compute what transformers' own compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.torch.host_reads import remove_host_reads
from tests.engine.torch.harness import VOCAB, generate, make_engine, make_model, run_all, submit, top_logprobs

ORIGINAL = 256
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
    "per layer type": (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": DYNAMIC,
            },
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "Phi 3.5 MoE": (
        "phimoe",
        {"rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.2}},
    ),
    "Phi 3.5 MoE without scaling": ("phimoe", {}),
}
"""Rotary embeddings of which transformers reads something on the host: model type, changes of its config."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROPES)
def test_rotary_embeddings_up_to_the_original_length(name: str, tmp_path: Path) -> None:
    kind, changes = ROPES[name]
    model = make_model(kind, tmp_path, **changes)
    prompts = [
        np.random.default_rng(length).integers(3, VOCAB, size=length).tolist() for length in (1, 40, 230)
    ]
    outcomes = run_all(
        make_engine(tmp_path),
        [submit(stream, prompt, max_tokens=20) for stream, prompt in enumerate(prompts)],
    )
    for stream, prompt in enumerate(prompts):
        assert outcomes[stream].tokens == generate(model, prompt, 20)


def test_a_token_that_pads_is_a_token_like_others(tmp_path: Path) -> None:
    model = make_model("gpt2", tmp_path)
    tokens = [2, 5, 2]
    expected = top_logprobs(model, tokens, 4)
    remove_host_reads(model)
    assert model.config.pad_token_id is None
    assert (top_logprobs(model, tokens, 4).values == expected.values).all()
