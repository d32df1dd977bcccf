"""Triton kernels: write keys and values to the paged cache, and attend over it without gathering it.

Imported only where Triton is installed; the tests run them in Triton's interpreter on a CPU. One program
computes a tile, some tokens of one stream with the query heads that share a KV head: it walks the blocks of
the history with an online softmax (Dao: FlashAttention-2), so that a tile reads the history once. A token of
a decode is a tile by itself. Where a step has too few tiles to fill a device, several programs share the
history of each, and a second kernel adds up what they found (Dao et al.: Flash-Decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.torch.attention_metadata import Scoring
from penstock.engine.torch.cuda.paged_layout import FILLING, PagedLayout

MIN_DOT_ROWS = 16
"""Minimum rows of a tensor core's product; fewer are padded."""
POSITION_BYTES = 16 << 10
"""Bytes of keys that a program reads per iteration; with its values, and a second iteration that is fetched
meanwhile, four times that are in shared memory, of which GPUs have 64 KiB and more."""
MAX_POSITIONS, FEWEST_POSITIONS = 64, 16
MAX_SPLITS = 32
"""Programs that share a history."""
MIN_SHARE = 256
"""Positions below which a history is not worth another program."""


@triton.jit(do_not_specialize=["owners", "positions", "width"])  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    key,
    value,
    keys,
    values,
    table,
    owners,
    positions,
    width,
    key_row,
    key_head,
    value_row,
    value_head,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    owner = tl.load(owners + token).to(tl.int64)
    position = tl.load(positions + token)
    block = tl.load(table + owner * width + position // BLOCK_SIZE).to(tl.int64)
    at = (block * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
    size, value_size = tl.arange(0, SIZE_PADDED), tl.arange(0, VALUE_PADDED)
    k = tl.load(key + token * key_row + head * key_head + size, mask=size < SIZE)
    tl.store(keys + at * SIZE + size, k, mask=size < SIZE)
    v = tl.load(value + token * value_row + head * value_head + value_size, mask=value_size < VALUE_SIZE)
    tl.store(values + at * VALUE_SIZE + value_size, v, mask=value_size < VALUE_SIZE)


@triton.jit  # type: ignore[untyped-decorator]
def _score(q, k, scaling, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    # rounded like transformers' eager attention, which stores these in the model's dtype
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if q.dtype == tl.float16:
        scores = tl.minimum(tl.maximum(scores, -65504.0), 65504.0)
    scores = (scores.to(q.dtype).to(tl.float32) * scaling).to(q.dtype).to(tl.float32)
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        capped = (scores / SOFTCAP).to(q.dtype).to(tl.float32)
        capped = (1.0 - 2.0 / (tl.exp(2.0 * capped) + 1.0)).to(q.dtype).to(tl.float32)
        scores = (SOFTCAP * capped).to(q.dtype).to(tl.float32)
    return scores


@triton.jit(
    do_not_specialize=[
        "owners",
        "positions",
        "tiles",
        "reaches",
        "scaling",
        "width",
        "base",
        "splits",
    ]
)  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    output,
    sums_of,
    bounds_of,
    table,
    owners,
    positions,
    tiles,
    reaches,
    slopes,
    sinks,
    scaling,
    width,
    base,
    splits,
    query_row,
    query_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    TILED: tl.constexpr,
    REACHING: tl.constexpr,
    SPLIT: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    first, count = tile, 1
    if TILED:
        first = tl.load(tiles + 2 * tile).to(tl.int64)
        count = tl.load(tiles + 2 * tile + 1)
    start = tl.load(positions + first).to(tl.int32)
    pages = table + tl.load(owners + first).to(tl.int64) * width

    # a row is a token and a query head; those of one token are next to each other
    row = tl.arange(0, TOKENS * GROUP_PADDED)
    token, member = row // GROUP_PADDED, row % GROUP_PADDED
    own = start + token
    real = (token < count) & (member < GROUP)
    size, value_size = tl.arange(0, SIZE_PADDED), tl.arange(0, VALUE_PADDED)
    heads = head * GROUP + member
    at = (first + token) * query_row + heads * query_head
    asked = real[:, None] & (size < SIZE)[None, :]
    q = tl.load(query + at[:, None] + size[None, :], mask=asked, other=0.0)
    if ALIBI:
        slope = tl.load(slopes + heads, mask=member < GROUP, other=0.0)

    begin, end, reach = 0, start + count, own
    if REACHING:
        reach = tl.load(reaches + first + token, mask=token < count, other=0).to(tl.int32)
        end = tl.max(reach, 0) + 1
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0) // POSITIONS * POSITIONS
    if CHUNK > 0:
        begin = tl.maximum(begin, start // CHUNK * CHUNK // POSITIONS * POSITIONS)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, POSITIONS), splits) * POSITIONS
        begin += tl.program_id(2) * share
        end = tl.minimum(end, begin + share)
    most = tl.full((TOKENS * GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS * GROUP_PADDED,), tl.float32)
    if SINKS:
        # a position without a value, which one of the programs that share a history counts
        counts = (member < GROUP) & (tl.program_id(2) == 0)
        most = tl.load(sinks + heads, mask=counts, other=float("-inf")).to(tl.float32)
        total = tl.where(most == float("-inf"), 0.0, 1.0)
    sums = tl.zeros((TOKENS * GROUP_PADDED, VALUE_PADDED), tl.float32)
    for beginning in range(begin, end, POSITIONS):
        position = beginning + tl.arange(0, POSITIONS)
        known = position < end
        page = tl.load(pages + position // BLOCK_SIZE, mask=known, other=0)
        entry = (page.to(tl.int64) * KV_HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
        there = known[:, None] & (size < SIZE)[None, :]
        k = tl.load(keys + (entry * SIZE)[:, None] + size[None, :], mask=there, other=0.0)
        scores = _score(q, k, scaling, SOFTCAP)
        distance = own[:, None] - position[None, :]
        if ALIBI:
            scores -= slope[:, None] * distance
        seen = known[None, :] & (position[None, :] <= reach[:, None])
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
        if CHUNK > 0:
            seen = seen & (distance <= (own % CHUNK)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        greater = tl.maximum(most, tl.max(scores, 1))
        # a row that has seen nothing yet has no greatest score to subtract
        subtracted = tl.where(greater == float("-inf"), 0.0, greater)
        weights = tl.exp(scores - subtracted[:, None])
        shrunk = tl.exp(most - subtracted)
        there = known[:, None] & (value_size < VALUE_SIZE)[None, :]
        v = tl.load(values + (entry * VALUE_SIZE)[:, None] + value_size[None, :], mask=there, other=0.0)
        total = total * shrunk + tl.sum(weights, 1)
        sums = sums * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        most = greater

    result = (first + token) * (KV_HEADS * GROUP) + heads
    within = real[:, None] & (value_size < VALUE_SIZE)[None, :]
    if SPLIT:
        part = (result - base * (KV_HEADS * GROUP)) * splits + tl.program_id(2)
        tl.store(sums_of + part[:, None] * VALUE_SIZE + value_size[None, :], sums, mask=within)
        tl.store(bounds_of + 2 * part, most, mask=real)
        tl.store(bounds_of + 2 * part + 1, total, mask=real)
    else:
        # rows that are no tokens have a total of 0 and are not stored
        sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(output + result[:, None] * VALUE_SIZE + value_size[None, :], sums, mask=within)


@triton.jit(do_not_specialize=["base", "splits"])  # type: ignore[untyped-decorator]
def _add_up(  # type: ignore[no-untyped-def]
    sums_of,
    bounds_of,
    output,
    base,
    splits,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split = tl.arange(0, MAX_SPLITS)
    size = tl.arange(0, SIZE_PADDED)
    used = split < splits
    at = part * splits + split
    most = tl.load(bounds_of + 2 * at, mask=used, other=float("-inf"))
    total = tl.load(bounds_of + 2 * at + 1, mask=used, other=0.0)
    within = used[:, None] & (size < SIZE)[None, :]
    sums = tl.load(sums_of + at[:, None] * SIZE + size[None, :], mask=within, other=0.0)
    weight = tl.exp(most - tl.max(most, 0))
    result = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
    tl.store(output + (base * HEADS + part) * SIZE + size, result, mask=size < SIZE)


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: PagedLayout,
    scoring: Scoring,
) -> Tensor:
    """Write a step's keys and values to the cache, and attend: query [T, H, D] → [T, H, V].

    key [T, KV heads, D], value [T, KV heads, V]; keys [blocks, KV heads, block size, D], values likewise.
    Any strides of query, key and value.
    """
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    tokens, heads, size = query.shape
    _, kv_heads, block_size, value_size = values.shape
    _write[(tokens, kv_heads)](
        key,
        value,
        keys,
        values,
        layout.table,
        layout.owners,
        layout.positions,
        layout.table.stride(0),
        *key.stride()[:2],
        *value.stride()[:2],
        KV_HEADS=kv_heads,
        SIZE=size,
        SIZE_PADDED=_padded_size(size),
        VALUE_SIZE=value_size,
        VALUE_PADDED=_padded_size(value_size),
        BLOCK_SIZE=block_size,
        num_warps=1,
        enable_fp_fusion=True,
    )
    output = torch.empty((tokens, heads, value_size), dtype=query.dtype, device=query.device)
    if layout.singles:
        _launch(query, keys, values, output, layout, False, scoring)
    if layout.tiles is not None:
        _launch(query, keys, values, output, layout, True, scoring)
    return output


def probe(device: torch.device) -> None:
    """Compile a kernel and run it. Raises what the compiler and the device do."""
    cache, new = (torch.zeros((1, 1, 1, 16), device=device) for _ in range(2))
    place = torch.zeros((1, 1), dtype=torch.int32, device=device)
    layout = PagedLayout(place, place[0].long(), place[0].long(), 1, None, 1)
    paged_attention(*(new[0],) * 3, cache, cache.clone(), layout, Scoring(1.0))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tokens_per_tile(group: int, size: int, dtype: torch.dtype) -> int:
    """Tokens of a prompt that one program computes: a power of two. ``group``: query heads that share a KV
    head; ``size``: of a head.

    The rows of a program, its tokens times its query heads, keep sums of ``size`` float32 in registers.
    """
    rows = 128 if size <= 128 else 64 if size <= 256 else 32
    if dtype == torch.float32:  # whose products have no matrix instructions, and take registers of their own
        rows = MIN_DOT_ROWS
    return max(1, rows // int(triton.next_power_of_2(group)))


def _launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    layout: PagedLayout,
    tiled: bool,
    scoring: Scoring,
) -> None:
    """Attend from the tokens that are tiles by themselves, or from those of the tiles."""
    total, heads, size = query.shape
    _, kv_heads, block_size, value_size = values.shape
    group = heads // kv_heads
    if tiled:
        assert layout.tiles is not None
        tiles, base, tokens = len(layout.tiles), layout.singles, tokens_per_tile(group, size, query.dtype)
    else:
        tiles, base, tokens = layout.singles, 0, 1
    grouped = max(int(triton.next_power_of_2(group)), MIN_DOT_ROWS // tokens)
    rows = total - base if tiled else tiles
    reaching = tiled and layout.reach is not None
    splits = _splits(tiles * kv_heads, layout.longest)
    sums = bounds = output  # unused without splits
    if splits > 1:
        sums = torch.empty((rows, heads, splits, value_size), dtype=torch.float32, device=query.device)
        bounds = torch.empty((rows, heads, splits, 2), dtype=torch.float32, device=query.device)
    _attend[(tiles, kv_heads, splits)](
        query,
        keys,
        values,
        output,
        sums,
        bounds,
        layout.table,
        layout.owners,
        layout.positions,
        layout.tiles if tiled else layout.owners,
        layout.reach if reaching else layout.owners,
        scoring.slopes if scoring.slopes is not None else output,
        scoring.sinks if scoring.sinks is not None else output,
        scoring.scale,
        layout.table.stride(0),
        base,
        splits,
        *query.stride()[:2],
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PADDED=grouped,
        TOKENS=tokens,
        SIZE=size,
        SIZE_PADDED=_padded_size(size),
        VALUE_SIZE=value_size,
        VALUE_PADDED=_padded_size(value_size),
        BLOCK_SIZE=block_size,
        WINDOW=scoring.window or 0,
        CHUNK=scoring.chunk or 0,
        SOFTCAP=scoring.softcap or 0.0,
        ALIBI=scoring.slopes is not None,
        SINKS=scoring.sinks is not None,
        TILED=tiled,
        REACHING=reaching,
        SPLIT=splits > 1,
        POSITIONS=_positions(max(size, value_size), query.element_size()),
        num_warps=8 if tokens * grouped >= 128 else 4,
        num_stages=2,
        enable_fp_fusion=True,  # its default depends on Triton's version
    )
    if splits > 1:
        _add_up[(rows, heads)](
            sums,
            bounds,
            output,
            base,
            splits,
            HEADS=heads,
            SIZE=value_size,
            SIZE_PADDED=_padded_size(value_size),
            MAX_SPLITS=MAX_SPLITS,
            enable_fp_fusion=True,
        )


def _splits(programs: int, longest: int) -> int:
    """Programs that share each history, where there are ``programs`` without: a power of two."""
    wanted = min(FILLING // programs, longest // MIN_SHARE, MAX_SPLITS)
    return 1 if wanted < 2 else 1 << (wanted.bit_length() - 1)


def _positions(size: int, element_bytes: int) -> int:
    """Those that a program reads per iteration."""
    return min(MAX_POSITIONS, max(FEWEST_POSITIONS, POSITION_BYTES // (_padded_size(size) * element_bytes)))


def _padded_size(size: int) -> int:
    return max(MIN_DOT_ROWS, int(triton.next_power_of_2(size)))
