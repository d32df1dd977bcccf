"""Vectors and labels of decoders against transformers, alone, in batches, and beside text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.pooling.description import describe_pooling
from penstock.engine.pooling.model import PoolingBatch, PoolingGroup
from penstock.engine.torch.pooling.decoders import beside
from penstock.engine.torch.pooling.loader import load_pooling_model
from penstock.engine.torch.pooling.torch_pooling_model import TorchPoolingModel
from penstock.wire.arrays import F32
from penstock.wire.messages import SamplingParams, Submit
from penstock.wire.pooling import PoolingParams, PoolingTask
from tests.engine.pooling.support import vectors_of
from tests.engine.torch.harness import (
    DEVICE,
    VOCAB,
    Driver,
    Outcome,
    generate,
    make_engine,
    make_model,
    submit,
)

LENGTHS = [70, 1, 23, 23, 2, 40]
TEXTS = [np.random.default_rng(length).integers(3, VOCAB, size=length).astype(np.int32) for length in LENGTHS]
ST = "sentence_transformers.models."


def load(directory: Path, **options: Any) -> TorchPoolingModel:
    config = ServeConfig(model=str(directory), device=DEVICE.type, threads=1, max_num_seqs=8, **options)
    description = describe_pooling(directory, config.runner)
    assert description is not None
    return load_pooling_model(config, str(directory), description, lambda text, fraction: None)


def compute(model: TorchPoolingModel, texts: Sequence[Any], **params: Any) -> F32:
    lengths = np.array([len(text) for text in texts], np.int32)
    asked = PoolingParams(lengths=lengths.tobytes(), **{"task": model.info.tasks[0], **params})
    batch = PoolingBatch(
        np.concatenate(texts), lengths, np.zeros_like(lengths), [PoolingGroup(asked, len(texts))]
    )
    return model.compute(batch)[0]


def states_of(model: Any, text: Any) -> torch.Tensor:
    """[T, H], by transformers."""
    with torch.no_grad():
        output = model.base_model(torch.from_numpy(text.astype(np.int64))[None].to(model.device))
    states: torch.Tensor = output.last_hidden_state[0].cpu()
    return states


def write_modules(directory: Path, *modules: tuple[str, str, dict[str, Any]]) -> None:
    listed = [{"path": "", "type": f"{ST}Transformer"}]
    for name, path, config in modules:
        listed.append({"path": path, "type": ST + name})
        (directory / path).mkdir(exist_ok=True)
        (directory / path / "config.json").write_text(json.dumps(config))
    (directory / "modules.json").write_text(json.dumps(listed))


def assert_alike(found: F32, expected: torch.Tensor | F32) -> None:
    """Alone, and as a whole: the cosine within 1e-5 of 1, and the same length."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    lengths = np.linalg.norm(found, axis=-1), np.linalg.norm(expected, axis=-1)
    assert ((found * expected).sum(-1) / lengths[0] / lengths[1]).min() > 1 - 1e-5
    np.testing.assert_allclose(lengths[0], lengths[1], rtol=1e-4)


