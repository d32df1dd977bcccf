"""Every supported family against transformers: prompts in chunks, decodes over the paged cache."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file

from penstock.config.errors import ConfigError
from penstock.engine.model_length import length_field
from penstock.engine.pooling.description import Runner
from penstock.engine.pooling.supported_encoders import SUPPORTED_ENCODERS
from penstock.engine.refused_models import REFUSED_MODELS
from penstock.engine.torch.memory import bytes_per_token
from penstock.engine.torch.model_loader import read_shape
from penstock.engine.torch.supported_models import SUPPORTED_MODELS as SUPPORTED
from penstock.engine.torch.supported_models import check_supported
from penstock.engine.vocabulary import read_max_model_len
from penstock.generation.parsers.formats import MODEL_TYPES
from penstock.generation.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from tests.engine.torch import harness
from tests.engine.torch.harness import (
    VOCAB,
    Driver,
    generate,
    make_engine,
    make_model,
    run_all,
    submit,
    top_logprobs,
)
from tests.model_table import PAGE, read_encoders, read_models

TOKENS = 12
SHARED = 32
"""Tokens with which two prompts begin."""


def prompts() -> list[list[int]]:
    """Shorter and longer than a chunk of 64 tokens and than a window of 24; two begin alike."""
    random = np.random.default_rng(1)
    made = [random.integers(3, VOCAB, size=length).tolist() for length in (1, 23, 70, 90)]
    made[3][:SHARED] = made[2][:SHARED]
    return made


@pytest.mark.parametrize("kind", sorted(SUPPORTED))
def test_tokens_and_logprobs_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Over a cache in which streams share blocks, and from which all are dropped and resumed."""
    model = make_model(kind, tmp_path)
    model.set_attn_implementation("eager")  # transformers' faster ones lack soft caps in some versions
    engine = make_engine(tmp_path, max_num_batched_tokens=64)
    driver = Driver(engine)
    for stream, prompt in enumerate(prompts()):
        driver.submit(submit(stream, prompt, max_tokens=TOKENS, logprobs=5))
    for _ in range(5):
        driver.step()
    engine._scheduler.preempt_all()
    outcomes = driver.run()
    for stream, prompt in enumerate(prompts()):
        outcome = outcomes[stream]
        assert outcome.tokens == generate(model, prompt, TOKENS)
        values, ids = top_logprobs(model, prompt + outcome.tokens[:-1], 5)
        for step, (got_ids, got_values, _) in enumerate(outcome.logprobs):
            place = len(prompt) - 1 + step
            np.testing.assert_allclose(got_values[1:], values[place], rtol=1e-3, atol=2e-4)
            assert got_ids[1] == ids[place, 0]
    metrics = engine.metrics()
    assert metrics["preemptions_total"] > 0
    assert metrics["prefix_cache_hits_total"] >= SHARED


def test_the_models_made_here_are_of_all_families() -> None:
    assert set(harness.FAMILIES) == set(SUPPORTED)


@pytest.mark.skipif(not PAGE.exists(), reason="an installation without the documentation")
def test_the_page_says_what_runs_each_model() -> None:
    models = read_models()
    assert {kind: each.name for kind, each in models.items() if each.torch.startswith("yes")} == SUPPORTED
    for kind, model in models.items():
        refusal = REFUSED_MODELS.get(kind)
        if refusal is not None:
            assert model.torch.removeprefix("no: ") in refusal.why, kind
            assert refusal.vllm == (model.vllm == "yes"), kind
        else:
            assert model.torch == "no" or kind in SUPPORTED, kind
        by_type = MODEL_TYPES.get(kind, ("", ""))
        for names, known, named in zip(
            model.formats(), (TOOL_PARSERS, REASONING_PARSERS), by_type, strict=True
        ):
            assert names <= set(known), kind
            assert not named or named in names, kind
    claimed = re.search(r"more than (\d+) architectures", (PAGE.parents[1] / "README.md").read_text())
    assert claimed is not None
    assert int(claimed[1]) < len(SUPPORTED) <= int(claimed[1]) + 10


