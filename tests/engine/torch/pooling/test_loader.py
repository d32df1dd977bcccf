"""Vectors, scores and labels of encoders, against transformers' own forward pass of each text by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.pooling.description import describe_pooling
from penstock.engine.torch.pooling.loader import load_pooling_model
from penstock.engine.torch.pooling.torch_pooling_model import TorchPoolingModel
from penstock.wire.pooling import PoolingTask
from tests.engine.torch.harness import DEVICE
from tests.engine.torch.pooling.families import SIZES, batch, group, make_encoder, outputs, texts

LENGTHS = [3, 40, 1, 40, 9, 3, 70, 40]


def load(directory: Path, **options: Any) -> TorchPoolingModel:
    config = ServeConfig(model=str(directory), device=DEVICE.type, **options)  # type: ignore[arg-type]
    description = describe_pooling(directory)
    assert description is not None
    return load_pooling_model(config, str(directory), description, lambda *_: None)


def assert_near(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(found), expected.float(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", SIZES)
def test_vectors_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    plain = make_encoder(kind, tmp_path)
    ids, lengths = texts(LENGTHS)
    model = load(tmp_path)
    [found] = model.compute(batch(ids, lengths))
    states = [output.last_hidden_state[0] for output in outputs(plain, ids, lengths)]
    expected = torch.nn.functional.normalize(torch.stack([each.mean(0) for each in states]), dim=-1)
    assert_near(found, expected)
    [alone] = model.compute(batch(ids[3:43], lengths[1:2]))
    assert_near(alone[0], torch.from_numpy(found[1]))


@pytest.mark.parametrize("kind", SIZES)
def test_scores_of_pairs_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    with_types = kind in ("albert", "bert", "electra", "nomic_bert")
    plain = make_encoder(kind, tmp_path, "AutoModelForSequenceClassification", num_labels=1)
    ids, lengths = texts(LENGTHS)
    seconds = [2, 17, 0, 20, 4, 1, 30, 1]
    model = load(tmp_path)
    classify = group(PoolingTask.CLASSIFY, 3), group(PoolingTask.CLASSIFY, 5, activate=False)
    found, raw = model.compute(batch(ids, lengths, *classify, seconds=seconds))
    logits = torch.cat([each.logits for each in outputs(plain, ids, lengths, seconds if with_types else ())])
    assert_near(found, logits[:3].sigmoid())
    assert_near(raw, logits[3:])


def test_labels_of_texts_and_tokens(tmp_path: Path) -> None:
    ids, lengths = texts(LENGTHS)
    labels = {"num_labels": 3, "classifier_pooling": "mean"}
    for name, task in (("Sequence", PoolingTask.CLASSIFY), ("Token", PoolingTask.TOKEN_CLASSIFY)):
        plain = make_encoder("modernbert", tmp_path / name, f"AutoModelFor{name}Classification", **labels)
        model = load(tmp_path / name)
        assert (model.info.tasks, model.info.labels) == ((task,), 3)
        [found] = model.compute(batch(ids, lengths, group(task, len(lengths))))
        logits = [each.logits.view(-1, 3) for each in outputs(plain, ids, lengths)]
        assert_near(found, torch.cat(logits).softmax(-1))


def test_a_batch_of_several_requests(tmp_path: Path) -> None:
    """Vectors and those of tokens, cut and whole, with the length 1 and without; in the order of inputs."""
    plain = make_encoder("bert", tmp_path)
    ids, lengths = texts(LENGTHS)
    found = load(tmp_path).compute(
        batch(
            ids,
            lengths,
            group(PoolingTask.EMBED, 2, normalize=False),
            group(PoolingTask.TOKEN_EMBED, 3, dimensions=8),
            group(PoolingTask.EMBED, 2, dimensions=8),
            group(PoolingTask.TOKEN_EMBED, 1, normalize=False),
        )
    )
    states = [output.last_hidden_state[0] for output in outputs(plain, ids, lengths)]
    normal = torch.nn.functional.normalize
    assert_near(found[0], torch.stack([each.mean(0) for each in states[:2]]))
    assert_near(found[1], normal(torch.cat(states[2:5])[:, :8], dim=-1))
    assert_near(found[2], normal(torch.stack([each.mean(0)[:8] for each in states[5:7]]), dim=-1))
    assert_near(found[3], states[7])


def test_the_modules_of_a_directory(tmp_path: Path) -> None:
    """Concatenated pooling without the prompt's tokens, dense layers with an activation, and norms."""
    plain = make_encoder("mpnet", tmp_path)
    pooling = {"pooling_mode": ["cls", "weightedmean", "lasttoken"], "include_prompt": False}
    dense = {"in_features": 96, "out_features": 24, "activation_function": "torch.nn.modules.activation.GELU"}
    files = {"1": pooling, "2": dense, "3": {"dimension": 24}, "4": {}}
    kinds = {"": "Transformer", "1": "Pooling", "2": "Dense", "3": "LayerNorm", "4": "Normalize"}
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    linear, norm = torch.nn.Linear(96, 24), torch.nn.LayerNorm(24)
    torch.nn.init.normal_(norm.weight)
    weights = {"2": ("linear", linear), "3": ("norm", norm)}
    for name, content in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
        if name in weights:
            prefix, module = weights[name]
            state = {f"{prefix}.{key}": value for key, value in module.state_dict().items()}
            torch.save(state, tmp_path / name / "pytorch_model.bin")
    ids, lengths = texts([9, 4, 9, 2])
    model = load(tmp_path)
    assert model.info.width == 24
    [found] = model.compute(batch(ids, lengths, group(PoolingTask.EMBED, 4, skipped=3)))
    rows = []
    for output, length in zip(outputs(plain, ids, lengths), lengths.tolist(), strict=True):
        state, first = output.last_hidden_state[0], min(3, length - 1)
        weight = torch.arange(first + 1, length + 1)[:, None]
        mean = (state[first:] * weight).sum(0) / weight.sum()
        rows.append(torch.cat((state[first], mean, state[-1])))
    with torch.inference_mode():
        expected = norm(torch.nn.functional.gelu(linear(torch.stack(rows))))
    assert_near(found, torch.nn.functional.normalize(expected, dim=-1))
    (tmp_path / "2" / "pytorch_model.bin").unlink()
    with pytest.raises(ConfigError, match="2: cannot read the weights"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_half_precision(kind: str, tmp_path: Path) -> None:
    plain = make_encoder(kind, tmp_path)
    ids, lengths = texts(LENGTHS)
    [found] = load(tmp_path, dtype="bfloat16").compute(batch(ids, lengths))
    rows = torch.stack([each.last_hidden_state[0].mean(0) for each in outputs(plain, ids, lengths)])
    cosine = torch.nn.functional.cosine_similarity(torch.from_numpy(found), rows)
    assert found.dtype == np.float32
    assert cosine.min() > 0.999
