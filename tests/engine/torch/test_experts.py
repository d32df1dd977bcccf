"""All experts computing all tokens give what grouped products give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.engine.torch import experts, model_loader
from penstock.engine.torch.supported_models import WITH_EXPERTS
from tests.engine.torch.harness import VOCAB, generate, make_engine, make_model, run_all, submit


@pytest.mark.gpu
@pytest.mark.parametrize("kind", sorted(WITH_EXPERTS))
def test_all_experts_give_the_tokens_of_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(experts, "FEW_TOKENS", 30)
    asked: list[str] = []

    def as_on_a_device(dtype: torch.dtype, device: torch.device) -> str:
        asked.append(experts.pick_experts(torch.bfloat16, torch.device("cuda")))
        return asked[-1]

    monkeypatch.setattr(model_loader, "pick_experts", as_on_a_device)
    model = make_model(kind, tmp_path)
    prompts = [
        np.random.default_rng(length).integers(3, VOCAB, size=length).tolist() for length in (3, 29, 80)
    ]
    requests = [submit(stream, prompt, max_tokens=12) for stream, prompt in enumerate(prompts)]
    outcomes = run_all(make_engine(tmp_path), requests)
    assert asked == [experts.ALL_EXPERTS]
    for stream, prompt in enumerate(prompts):
        assert outcomes[stream].tokens == generate(model, prompt, 12)


@pytest.mark.parametrize(
    ("dtype", "capability", "name"),
    [
        (torch.bfloat16, (9, 0), experts.GROUPED),
        (torch.bfloat16, (10, 0), experts.GROUPED),
        (torch.bfloat16, (8, 9), experts.ALL_EXPERTS),
        (torch.bfloat16, (12, 0), experts.ALL_EXPERTS),
        (torch.float16, (9, 0), experts.ALL_EXPERTS),
        (torch.float32, (9, 0), experts.ALL_EXPERTS),
    ],
)
def test_grouped_products_where_a_gpu_has_kernels(
    dtype: torch.dtype, capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert experts.pick_experts(dtype, torch.device("cuda")) == name
    assert experts.pick_experts(dtype, torch.device("cpu")) == experts.GROUPED


def test_an_overflow_of_an_expert_that_is_not_asked_means_nothing() -> None:
    class Layer:
        num_experts = 2
        is_transposed = has_bias = False
        gate_up_proj = torch.ones(2, 4, 3)
        down_proj = torch.ones(2, 3, 2)

        def _apply_gate(self, inner: torch.Tensor) -> torch.Tensor:
            gate, up = inner.chunk(2, -1)
            return gate * up

    layer = Layer()
    layer.down_proj[1] = torch.inf
    index, weights = torch.zeros((5, 1), dtype=torch.int64), torch.ones(5, 1)
    assert experts._all_experts(layer, torch.ones(5, 3), index, weights).isfinite().all()