@pytest.mark.skipif(not PAGE.exists(), reason="an installation without the documentation")
def test_the_page_says_which_encoders_run() -> None:
    encoders = read_encoders()
    assert {kind: name for kind, (name, runs) in encoders.items() if runs == "yes"} == SUPPORTED_ENCODERS
    for kind, (_, runs) in encoders.items():
        assert kind in SUPPORTED_ENCODERS or runs.removeprefix("no: ") in REFUSED_MODELS[kind].why, kind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "mamba"}', r"'mamba' is not supported .*: layers of it keep a recurrent state"),
        ('{"model_type": "never"}', r"'never' is not supported by the torch engine: it runs .*llama"),
        ('{"model_type": "qwen3_vl"}', r"'qwen3_vl' is not supported .*: it takes images or sound"),
        ('{"model_type": "bert"}', "bert makes vectors or labels; 'generate' of --runner asks for"),
        ('{"model_type": "deberta-v2"}', r"'deberta-v2' is not supported .*: its attention has a part for"),
        ('{"model_type": "longformer"}', r"'longformer' is not supported .*: its attention leaves out"),
        ('{"model_type": "siglip"}', r"'siglip' is not supported .*: it is an encoder of images"),
        ('{"model_type": "t5"}', r"'t5' is not supported .*: it is an encoder with a decoder"),
        (
            '{"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}',
            "Qwen3ForSequenceClassification makes vectors or labels; 'generate' of --runner",
        ),
        (
            '{"model_type": "gemma3_text", "use_bidirectional_attention": true}',
            "gemma3_text makes vectors or labels; 'generate'",
        ),
        ('{"hidden_size": 8}', "states no model_type"),
        ("[]", "states no model_type"),
        ("{", "config.json: .*line 1"),
        (
            '{"model_type": "qwen3", "quantization_config": {"quant_method": "awq", "bits": 4}}',
            r"quantized \(awq\), which the torch engine does not run",
        ),
        ('{"model_type": "qwen3", "quantization_config": "x"}', "quantized, which the torch engine"),
        ('{"model_type": "gemma3"}', "'gemma3' has no text_config"),
        (
            '{"model_type": "gemma3", "text_config": {"model_type": "mamba"}}',
            "text_config: model_type 'mamba' is not supported by the torch engine: layers of it keep",
        ),
        (
            '{"model_type": "gemma3", "text_config": {}, "quantization_config": {"quant_method": "gptq"}}',
            r"quantized \(gptq\)",
        ),
    ],
)
def test_what_is_no_supported_architecture_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        check_supported(tmp_path)
    with pytest.raises(ConfigError, match=message):
        make_engine(tmp_path)


@pytest.mark.parametrize(
    ("text", "runner"),
    [
        ('{"model_type": "bert"}', "auto"),
        (
            '{"model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"]}',
            "pooling",
        ),
        ('{"model_type": "qwen3", "architectures": ["Qwen3ForSequenceClassification"]}', "auto"),
        ('{"model_type": "gemma3_text", "use_bidirectional_attention": true}', "auto"),
        ('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}', "both"),
        ('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}', "auto"),
    ],
)
def test_what_makes_vectors_is_supported_for_its_runner(tmp_path: Path, text: str, runner: Runner) -> None:
    (tmp_path / "config.json").write_text(text[:-1] + ', "hidden_size": 8}')
    check_supported(tmp_path, runner=runner)
    if runner == "pooling" or "CausalLM" not in text:
        with pytest.raises(ConfigError, match="--enable-expert-parallel"):
            check_supported(tmp_path, runner=runner, with_experts=True)


def test_bidirectional_attention_that_is_a_models_own_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "hidden_size": 8, "is_causal": false}')
    with pytest.raises(
        ConfigError, match="is_causal is False; of decoders the torch engine runs gemma3_text"
    ):
        check_supported(tmp_path, runner="auto")


