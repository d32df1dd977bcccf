"""What tests of vectors, scores and labels share: a small model's facts, and results made of numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.config.serve import ServeConfig
from penstock.engine.pooling.description import PoolingDescription
from penstock.generation.pooling.dialect import PoolingBody, PoolingDialect
from penstock.generation.pooling.plan import PooledInputs, PoolingPlan
from penstock.generation.pooling.processor import PoolingProcessor
from penstock.generation.replies.token_usage import TokenUsage
from penstock.wire.arrays import F32
from penstock.wire.pooling import PoolingInfo, PoolingTask
from tests.generation.planning import tiny_input_processor

EMBED, CLASSIFY = PoolingTask.EMBED, PoolingTask.CLASSIFY
VECTORS = PoolingInfo((EMBED, PoolingTask.TOKEN_EMBED), width=4)
CROSS_ENCODER = PoolingInfo((CLASSIFY,), labels=1)
CLASSIFIER = PoolingInfo((CLASSIFY, PoolingTask.TOKEN_CLASSIFY), labels=3)
TEXT_ALONE = None


def pooling_processor(
    info: PoolingInfo | None = VECTORS, config: ServeConfig | None = None, **described: Any
) -> PoolingProcessor:
    """For the model of :func:`tiny_input_processor`. ``described``: by its files."""
    config = config or ServeConfig()
    facts = {"tasks": () if info is None else info.tasks, "max_tokens": 2048} | described
    description = PoolingDescription(**facts) if info is not None else None
    return PoolingProcessor(config, tiny_input_processor(config), info, description)


def pooled_of(
    values: Sequence[Any] | F32, lengths: Sequence[int] = (), per_token: bool = False
) -> PooledInputs:
    """What has been made of inputs of so many tokens, by default of three each."""
    matrix = np.asarray(values, np.float32)
    counts = np.asarray(lengths or [3] * len(matrix), np.int32)
    return PooledInputs(matrix, counts, per_token, TokenUsage(int(counts.sum()), 0, None))


def plan_of(dialect: PoolingDialect, **fields: Any) -> PoolingPlan:
    return dialect.plan(json.dumps(fields).encode())


def json_of(body: PoolingBody) -> Any:
    whole = b"".join(body.pieces)
    assert body.size in (None, len(whole))
    return json.loads(whole)