@pytest.mark.parametrize("kind", ["gemma2", "mistral", "qwen3"])
def test_the_last_token_is_the_vector(kind: str, tmp_path: Path) -> None:
    reference = make_model(kind, tmp_path)
    reference.set_attn_implementation("eager")
    write_modules(
        tmp_path,
        ("Pooling", "1_Pooling", {"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}),
        ("Normalize", "2_Normalize", {}),
    )
    model = load(tmp_path)
    expected = torch.stack([states_of(reference, text)[-1] for text in TEXTS])
    assert_alike(compute(model, TEXTS, normalize=False), expected)
    for text, vector in zip(TEXTS, expected, strict=True):
        assert_alike(compute(model, [text]), torch.nn.functional.normalize(vector, dim=0)[None])
    cut = compute(model, TEXTS, dimensions=8)
    assert_alike(cut, torch.nn.functional.normalize(expected[:, :8]))
    tokens = compute(model, TEXTS, task=PoolingTask.TOKEN_EMBED, normalize=False)
    assert_alike(tokens, torch.cat([states_of(reference, text) for text in TEXTS]))


def test_a_plain_model_of_text_and_one_without_its_output_layer(tmp_path: Path) -> None:
    reference = make_model("llama", tmp_path)
    expected = torch.stack([states_of(reference, text)[-1] for text in TEXTS])
    assert_alike(compute(load(tmp_path, runner="pooling"), TEXTS, normalize=False), expected)
    reference.base_model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaModel"]
    assert_alike(compute(load(tmp_path), TEXTS, normalize=False), expected)


def test_a_mean_and_a_dense_head(tmp_path: Path) -> None:
    reference = make_model("llama", tmp_path)
    hidden = reference.config.hidden_size
    write_modules(
        tmp_path,
        ("Pooling", "1_Pooling", {"pooling_mode_mean_tokens": True}),
        (
            "Dense",
            "2_Dense",
            {
                "in_features": hidden,
                "out_features": 12,
                "bias": False,
                "activation_function": "torch.nn.modules.linear.Identity",
            },
        ),
    )
    weight = torch.randn(12, hidden, generator=torch.Generator().manual_seed(1))
    save_file({"linear.weight": weight}, tmp_path / "2_Dense" / "model.safetensors")
    model = load(tmp_path)
    assert model.info.width == 12
    expected = torch.stack([states_of(reference, text).mean(0) @ weight.T for text in TEXTS])
    assert_alike(compute(model, TEXTS, normalize=False), expected)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen2"])
def test_a_classifier(kind: str, labels: int, tmp_path: Path) -> None:
    config = make_model(kind, tmp_path).config
    config.num_labels, config.pad_token_id = labels, 0
    torch.manual_seed(1)
    reference = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    (tmp_path / "model.safetensors").unlink()
    reference.save_pretrained(tmp_path)
    logits = []
    for text in TEXTS:
        with torch.inference_mode():
            logits.append(reference(torch.from_numpy(text.astype(np.int64))[None]).logits[0])
    expected = torch.stack(logits)
    model = load(tmp_path)
    assert (model.info.tasks, model.info.labels, model.info.width) == ((PoolingTask.CLASSIFY,), labels, 0)
    np.testing.assert_allclose(compute(model, TEXTS, activate=False), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(compute(model, TEXTS[:1], activate=False), expected[:1], rtol=1e-4, atol=1e-5)
    likely = torch.sigmoid(expected) if labels == 1 else torch.softmax(expected, -1)
    np.testing.assert_allclose(compute(model, TEXTS), likely, rtol=1e-4, atol=1e-5)


def test_a_classifier_of_tokens(tmp_path: Path) -> None:
    config = make_model("qwen2", tmp_path).config
    config.num_labels = 4
    torch.manual_seed(1)
    reference = transformers.AutoModelForTokenClassification.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = reference(torch.from_numpy(TEXTS[0].astype(np.int64))[None]).logits[0]
    found = compute(load(tmp_path), TEXTS[:3], activate=False)
    np.testing.assert_allclose(found[: LENGTHS[0]], expected, rtol=1e-4, atol=1e-5)


def test_a_score_by_the_logits_of_two_tokens(tmp_path: Path) -> None:
    reference = make_model("qwen2", tmp_path)
    write_modules(tmp_path, ("LogitScore", "1_LogitScore", {"true_token_id": 7, "false_token_id": 9}))
    logits = torch.stack(
        [reference.get_output_embeddings()(states_of(reference, text)[-1]) for text in TEXTS]
    ).detach()
    found = compute(load(tmp_path), TEXTS, activate=False)
    np.testing.assert_allclose(found[:, 0], logits[:, 7] - logits[:, 9], rtol=1e-4, atol=1e-5)


def test_a_type_that_transformers_has_no_classifier_of_is_named(tmp_path: Path) -> None:
    make_model("cohere", tmp_path)
    path = tmp_path / "config.json"
    described = json.loads(path.read_text()) | {"architectures": ["CohereForSequenceClassification"]}
    path.write_text(json.dumps(described))
    with pytest.raises(ConfigError, match="no AutoModelForSequenceClassification of model_type 'cohere'"):
        load(tmp_path)


def pooling(stream: int, texts: Sequence[Any], **params: Any) -> Submit:
    lengths = np.array([len(text) for text in texts], "<i4").tobytes()
    asked = PoolingParams(lengths=lengths, **{"task": PoolingTask.EMBED, "normalize": False, **params})
    ids = np.concatenate(texts).astype("<i4").tobytes()
    return Submit(stream, ids, SamplingParams(max_tokens=len(texts), seed=0), pooling=asked)


def test_text_and_vectors_by_the_same_weights(tmp_path: Path) -> None:
    reference = make_model("llama", tmp_path)
    prompts = [text.tolist() for text in TEXTS[:3]]
    text = make_engine(tmp_path, max_num_batched_tokens=64, max_num_seqs=8, runner="both")
    description = describe_pooling(tmp_path, "both")
    assert description is not None
    loaded = sum(each.nbytes for each in (text.model.parameters or {}).values())
    config = ServeConfig(model=str(tmp_path), max_num_batched_tokens=64, max_num_seqs=8, runner="both")
    engine = beside(config, text, description, str(tmp_path))
    assert sum(each.nbytes for each in (text.model.parameters or {}).values()) == loaded
    assert engine.info.pooling is not None
    assert (engine.info.pooling.max_tokens, engine.info.max_model_len) == (64, text.info.max_model_len)

    driver = Driver(text)
    steps = []
    for stream, prompt in enumerate(prompts):
        driver.outcomes[stream] = Outcome()
        engine.submit(0, submit(stream, prompt, max_tokens=12))
    expected = torch.stack([states_of(reference, each)[-1] for each in TEXTS[1:]])
    for stream in (10, 11):
        engine.submit(0, pooling(stream, TEXTS[1:] * 5))
    while engine.has_work():
        rows = engine.step()
        steps.append(rows)
        if rows.vectors is None:
            driver.take(rows)
    for stream, prompt in enumerate(prompts):
        assert driver.outcomes[stream].tokens == generate(reference, prompt, 12)
    for stream in (10, 11):
        assert_alike(vectors_of(steps, stream), expected.repeat(5, 1))
    assert [rows.vectors is None for rows in steps[:6]] == [True, False] * 3

    for level in (1, 2):
        engine.call("sleep", {"level": level})
        engine.call("wake_up", {})
        engine.submit(0, pooling(12, TEXTS[1:]))
        steps = []
        while engine.has_work():
            steps.append(engine.step())
        assert_alike(vectors_of(steps, 12), expected)


def test_a_decoder_whose_tokens_attend_to_those_behind_them(tmp_path: Path) -> None:
    """EmbeddingGemma: windows in both directions, a mean, and dense heads. Texts are longer than a window."""
    config = make_model("gemma3_text", tmp_path).config
    described = config.to_dict() | {"use_bidirectional_attention": True, "sliding_window": 24}
    config = type(config)(**described)
    torch.manual_seed(1)
    reference = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    (tmp_path / "model.safetensors").unlink()
    reference.save_pretrained(tmp_path)
    write_modules(
        tmp_path,
        ("Pooling", "1_Pooling", {"pooling_mode_mean_tokens": True}),
        ("Normalize", "2_Normalize", {}),
    )
    expected = torch.stack([states_of(reference, text).mean(0) for text in TEXTS])
    assert_alike(compute(load(tmp_path), TEXTS, normalize=False), expected)
