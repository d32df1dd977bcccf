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
from penstock.engine.torch import attention as attention_module
from penstock.engine.torch.attention import Kernel, PagedAttention
from penstock.engine.torch.attention_metadata import (
    TILE,
    AttentionMetadata,
    CacheGeometry,
    build_attention_metadata,
    token_positions,
)
from penstock.engine.torch.cuda.paged_layout import DeviceTables
from penstock.engine.torch.families.bloom import alibi_slopes
from penstock.engine.torch.model_loader import ModelShape
from tests.engine.torch.harness import DEVICE
from tests.engine.torch.plain_kernel import KERNEL

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 4, 2, 8
SLOTS, LONGEST = 12, 700
SHAPE = ModelShape(
    layers=1,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_size=SIZE,
    value_size=SIZE,
    vocab_size=100,
    max_positions=LONGEST,
    dtype=None,
    alibi=False,
    logits_scale=1.0,
    logits_softcap=None,
)


def make_batch(parts: list[tuple[int, int]], drafts: int = 0) -> Batch:
    """(start, count) per slot, in the order that the scheduler keeps: singles by start, then the first
    ``drafts`` parts of several tokens as decodes with drafts, then chunks."""
    several = [slot for slot, (_, count) in enumerate(parts) if count > 1]
    drafting = set(several[:drafts])
    ordered = sorted(enumerate(parts), key=lambda part: (part[1][1] > 1, part[0] not in drafting, part[1][0]))
    slots = np.array([slot for slot, _ in ordered], np.intp)
    start = np.array([start for _, (start, _) in ordered], np.int32)
    count = np.array([count for _, (_, count) in ordered], np.int32)
    everyone = np.arange(len(parts))
    singles = int((count == 1).sum())
    return Batch(
        slots=slots,
        start=start,
        count=count,
        singles=singles,
        samples=everyone,
        generations=np.zeros(len(parts), np.int64),
        decodes=singles + len(drafting),
    )


def make_blocks(batch: Batch, block_size: int) -> BlockTables:
    """Tables whose blocks are scattered over the cache."""
    blocks = BlockTables(SLOTS, SLOTS * -(-LONGEST // block_size), block_size, LONGEST)
    for position in range(0, LONGEST, block_size):
        waits = batch.slots[batch.start + batch.count > position]
        blocks.allocate(waits, np.ones(len(waits), np.int32))
    return blocks


def metadata(batch: Batch, blocks: BlockTables, gathered: int = 1 << 20) -> AttentionMetadata:
    geometry = CacheGeometry(KV_HEADS, SIZE, gathered)
    return build_attention_metadata(batch, blocks, token_positions(batch), geometry, CPU)


parts_of_batches = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 1, 2, 7, 33, TILE, TILE + 1, 390])),
    min_size=1,
    max_size=SLOTS,
)


@settings(max_examples=60)
@given(parts_of_batches, st.integers(0, 6), st.sampled_from([1, 7, 16]), st.sampled_from([1, 4000, 1 << 20]))
def test_every_token_is_in_one_part_which_holds_its_history(
    parts: list[tuple[int, int]], drafts: int, block_size: int, gathered: int
) -> None:
    batch = make_batch(parts, drafts)
    blocks = make_blocks(batch, block_size)
    layout = metadata(batch, blocks, gathered)
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
    layout = metadata(batch, make_blocks(batch, 16))
    assert len(layout.parts) == 1


def test_drafts_of_like_width_are_one_part_without_prompt_chunks() -> None:
    """Streams of unlike length are apart, and 2 to 5 tokens from 6 to 9."""
    parts = [(500, 2), (510, 5), (505, 4), (520, 6), (515, 9), (40, 3), (30, 5), (41, 4)]
    batch = make_batch(parts, drafts=7)
    layout = metadata(batch, make_blocks(batch, 16))
    widths = sorted(tuple(part.own.shape) for part in layout.parts)
    assert widths == [(1, 4), (2, 5), (2, 9), (3, 5)]


def make_attention(
    shape: ModelShape, blocks: BlockTables, kernel: Kernel | None, dtype: torch.dtype = torch.float32
) -> PagedAttention:
    tables = None if kernel is None else DeviceTables(SLOTS, blocks.table.shape[1], DEVICE)
    return PagedAttention(
        shape,
        blocks.blocks + 1,
        blocks.block_size,
        dtype=dtype,
        device=DEVICE,
        kernel=kernel,
        tables=tables,
    )


