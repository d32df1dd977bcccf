"""Validates a request for vectors, scores or labels before an engine queues it."""

from __future__ import annotations

import numpy as np

from penstock.engine.base import RequestRejected
from penstock.wire.messages import Submit
from penstock.wire.pooling import TASK_NAMES, PoolingInfo, PoolingParams, PoolingTask


def check_inputs(request: Submit, info: PoolingInfo, *, longest: int, vocab_size: int) -> PoolingParams:
    """What is made of the request's inputs. ``longest``: tokens that one may have. Raises RequestRejected for
    a request for text, a task or dimensions that the model does not have, an input that is too long, and
    token ids outside the vocabulary."""
    params = request.pooling
    if params is None:
        raise RequestRejected("model: it makes vectors, scores or labels, and no text")
    if params.task not in info.tasks:
        has = ", ".join(TASK_NAMES[PoolingTask(task)] for task in info.tasks)
        raise RequestRejected(f"task: {TASK_NAMES[PoolingTask(params.task)]}, the model has {has}")
    lengths, _ = params.columns()
    if (most := int(lengths.max())) > longest:
        raise RequestRejected(f"input: one has {most} tokens, the model takes {longest}")
    if params.dimensions > info.width:
        raise RequestRejected(f"dimensions: {params.dimensions}, vectors have {info.width} values")
    if np.frombuffer(request.prompt, "<u4").max() >= vocab_size:  # as are negative ids, seen without a sign
        raise RequestRejected(f"input: a token id that is not among the model's {vocab_size}")
    return params
