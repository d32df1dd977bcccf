"""Processes of vLLM's with small random models that make vectors and labels, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.engine.attach.engine import AttachedEngine
from penstock.wire.arrays import F32
from penstock.wire.messages import SamplingParams, Submit
from penstock.wire.pooling import PoolingInfo, PoolingParams, PoolingTask
from tests.engine.attach.small_engine import SLOTS, start_engine, step

pytestmark = pytest.mark.filterwarnings("ignore")

VOCAB, WIDTH, LONGEST = 89, 64, 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.3,
}
LENGTHS = np.random.default_rng(0).integers(2, LONGEST, size=3 * SLOTS)
INPUTS = [np.random.default_rng(length).integers(5, VOCAB, size=length) for length in LENGTHS]


def start(model: transformers.PreTrainedModel, directory: Path) -> AttachedEngine:
    model.save_pretrained(directory)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(VOCAB - 5))]
    (directory / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(directory / "vocab.txt")).save_pretrained(directory)
    options = {"dtype": "float32", "max_num_seqs": SLOTS, "kv_cache_memory": 16 << 20}
    return start_engine(directory, directory, ["--enforce-eager"], options)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AttachedEngine, Any]]:
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    engine = start(model, tmp_path_factory.mktemp("encoder"))
    yield engine, model
    engine.close()


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AttachedEngine, Any]]:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, num_labels=1)
    model = transformers.BertForSequenceClassification(config).eval()
    engine = start(model, tmp_path_factory.mktemp("ranker"))
    yield engine, model
    engine.close()


def pooled(engine: AttachedEngine, task: PoolingTask, **params: Any) -> F32:
    """float32[vectors, values]: of INPUTS, as one stream."""
    lengths = LENGTHS.astype("<i4").tobytes()
    pooling = PoolingParams(task, lengths, **params)
    prompt = np.concatenate(INPUTS).astype("<i4").tobytes()
    engine.submit(0, Submit(0, prompt, SamplingParams(max_tokens=len(INPUTS), seed=0), pooling=pooling))
    values, inputs, widths = [], 0, set()
    while engine.has_work():
        rows = step(engine)
        assert not rows.failed
        if rows.vectors is None:
            continue
        assert rows.position.tolist() == [inputs]
        assert rows.count is not None
        inputs += int(rows.count.sum())
        values.append(rows.vectors.values)
        widths.update(rows.vectors.width.tolist())
    (width,) = widths
    assert inputs == len(INPUTS)
    return np.concatenate(values).reshape(-1, width)


def unit(vectors: F32) -> F32:
    lengths: F32 = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / lengths


@torch.no_grad()
def test_vectors_are_those_of_transformers(encoder: tuple[AttachedEngine, Any]) -> None:
    engine, model = encoder
    assert engine.info.pooling == PoolingInfo((PoolingTask.EMBED, PoolingTask.TOKEN_EMBED), WIDTH)
    states = [model(torch.from_numpy(ids)[None]).last_hidden_state[0].numpy() for ids in INPUTS]
    first = np.stack([each[0] for each in states])  # BERT's vector, unless its files say otherwise
    assert np.allclose(pooled(engine, PoolingTask.EMBED), unit(first), atol=1e-5)
    assert np.allclose(pooled(engine, PoolingTask.EMBED, normalize=False), first, atol=1e-4)
    cut = pooled(engine, PoolingTask.EMBED, dimensions=16)
    assert np.allclose(cut, unit(first[:, :16]), atol=1e-5)
    tokens = pooled(engine, PoolingTask.TOKEN_EMBED)
    assert np.allclose(tokens, unit(np.concatenate(states)), atol=1e-5)


@torch.no_grad()
def test_scores_of_pairs_are_those_of_transformers(ranker: tuple[AttachedEngine, Any]) -> None:
    engine, model = ranker
    assert engine.info.pooling == PoolingInfo((PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY), 0, 1)
    seconds = LENGTHS // 2
    types = [
        (np.arange(length) >= second).astype(int) for length, second in zip(LENGTHS, seconds, strict=True)
    ]
    expected = np.stack(
        [
            model(torch.from_numpy(ids)[None], token_type_ids=torch.from_numpy(kind)[None]).logits[0].numpy()
            for ids, kind in zip(INPUTS, types, strict=True)
        ]
    )
    given = {"seconds": seconds.astype("<i4").tobytes()}
    logits = pooled(engine, PoolingTask.CLASSIFY, activate=False, **given)
    assert np.allclose(logits, expected, atol=1e-4)
    scores = pooled(engine, PoolingTask.CLASSIFY, **given)
    assert np.allclose(scores, 1 / (1 + np.exp(-expected)), atol=1e-5)
    assert not np.allclose(pooled(engine, PoolingTask.CLASSIFY, activate=False), expected, atol=1e-2)
