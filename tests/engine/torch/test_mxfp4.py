"""GPT-OSS as it is released: experts in MXFP4, which are unpacked when they are loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.config.errors import ConfigError
from penstock.engine.torch.supported_models import check_supported
from penstock.wire.weights.desired import WeightSource
from tests.engine.torch.harness import VOCAB, generate, make_engine, make_model, run_all, submit

TOKENS = 12
GROUP = 32
"""Numbers that share a scale."""
NUMBERS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""By their four bits: OCP Microscaling Formats (MX) Specification 1.0, E2M1."""


def packed(shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks and scales of random experts [experts, in, out], as released; and what they mean."""
    experts, rows, columns = shape
    bits = torch.randint(0, 16, (experts, columns, rows // GROUP, GROUP), dtype=torch.uint8)
    scales = torch.randint(122, 126, (experts, columns, rows // GROUP), dtype=torch.uint8)
    numbers = NUMBERS[bits.long()] * torch.exp2(scales.float() - 127)[..., None]
    blocks = bits[..., ::2] | bits[..., 1::2] << 4
    return blocks, scales, numbers.reshape(experts, columns, rows).transpose(1, 2)


def release(directory: Path) -> transformers.PreTrainedModel:
    """The files of a tiny GPT-OSS with packed experts, and what they mean."""
    model = make_model("gpt_oss", directory, hidden_size=64)
    path, stored = directory / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"], numbers = packed(tensor.shape)
            model.get_parameter(name).data.copy_(numbers)
        else:
            stored[name] = tensor.bfloat16()
            model.get_parameter(name).data.copy_(stored[name])
    save_file(stored, path)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return model


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    directory = tmp_path_factory.mktemp("gpt_oss")
    return directory, release(directory)


def test_tokens_are_those_of_the_numbers(released: tuple[Path, transformers.PreTrainedModel]) -> None:
    directory, model = released
    prompt = np.random.default_rng(1).integers(3, VOCAB, size=70).tolist()
    engine = make_engine(directory, max_num_batched_tokens=64)
    assert run_all(engine, [submit(0, prompt, max_tokens=TOKENS)])[0].tokens == generate(
        model, prompt, TOKENS
    )


def test_random_weights_have_no_need_to_be_unpacked(
    released: tuple[Path, transformers.PreTrainedModel],
) -> None:
    engine = make_engine(released[0], load_format="dummy")
    assert len(run_all(engine, [submit(0, [5], max_tokens=2, ignore_eos=True)])[0].tokens) == 2


def test_other_weights_are_taken_and_those_of_the_start_not_again(
    released: tuple[Path, transformers.PreTrainedModel], tmp_path: Path
) -> None:
    directory, model = released
    engine = make_engine(directory)
    with pytest.raises(
        ValueError, match="cannot be read again: they are in no safetensors file, or quantized"
    ):
        engine.weights.plan([])
    model.save_pretrained(tmp_path)
    plan = engine.weights.plan([WeightSource(str(tmp_path))])
    before = engine.weights.checksum()
    engine.weights.load(plan, drop_cache=True, in_step=False, tick=lambda: None)
    assert engine.weights.checksum() == before


@pytest.mark.parametrize(("kind", "method"), [("gpt_oss", "awq"), ("llama", "mxfp4")])
def test_other_quantized_weights_are_refused(tmp_path: Path, kind: str, method: str) -> None:
    config = {"model_type": kind, "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"quantized \({method}\)"):
        check_supported(tmp_path)