def describe(attention: PagedAttention, batch: Batch, blocks: BlockTables) -> None:
    _, attention.layout = attention.layout_of(batch, blocks, token_positions(batch), DEVICE)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scaling": 0.7},
    {"sliding_window": 20},
    {"softcap": 3.0},
    {"softcap": 3.0, "sliding_window": 300},
    {"slopes": True},
    {"s_aux": torch.tensor([-1.0, 0.0, 2.0, 30.0], device=DEVICE), "sliding_window": 20},
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("block_size", [7, 16])
@pytest.mark.parametrize("kernel", [None, KERNEL], ids=["gathered", "in-place"])
def test_each_token_attends_to_its_own_history(
    options: dict[str, Any], block_size: int, kernel: Kernel | None
) -> None:
    torch.manual_seed(0)
    first = [(0, 40), (0, 33), (0, 300), (0, 1), (0, 2), (0, 50), (0, 45), (0, 40)]
    second = [(40, 1), (33, 1), (50, 3), (1, 1), (2, 33), (50, 5), (45, 9), (300, TILE + 20)]
    first[2], first[7] = first[7], first[2]
    second[2] = (40, 3)
    last = make_batch(second)
    blocks = make_blocks(last, block_size)
    shape = dataclasses.replace(SHAPE, alibi="slopes" in options)
    attention = make_attention(shape, blocks, kernel)
    given = {name: value for name, value in options.items() if name != "slopes"}
    history = {slot: torch.zeros(2, 0, KV_HEADS, SIZE, device=DEVICE) for slot in range(SLOTS)}
    for parts, drafts in ((first, 0), (second, 4)):
        batch = make_batch(parts, drafts)
        query, key, value = (
            torch.randn(1, heads, int(batch.count.sum()), SIZE, device=DEVICE)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        describe(attention, batch, blocks)
        module: Any = SimpleNamespace(layer_idx=0)
        output, _ = attention(module, query, key, value, None, **given)
        entries = torch.stack([key[0], value[0]]).transpose(1, 2)
        for token, slot in enumerate(np.repeat(batch.slots, batch.count).tolist()):
            history[slot] = torch.cat([history[slot], entries[:, token : token + 1]], 1)
            expected = attended(query[0, :, token], history[slot], **options)
            torch.testing.assert_close(output[0, token], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kernel", [None, KERNEL], ids=["gathered", "in-place"])
def test_tokens_of_a_picture_attend_to_all_of_it(window: int | None, kernel: Kernel | None) -> None:
    """Pictures over the border of a tile, one at the end of its chunk; beside text, decodes and drafts."""
    torch.manual_seed(0)
    parts = [(20, TILE + 60), (0, 40), (64, 1), (30, 3), (0, 70)]
    pictures = {0: [(25, 60), (TILE + 10, TILE + 79)], 1: [(4, 39)]}
    batch = make_batch(parts, drafts=1)
    blocks, positions = make_blocks(batch, 16), token_positions(batch)
    attention = make_attention(SHAPE, blocks, kernel)
    for cache in (attention.keys[0], attention.values[0]):
        cache[1:] = torch.randn_like(cache[1:])
    owners, reach = np.repeat(batch.slots, batch.count), positions.copy()
    for slot, spans in pictures.items():
        for first, last in spans:
            reach[(owners == slot) & (positions >= first) & (positions <= last)] = last
    query, key, value = (
        torch.randn(1, heads, len(positions), SIZE, device=DEVICE) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    _, attention.layout = attention.layout_of(batch, blocks, positions, DEVICE, reach)
    module: Any = SimpleNamespace(layer_idx=0)
    output, _ = attention(module, query, key, value, None, sliding_window=window)
    for token in [*range(0, len(positions), 7), *np.flatnonzero(reach > positions)[::5].tolist()]:
        rows = np.arange(reach[token] + 1)
        if window is not None:
            rows = rows[rows > positions[token] - window]
        table = torch.from_numpy(blocks.table[owners[token]]).to(DEVICE).long()
        history = torch.stack(
            [
                cache[0][table].transpose(1, 2).flatten(0, 1)[rows]
                for cache in (attention.keys, attention.values)
            ]
        )
        expected = attended(query[0, :, token], history)
        torch.testing.assert_close(output[0, token], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"softcap": 3.0, "sliding_window": 20}, {"slopes": True}], ids=str)
def test_few_scores_at_a_time_change_nothing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "MAX_SCORES", 3 * HEADS * 300)
    test_each_token_attends_to_its_own_history(options, 16, None)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kernel", [None, KERNEL], ids=["gathered", "in-place"])
def test_a_draft_is_computed_like_its_tokens_one_by_one(
    options: dict[str, Any], kernel: Kernel | None
) -> None:
    torch.manual_seed(1)
    starts, counts = [60, 3, 200, 60, 64, 350], [2, 5, 9, 17, 3, 33]
    whole = make_batch(list(zip(starts, counts, strict=True)), drafts=len(starts))
    blocks = make_blocks(whole, 16)
    given = {name: value for name, value in options.items() if name != "slopes"}
    shape = dataclasses.replace(SHAPE, alibi="slopes" in options)
    together, alone = (make_attention(shape, blocks, kernel) for _ in range(2))
    together.keys[0][1:] = torch.randn_like(together.keys[0][1:])
    together.values[0][1:] = torch.randn_like(together.values[0][1:])
    alone.keys[0][:], alone.values[0][:] = together.keys[0], together.values[0]
    query, key, value = (
        torch.randn(1, heads, int(sum(counts)), SIZE, device=DEVICE) for heads in (HEADS, 2, 2)
    )
    module: Any = SimpleNamespace(layer_idx=0)
    describe(together, whole, blocks)
    output, _ = together(module, query, key, value, None, **given)
    first = np.cumsum(whole.count) - whole.count
    for turn in range(max(counts)):
        stays = whole.count > turn
        single = dataclasses.replace(
            whole,
            slots=whole.slots[stays],
            start=whole.start[stays] + turn,
            count=np.ones(int(stays.sum()), np.int32),
            singles=int(stays.sum()),
            decodes=int(stays.sum()),
        )
        order = np.argsort(single.start, kind="stable")
        single = dataclasses.replace(single, slots=single.slots[order], start=single.start[order])
        rows = torch.from_numpy((first[stays] + turn)[order]).to(DEVICE)
        describe(alone, single, blocks)
        expected, _ = alone(module, query[:, :, rows], key[:, :, rows], value[:, :, rows], None, **given)
        torch.testing.assert_close(output[:, rows], expected, rtol=1e-5, atol=1e-6)
    for cache, other in ((together.keys, alone.keys), (together.values, alone.values)):
        assert torch.equal(cache[0], other[0])


