"""Attention over the paged cache against attention written out for one token at a time."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.torch.attention import Kernel, PagedAttention
from penstock.engine.torch.attention_metadata import (
    TILE,
    CacheGeometry,
    DecodeMetadata,
    build_attention_metadata,
    token_positions,
)
from penstock.engine.torch.bloom import alibi_slopes
from penstock.engine.torch.model_loader import ModelShape

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 4, 2, 8
SLOTS, LONGEST = 12, 700
SHAPE = ModelShape(
    layers=1,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_size=SIZE,
    vocab_size=100,
    max_positions=LONGEST,
    dtype=None,
    alibi=False,
    logits_scale=1.0,
    logits_softcap=None,
)


def make_batch(parts: list[tuple[int, int]]) -> Batch:
    """(start, count) per slot, in the order that the scheduler keeps: singles by start, then chunks."""
    ordered = sorted(enumerate(parts), key=lambda entry: (entry[1][1] > 1, entry[1][0]))
    slots = np.array([slot for slot, _ in ordered], np.intp)
    start = np.array([start for _, (start, _) in ordered], np.int32)
    count = np.array([count for _, (_, count) in ordered], np.int32)
    everyone = np.arange(len(parts))
    return Batch(slots, start, count, int((count == 1).sum()), everyone, np.zeros(len(parts), np.int64))


def make_blocks(batch: Batch, block_size: int) -> BlockTables:
    """Tables whose blocks are scattered over the cache."""
    blocks = BlockTables(SLOTS, SLOTS * -(-LONGEST // block_size), block_size, LONGEST)
    for position in range(0, LONGEST, block_size):
        waits = batch.slots[batch.start + batch.count > position]
        blocks.allocate(waits, np.ones(len(waits), np.int32))
    return blocks


parts_of_batches = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 1, 2, 7, 33, TILE, TILE + 1, 390])),
    min_size=1,
    max_size=SLOTS,
)


@settings(max_examples=60)
@given(parts_of_batches, st.sampled_from([1, 7, 16]), st.sampled_from([1, 4000, 1 << 20]))
def test_every_token_is_in_one_part_which_holds_its_history(
    parts: list[tuple[int, int]], block_size: int, gathered: int
) -> None:
    batch = make_batch(parts)
    blocks = make_blocks(batch, block_size)
    layout = build_attention_metadata(batch, blocks, CacheGeometry(KV_HEADS, SIZE, gathered), CPU)
    slot = np.repeat(batch.slots, batch.count)
    position = token_positions(batch)
    seen: list[int] = []
    for part in layout.parts:
        streams, width = part.own.shape
        tokens = torch.arange(len(position))[part.tokens].numpy()
        real = np.arange(len(tokens)) if part.real is None else part.real.numpy()
        seen += tokens[real].tolist()
        assert part.own.numpy().reshape(-1)[real].tolist() == position[tokens[real]].tolist()
        pages = part.pages.view(streams, KV_HEADS, -1)
        assert pages.shape[2] * block_size == part.length
        for row in real.tolist():
            token = int(tokens[row])
            needed = blocks.blocks_for(int(position[token]) + 1)
            table = blocks.table[slot[token], :needed]
            for head in range(KV_HEADS):
                assert pages[row // width, head, :needed].tolist() == (table * KV_HEADS + head).tolist()
    assert sorted(seen) == list(range(len(position)))


def test_decodes_of_like_length_are_one_part() -> None:
    batch = make_batch([(500 + slot, 1) for slot in range(SLOTS)])
    layout = build_attention_metadata(
        batch, make_blocks(batch, 16), CacheGeometry(KV_HEADS, SIZE, 1 << 20), CPU
    )
    assert len(layout.parts) == 1


def decoded(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decodes: DecodeMetadata,
    window: int | None,
    softcap: float | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """What a kernel has to compute, a stream at a time."""
    rows = []
    for single, table, length in zip(query, decodes.table, decodes.length.tolist(), strict=True):
        known, given = (
            cache[table].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(HEADS // KV_HEADS, 1)
            for cache in (keys, values)
        )
        scores = torch.einsum("hd,lhd->hl", single, known)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        distance = torch.arange(length - 1, -1, -1)
        if slopes is not None:
            scores -= slopes.view(-1, 1) * distance
        if window is not None:
            scores = scores.masked_fill(distance >= window, -torch.inf)
        rows.append(torch.einsum("hl,lhd->hd", torch.softmax(scores, -1), given))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scaling": 0.7},
        {"sliding_window": 20},
        {"softcap": 3.0},
        {"softcap": 3.0, "sliding_window": 300},
        {"slopes": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [7, 16])
@pytest.mark.parametrize("kernel", [None, decoded], ids=["gathered", "in-place"])
def test_each_token_attends_to_its_own_history(
    options: dict[str, Any], block_size: int, kernel: Kernel | None
) -> None:
    torch.manual_seed(0)
    first = [(0, 40), (0, 33), (0, 300), (0, 1), (0, 2)]
    second = [(40, 1), (33, 1), (300, TILE + 20), (1, 1), (2, 30)]
    last = make_batch([(start, count) for start, count in second])
    blocks = make_blocks(last, block_size)
    shape = dataclasses.replace(SHAPE, alibi="slopes" in options)
    attention = PagedAttention(
        shape, blocks.blocks + 1, block_size, dtype=torch.float32, device=CPU, kernel=kernel
    )
    given = {name: value for name, value in options.items() if name != "slopes"}
    history = {slot: torch.zeros(2, 0, KV_HEADS, SIZE) for slot in range(SLOTS)}
    for parts in (first, second):
        batch = make_batch(parts)
        query, key, value = (
            torch.randn(1, heads, int(batch.count.sum()), SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        attention.layout = build_attention_metadata(batch, blocks, attention.geometry, CPU)
        module: Any = SimpleNamespace(layer_idx=0)
        output, _ = attention(module, query, key, value, None, **given)
        entries = torch.stack([key[0], value[0]]).transpose(1, 2)
        for token, slot in enumerate(np.repeat(batch.slots, batch.count).tolist()):
            history[slot] = torch.cat([history[slot], entries[:, token : token + 1]], 1)
            expected = attended(query[0, :, token], history[slot], **options)
            torch.testing.assert_close(output[0, token], expected, rtol=1e-4, atol=1e-5)


def attended(
    query: torch.Tensor,
    history: torch.Tensor,
    scaling: float = SIZE**-0.5,
    sliding_window: int | None = None,
    softcap: float | None = None,
    slopes: bool = False,
) -> torch.Tensor:
    """[H, D] of one token's query [H, D]; ``history``: keys and values up to its own, [2, L, KV heads, D]."""
    seen = history if sliding_window is None else history[:, -sliding_window:]
    keys, values = seen.repeat_interleave(HEADS // KV_HEADS, 2)
    scores = torch.einsum("hd,lhd->hl", query, keys) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes:  # 2 ** -2, 2 ** -4, 2 ** -6, 2 ** -8 for four heads
        distances = torch.arange(len(keys) - 1, -1, -1)
        scores -= 2.0 ** -(2 * torch.arange(1, HEADS + 1))[:, None] * distances
    return torch.einsum("hl,lhd->hd", torch.softmax(scores, -1), values)


@pytest.mark.parametrize("heads", [4, 6, 8, 16, 71])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    # Imported here: it takes as long as the rest of this directory together.
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    exact = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert alibi_slopes(heads) == pytest.approx(exact.tolist(), rel=1e-6)
