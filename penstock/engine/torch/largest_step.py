"""The largest steps that a configuration allows, with tokens that mean nothing: their memory is measured."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config.serve import ServeConfig
from penstock.engine.batch.slots import SlotTable
from penstock.engine.sampling.metadata import SamplingMetadata
from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_runner import ModelRunner
from penstock.wire.messages import SamplingParams, Submit

UNIFORM = 1e30
"""A temperature at which all tokens are equally likely, so that top-p has to sort the whole vocabulary."""


def run_largest_steps(
    model: PagedModel, config: ServeConfig, max_model_len: int, device: torch.device
) -> None:
    """Run two steps of ``max_num_batched_tokens`` prompt tokens: as many streams as possible, which have the
    most logits and sampling, and the longest streams, which have the most attention.

    The model gets a cache of the null block alone, which takes all keys and values;
    :meth:`PagedModel.make_cache` is to be called afterwards. Ranks that share a model's layers all call this.
    """
    model.make_cache(1, config.block_size, record=False)
    for start, count in (most_streams(config, max_model_len), longest_streams(config, max_model_len)):
        _run(model, config, max_model_len, device, start.astype(np.int32), count.astype(np.int32))


def most_streams(config: ServeConfig, max_model_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and count of the parts of a step that samples as many streams as possible."""
    tokens = config.max_num_batched_tokens
    streams = min(config.max_num_seqs, tokens)
    count = np.sort(tokens // streams + (np.arange(streams) < tokens % streams))
    count = np.minimum(count, max_model_len - 1)
    return np.zeros_like(count), count


def longest_streams(config: ServeConfig, max_model_len: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and count of the parts of a step with the ends of the longest prompts."""
    longest = max_model_len - 1  # a prompt leaves room for a token
    streams = min(config.max_num_seqs, -(-config.max_num_batched_tokens // longest))
    left = config.max_num_batched_tokens - longest * np.arange(streams)
    count = np.sort(np.minimum(left, longest))
    return longest - count, count


def _run(
    model: PagedModel,
    config: ServeConfig,
    max_model_len: int,
    device: torch.device,
    start: NDArray[np.int32],
    count: NDArray[np.int32],
) -> None:
    table = SlotTable(len(count), max_model_len, [], vocab_size=model.vocab_size)
    sampling = SamplingMetadata(table, model.vocab_size)
    params = SamplingParams(
        max_tokens=1, seed=0, temperature=UNIFORM, top_p=0.99, top_k=model.vocab_size - 1, logprobs=1
    )
    for stream, length in enumerate((start + count).tolist()):
        prompt = np.zeros(length, "<i4").tobytes()
        sampling.set(table.allocate(0, Submit(stream, prompt, params)), params)
    slots = np.arange(len(count))
    singles = int(np.count_nonzero(count == 1))
    batch = Batch(
        slots=slots,
        start=start,
        count=count,
        singles=singles,
        decodes=singles,
        samples=slots,
        generations=table.generation[slots],
    )
    blocks = BlockTables(len(count), 1, config.block_size, max_model_len)
    ModelRunner(model, blocks, sampling, device).launch(batch).read()