def eager(
    query: torch.Tensor, history: torch.Tensor, first: int, scaling: float, softcap: float | None
) -> torch.Tensor:
    """[C, H, D]: transformers' eager attention of a stream's query [H, C, D], whose first token is at
    ``first``; history [2, KV heads, L, D]."""
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    own = torch.arange(first, first + query.shape[1], device=query.device)
    distance = own[:, None] - torch.arange(history.shape[2], device=query.device)
    mask = torch.zeros_like(distance, dtype=query.dtype).masked_fill(
        distance < 0, torch.finfo(query.dtype).min
    )
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False, head_dim=SIZE)
    output, _ = eager_attention_forward(
        module, query[None], history[:1], history[1:], mask[None, None], scaling=scaling, softcap=softcap
    )
    rows: torch.Tensor = output[0]
    return rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_half_precision_rounds_like_eager_attention(dtype: torch.dtype, softcap: float | None) -> None:
    """Scores are wide, so that their rounding shows in the weights. Sums of products in another order differ
    in their last bit, before they are rounded: few outputs may differ. If the query is scaled before the
    product, more than half of them do."""
    torch.manual_seed(2)
    starts, counts = [0, 90, 150, 0], [70, 1, 5, TILE + 40]
    batch = make_batch(list(zip(starts, counts, strict=True)), drafts=0)
    blocks = make_blocks(batch, 16)
    attention = make_attention(SHAPE, blocks, None, dtype)
    attention.keys[0][1:] = torch.randn_like(attention.keys[0][1:]) * 3
    attention.values[0][1:] = torch.randn_like(attention.values[0][1:])
    tokens = int(sum(counts))
    query, key, value = (torch.randn(1, heads, tokens, SIZE).to(DEVICE, dtype) * 2 for heads in (HEADS, 2, 2))
    describe(attention, batch, blocks)
    module: Any = SimpleNamespace(layer_idx=0)
    output, _ = attention(module, query, key, value, None, scaling=0.3, softcap=softcap)
    differing = 0
    ends = np.cumsum(batch.count)
    for slot, start, count, end in zip(batch.slots, batch.start, batch.count, ends, strict=True):
        length = int(start + count)
        table = torch.from_numpy(blocks.table[slot, : blocks.blocks_for(length)])
        history = torch.stack(
            [
                cache[0][table].transpose(0, 1).flatten(1, 2)[:, :length]
                for cache in (attention.keys, attention.values)
            ]
        )
        rows = slice(int(end - count), int(end))
        expected = eager(query[0, :, rows], history, int(start), 0.3, softcap)
        differing += int((output[0, rows] != expected).sum())
    assert differing < 0.02 * output.numel()


def attended(
    query: torch.Tensor,
    history: torch.Tensor,
    scaling: float = SIZE**-0.5,
    sliding_window: int | None = None,
    softcap: float | None = None,
    slopes: bool = False,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """[H, D] of one token's query [H, D]; ``history``: keys and values up to its own, [2, L, KV heads, D]."""
    seen = history if sliding_window is None else history[:, -sliding_window:]
    keys, values = seen.repeat_interleave(HEADS // KV_HEADS, 2)
    scores = torch.einsum("hd,lhd->hl", query, keys) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if slopes:  # 2 ** -2, 2 ** -4, 2 ** -6, 2 ** -8 for four heads
        distances = torch.arange(len(keys) - 1, -1, -1, device=query.device)
        scores -= 2.0 ** -(2 * torch.arange(1, HEADS + 1, device=query.device))[:, None] * distances
    if s_aux is not None:
        scores = torch.cat((scores, s_aux[:, None]), -1)
    return torch.einsum("hl,lhd->hd", torch.softmax(scores, -1)[:, : len(keys)], values)


@pytest.mark.parametrize("heads", [4, 6, 8, 16, 71])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    # Imported here: it takes as long as the rest of this directory together.
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    exact = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert alibi_slopes(heads) == pytest.approx(exact.tolist(), rel=1e-6)
