"""The hidden states of whole texts, against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.config.serve import ServeConfig
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_loader import read_shape
from penstock.engine.torch.pooling.decoder_states import DecoderStates
from penstock.engine.torch.pooling.packed_inputs import PackedInputs
from tests.engine.torch.harness import DEVICE, VOCAB, make_model

LENGTHS = np.array([1, 2, 23, 70, 90], np.int32)


@pytest.mark.parametrize(
    "kind",
    ["bloom", "deepseek_v2", "gemma2", "gemma3", "gemma4_text", "gpt2", "gpt_oss", "llama4_text", "qwen3"],
)
def test_states_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Alone and beside others; with windows, soft caps, sinks, ALiBi, latent attention and shared layers."""
    model = make_model(kind, tmp_path)
    model.set_attn_implementation("eager")
    layers = model.base_model if model.base_model is not model else model.model
    config = ServeConfig(model=str(tmp_path), max_num_seqs=8)
    paged = PagedModel(
        str(tmp_path), config, read_shape(str(tmp_path)), dtype=torch.float32, device=DEVICE, head="none"
    )
    states = DecoderStates(paged, texts=8, tokens=256, block_size=16, device=DEVICE)
    random = np.random.default_rng(1)
    ids = random.integers(3, VOCAB, size=int(LENGTHS.sum())).astype(np.int32)
    for _ in range(2):  # the pages are used again
        found = states.compute(ids, PackedInputs(LENGTHS, DEVICE), np.zeros_like(LENGTHS)).cpu()
        ends = np.cumsum(LENGTHS)
        for end, length in zip(ends.tolist(), LENGTHS.tolist(), strict=True):
            text = torch.from_numpy(ids[end - length : end].astype(np.int64))[None]
            with torch.inference_mode():
                output = layers(text.to(model.device))
            torch.testing.assert_close(
                found[end - length : end], output.last_hidden_state[0].cpu(), rtol=1e-4, atol=1e-4
            )
