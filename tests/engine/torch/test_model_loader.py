"""Weights in the formats that model directories have, and what is said when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.config.errors import ConfigError
from tests.engine.torch.harness import generate, make_engine, make_model, next_logprobs, run_all, submit

PROMPT = [5, 9, 200, 17]
WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def llama(tmp_path: Path) -> transformers.PreTrainedModel:
    return make_model("llama", tmp_path)


def tokens(directory: Path, **options: object) -> list[int]:
    return run_all(make_engine(directory, **options), [submit(0, PROMPT, max_tokens=8)])[0].tokens


def test_sharded_weights_are_those_of_one_file(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).unlink()
    llama.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert tokens(tmp_path, load_format="safetensors") == generate(llama, PROMPT, 8)
    sorted(tmp_path.glob("model-*"))[1].unlink()
    with pytest.raises(ConfigError, match=r"cannot read the weights: .*model-00002-of-"):
        make_engine(tmp_path)


def test_pytorch_files_are_read_unless_excluded(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).unlink()
    torch.save(llama.state_dict(), tmp_path / "pytorch_model.bin")
    assert tokens(tmp_path) == generate(llama, PROMPT, 8)
    with pytest.raises(ConfigError, match=r"no file named model\.safetensors"):
        make_engine(tmp_path, load_format="safetensors")


def test_dummy_weights_need_no_file_and_follow_the_seed(
    llama: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match="no file named"):
        make_engine(tmp_path)
    first, again, other = (tokens(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert make_engine(tmp_path, load_format="dummy").info.vocab_size == llama.config.vocab_size


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_keeps_its_cache_in_it(
    llama: transformers.PreTrainedModel, tmp_path: Path, dtype: str
) -> None:
    engine = make_engine(tmp_path, dtype=dtype, kv_cache_memory=1 << 20)
    assert engine.info.dtype == dtype
    single = make_engine(tmp_path, dtype="float32", kv_cache_memory=1 << 20)
    assert engine.info.kv_cache_tokens > 1.9 * single.info.kv_cache_tokens
    exact = llama.to(getattr(torch, dtype))
    outcome = run_all(engine, [submit(0, PROMPT, max_tokens=1, logprobs=1)])[0]
    expected = next_logprobs(exact, PROMPT)[-1]
    assert outcome.logprobs[0][1][1] == pytest.approx(float(expected.max()), abs=0.05)


@pytest.mark.parametrize("case", ["missing", "reshaped", "garbage"])
def test_wrong_weights_are_named(llama: transformers.PreTrainedModel, tmp_path: Path, case: str) -> None:
    weights = load_file(tmp_path / WEIGHTS)
    if case == "missing":
        del weights[UP]
        message = rf"no weights for \(1\): {UP}"
    elif case == "reshaped":
        weights[UP] = weights[UP][:10].contiguous()
        message = rf"another shape .* \(1\): {UP} is \[10, 32\], not \[64, 32\]"
    else:
        message = "cannot read the weights: .*header"
    save_file(weights, tmp_path / WEIGHTS, metadata={"format": "pt"})
    if case == "garbage":
        (tmp_path / WEIGHTS).write_bytes(b"garbage" * 100)
    with pytest.raises(ConfigError, match=message):
        make_engine(tmp_path)


def test_a_field_of_the_wrong_type_is_named(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": "little"'))
    with pytest.raises(ConfigError, match=r"config\.json: .*'rms_norm_eps' expected float"):
        make_engine(tmp_path)
