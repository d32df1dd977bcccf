"""The largest steps that a configuration allows, with tokens that mean nothing: their memory is measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config.serve import ServeConfig
from penstock.engine.batch.slots import SlotTable
from penstock.engine.sampling.metadata import SamplingMetadata
from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.speculation.speculation import MAX_FORCED
from penstock.engine.torch.media.picture_encoder import encode_largest
from penstock.engine.torch.model import LESS_WORK, PagedModel
from penstock.engine.torch.model_runner import ModelRunner
from penstock.engine.torch.out_of_memory import stating_shortage
from penstock.wire.messages import SamplingParams, Submit

UNIFORM = 1e30
"""A temperature at which all tokens are equally likely, so that top-p has to sort the whole vocabulary."""


def run_largest_steps(
    models: Sequence[PagedModel], config: ServeConfig, max_model_len: int, device: torch.device
) -> None:
    """Run two steps of ``max_num_batched_tokens`` prompt tokens: as many streams as possible, which have the
    most logits and sampling, and the longest streams, which have the most attention. Prompts are scored, and
    streams have drafts and adapters where these are enabled. Draft models run them as well, up to the
    positions that they have. Of a model that sees the largest picture is encoded.

    Models get a cache of the null block alone, which takes all keys and values;
    :meth:`PagedModel.make_cache` is to be called afterwards. Ranks that share a model's layers all call this.
    Raises ConfigError when there is no memory for a step.
    """
    what = (
        f"running the largest steps, of --max-num-batched-tokens {config.max_num_batched_tokens} and "
        f"--max-num-seqs {config.max_num_seqs}"
    )
    for model in models:
        model.make_cache(1, config.block_size, record=False)
        longest = min(max_model_len, model.max_positions)
        with stating_shortage(what, LESS_WORK, device):
            for start, count in (most_streams(config, longest), longest_streams(config, longest)):
                _run(model, config, longest, device, start.astype(np.int32), count.astype(np.int32))
        if model.sees:
            encode_largest(model, config)


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
        max_tokens=1,
        seed=0,
        temperature=UNIFORM,
        top_p=0.99,
        top_k=model.vocab_size - 1,
        logprobs=1,
        prompt_logprobs=1,
    )
    drafts = np.minimum(count - 1, _most_drafted(config), dtype=np.int32)
    for stream, length in enumerate((start + count - drafts).tolist()):
        prompt = np.zeros(length, "<i4").tobytes()
        sampling.set(table.allocate(0, Submit(stream, prompt, params)), params)
    slots = np.arange(len(count))
    singles = int(np.count_nonzero(count == 1))
    decodes = int(np.count_nonzero((count == 1) | (drafts > 0)))
    batch = Batch(
        slots=slots,
        start=start,
        count=count,
        singles=singles,
        decodes=decodes,
        samples=slots,
        generations=table.generation[slots],
        drafts=drafts if drafts.any() else None,
    )
    blocks = BlockTables(len(count), 1, config.block_size, max_model_len)
    if model.lora is None:
        ModelRunner(model, blocks, sampling, device).launch(batch).read_tokens()
        return
    places = (slots % config.max_loras).astype(np.int32)
    with model.lora.filled():
        ModelRunner(model, blocks, sampling, device, places).launch(batch).read_tokens()


def _most_drafted(config: ServeConfig) -> int:
    """Draft tokens of a stream, each of which is sampled."""
    if config.speculative_method == "none":
        return 0
    return MAX_FORCED if config.speculative_tokens == "auto" else config.speculative_tokens