def test_a_text_part_is_read_under_either_name(tmp_path: Path) -> None:
    """Those of the release, which transformers writes, and those that its models have."""
    model = make_model("gemma3", tmp_path, tie_word_embeddings=False)
    path, prompt = tmp_path / "model.safetensors", prompts()[1]
    expected = generate(model, prompt, TOKENS)
    tensors = load_file(path)
    assert {"language_model.model.norm.weight", "language_model.lm_head.weight"} < tensors.keys()
    assert run_all(make_engine(tmp_path), [submit(0, prompt, max_tokens=TOKENS)])[0].tokens == expected
    save_file(model.state_dict(), path)
    assert "model.language_model.norm.weight" in load_file(path)
    assert run_all(make_engine(tmp_path), [submit(0, prompt, max_tokens=TOKENS)])[0].tokens == expected


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_files_as_qwen_releases_them(kind: str, tmp_path: Path) -> None:
    """The text part's fields are among the model's, and its layers have no prefix; also without pictures."""
    model = make_model(kind, tmp_path)
    path, prompt = tmp_path / "config.json", prompts()[1]
    described = json.loads(path.read_text())
    text = described.pop("text_config")
    rope = text.pop("rope_parameters")
    described = text | described | {"rope_theta": rope["rope_theta"]}
    described["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    path.write_text(json.dumps(described))
    assert {"model.norm.weight", "visual.merger.mlp.0.weight"} < load_file(
        tmp_path / "model.safetensors"
    ).keys()
    engine = make_engine(tmp_path, language_model_only=True)
    assert run_all(engine, [submit(0, prompt, max_tokens=TOKENS)])[0].tokens == generate(
        model, prompt, TOKENS
    )


def test_random_weights_of_a_text_part(tmp_path: Path) -> None:
    make_model("gemma3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    engine = make_engine(tmp_path, load_format="dummy")
    assert run_all(engine, [submit(0, [5], max_tokens=2, ignore_eos=True)])[0].tokens
    assert engine.info.max_model_len == 1024


def test_layers_of_gemma_4_cache_heads_of_their_own_or_none(tmp_path: Path) -> None:
    make_model("gemma4", tmp_path)
    shape = read_shape(str(tmp_path))
    assert [shape.cached(layer) for layer in range(4)] == [(2, 8, 8), (2, 16, 16)] * 2
    assert shape.reused == {2: 0, 3: 1}
    assert bytes_per_token(shape, torch.float32) == 4 * 2 * (2 * 8 + 2 * 16)
    make_model("gemma4_text", tmp_path)
    shape = read_shape(str(tmp_path))
    assert bytes_per_token(shape, torch.float32) == 4 * 2 * (2 * 8 + 1 * 16)


WITHOUT_LENGTH = {"bloom", "cpmant", "falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "xlnet", "xlstm"}
"""model_types of transformers whose positions have no maximum."""
ASSISTANTS = {"gemma4_assistant", "gemma4_unified_assistant"}
"""model_types of drafts, which have the length of the model that they draft for."""


def test_no_family_is_refused() -> None:
    assert not REFUSED_MODELS.keys() & {*SUPPORTED, *SUPPORTED_ENCODERS}


def test_the_length_of_every_family_is_read(tmp_path: Path) -> None:
    for kind in SUPPORTED:
        make_model(kind, tmp_path / kind, max_position_embeddings=384)
        assert read_shape(str(tmp_path / kind)).max_positions == 384, kind
        assert read_max_model_len(tmp_path / kind) == 384, kind


def test_every_causal_model_of_transformers_states_its_length_under_a_known_name() -> None:
    unknown, read = set(), 0
    for config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            config = config_class()
        except StrictDataclassError:  # its own defaults are not valid
            continue
        read += 1
        if length_field(config.get_text_config(decoder=True).to_dict()) is None:
            unknown.add(config.model_type)
    assert unknown <= WITHOUT_LENGTH | ASSISTANTS
    assert read > 100


def test_a_stretched_rope_is_served_to_its_stretched_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    make_model("qwen2", tmp_path, rope_parameters=rope)
    assert make_engine(tmp_path).info.max_model_len == 4096


def test_a_rope_that_depends_on_the_batch_is_served_to_its_original_length(tmp_path: Path) -> None:
    factors = [1.0] * 4
    make_model(
        "phi3",
        tmp_path,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": factors,
            "long_factor": factors,
        },
        original_max_position_embeddings=256,
    )
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 1024
    assert make_engine(tmp_path).info.max_model_len == 256
    with pytest.raises(ConfigError, match=r"--max-model-len 512: .* at most 256"):
        make_engine(tmp_path, max_model_len=512)


@pytest.mark.parametrize("size", [0, -1, 10**12, "many", [64], 1.5, True])
@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"])
def test_sizes_are_checked_before_anything_is_made_of_them(tmp_path: Path, name: str, size: object) -> None:
    text = {"model_type": "llama4_text", name: size}
    for described in (
        {"model_type": "qwen3", name: size},
        {"model_type": "llama4", "text_config": text},
    ):
        (tmp_path / "config.json").write_text(json.dumps(described))
        with pytest.raises(ConfigError, match=f"{name} is {re.escape(repr(size))}, it has to be an integer"):
            check_supported(tmp_path)


def test_a_configuration_of_which_no_model_can_be_made_is_named(tmp_path: Path) -> None:
    described = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "head_dim": "x"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_shape(str(tmp_path))
