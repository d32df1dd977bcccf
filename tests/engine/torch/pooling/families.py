"""Small random encoders of each family, and what transformers makes of texts with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.pooling.model import PoolingBatch, PoolingGroup
from penstock.wire.arrays import I32
from penstock.wire.pooling import PoolingParams, PoolingTask

VOCAB = 96
SIZES: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "bert": {},
    "camembert": {"type_vocab_size": 1},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "electra": {"embedding_size": 16},
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "mpnet": {},
    "nomic_bert": {},
    "roberta": {"type_vocab_size": 1, "hidden_act": "gelu_new"},
    "xlm-roberta": {"type_vocab_size": 1},
}
"""By model_type: what its configuration has besides the common sizes."""
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
}


def make_encoder(kind: str, directory: Path, name: str = "AutoModel", **changes: Any) -> Any:
    """A random model of transformers' class ``name``, saved in ``directory``."""
    import transformers

    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **_COMMON | SIZES[kind] | changes)
    model = getattr(transformers, name).from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are no zeros and ones then
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model


def texts(lengths: Sequence[int], seed: int = 1) -> tuple[I32, I32]:
    """Random ids int32[T], and int32[B]."""
    ids = np.random.default_rng(seed).integers(3, VOCAB, size=sum(lengths))
    return ids.astype(np.int32), np.array(lengths, np.int32)


def batch(ids: I32, lengths: I32, *groups: PoolingGroup, seconds: Sequence[int] = ()) -> PoolingBatch:
    """All inputs as one group of vectors unless groups are given."""
    groups = groups or (group(PoolingTask.EMBED, len(lengths)),)
    given = np.array(seconds or [0] * len(lengths), np.int32)
    return PoolingBatch(ids, lengths, given, groups)


def group(task: PoolingTask, inputs: int, **params: Any) -> PoolingGroup:
    return PoolingGroup(PoolingParams(task, b"", **params), inputs)


@torch.inference_mode()
def outputs(model: Any, ids: I32, lengths: I32, seconds: Sequence[int] = ()) -> list[Any]:
    """transformers' outputs of each text by itself."""
    found, start = [], 0
    for at, length in enumerate(lengths.tolist()):
        options: dict[str, Tensor] = {}
        if seconds:
            types: NDArray[np.bool_] = np.arange(length) >= (seconds[at] or length)
            options["token_type_ids"] = torch.from_numpy(types.astype(np.int64))[None]
        text = torch.from_numpy(ids[start : start + length].astype(np.int64))[None]
        found.append(model(input_ids=text, **options))
        start += length
    return found
