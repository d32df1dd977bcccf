"""The Triton kernels against attention written out: compiled on a GPU, in Triton's interpreter on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.torch import model as model_module
from penstock.engine.torch.attention import Kernel, find_kernel
from penstock.engine.torch.attention_metadata import Scoring, token_positions
from penstock.engine.torch.cuda import paged_layout
from penstock.engine.torch.cuda.paged_layout import DeviceTables, PagedLayout
from penstock.engine.torch.memory import zeros
from tests.engine.torch.harness import DEVICE, VOCAB, make_engine, make_model, run_all, submit
from tests.engine.torch.plain_kernel import paged_attention as plain
from tests.engine.torch.test_attention import make_batch

kernels = pytest.importorskip("penstock.engine.torch.cuda.kernels")

pytestmark = pytest.mark.gpu

HALF = {torch.bfloat16: 4e-2, torch.float16: 3e-3}
"""What results may differ by, of which most comes of the rounding of scores."""
DTYPES = [torch.float32, *HALF] if DEVICE.type == "cuda" else [torch.float32]
LONGEST = 700
LONG = [(290, 1), (128, 70), (600, 33)] if DEVICE.type == "cuda" else []
PARTS = [(0, 1), (33, 1), (139, 1), *LONG, (3, 5), (60, 2), (0, 40), (16, 16), (290, 20)]
"""Start and count: decodes, drafts, prompts; the interpreter takes a second for each long one."""


class Step:
    """A step over a cache with random keys and values, and its layout."""

    def __init__(
        self,
        parts: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        size: int,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        scale: float = 1.0,
    ) -> None:
        torch.manual_seed(0)
        batch = make_batch(parts, drafts=2)
        blocks = BlockTables(len(parts), len(parts) * -(-LONGEST // block_size), block_size, LONGEST)
        order = np.random.default_rng(0).permutation(len(parts))
        for position in range(0, LONGEST, block_size):  # blocks are scattered over the cache
            waits = order[(batch.start + batch.count > position)[np.argsort(batch.slots)][order]]
            blocks.allocate(waits, np.ones(len(waits), np.int32))
        tables = DeviceTables(len(parts), blocks.table.shape[1], DEVICE)
        positions = torch.from_numpy(token_positions(batch)).to(DEVICE)
        owners = torch.from_numpy(np.repeat(batch.slots, batch.count)).to(DEVICE)
        tile = kernels.tokens_per_tile(heads // kv_heads, size, dtype)
        self.layout = tables.layout(batch, owners, positions, blocks, tile)
        self.cache = torch.randn(2, blocks.blocks + 1, kv_heads, block_size, size).to(DEVICE, dtype)
        tokens = len(positions)
        # as a model gives them: heads before tokens, and keys and values in one product
        self.query = (torch.randn(heads, tokens, size) * scale).to(DEVICE, dtype).transpose(0, 1)
        self.key, self.value = torch.randn(tokens, 2, kv_heads, size).to(DEVICE, dtype).unbind(1)

    def run(
        self,
        kernel: object,
        window: int | None = None,
        softcap: float | None = None,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        layout: PagedLayout | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output, and the cache afterwards."""
        assert callable(kernel)
        cache = self.cache.clone()
        tensors = (self.query, self.key, self.value, *cache)
        scaling = 0.7 * self.query.shape[-1] ** -0.5
        scoring = Scoring(scaling, window, softcap, slopes, sinks)
        return kernel(*tensors, layout or self.layout, scoring), cache


def assert_close(found: Tensor, step: Step, *options: Any) -> None:
    """To what attention written out gives in float32."""
    for name in ("query", "key", "value", "cache"):
        setattr(step, name, getattr(step, name).float())
    expected, _ = step.run(plain, *options)
    rtol, atol = (1e-4, 1e-5) if found.dtype == torch.float32 else (HALF[found.dtype],) * 2
    torch.testing.assert_close(found.float(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [7, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("window", "softcap", "alibi", "sinks"),
    [
        (None, None, False, None),
        (20, None, False, [-1.0, 0.0, 2.0, 30.0]),
        (None, 3.0, False, None),
        (300, 3.0, True, None),
    ],
)
def test_a_step_is_what_it_has_to_be(
    block_size: int,
    window: int | None,
    softcap: float | None,
    alibi: bool,
    sinks: list[float] | None,
    dtype: torch.dtype,
) -> None:
    step = Step(PARTS, 4, 2, 24, block_size=block_size, dtype=dtype)
    slopes = torch.rand(2, 2).to(DEVICE) if alibi else None
    scores = None if sinks is None else torch.tensor(sinks, dtype=dtype, device=DEVICE)
    found, cache = step.run(kernels.paged_attention, window, softcap, slopes, scores)
    _, written = step.run(plain, window, softcap)
    assert torch.equal(cache, written)
    assert not torch.equal(cache, step.cache)
    assert_close(found, step, window, softcap, slopes, scores)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, 3.0)])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    step = Step([(290, 1), (3, 5), (60, 40)], 4, 2, 64, dtype=dtype)
    found, _ = step.run(kernels.paged_attention, window, softcap)
    assert_close(found, step, window, softcap)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [
        (1, 1, 8),
        (48, 1, 16),
        (71, 1, 8),
        (14, 2, 64),
        (2, 2, 64),
        (6, 2, 80),
        (3, 3, 96),
        (4, 2, 128),
        (7, 1, 128),
        (4, 2, 192),
        (2, 1, 256),
    ],
)
def test_head_sizes_and_groups(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    step = Step([(140, 1), (3, 5), (60, 10)], heads, kv_heads, size, dtype=dtype)
    found, _ = step.run(kernels.paged_attention)
    assert_close(found, step)


@pytest.mark.parametrize(("window", "filling"), [(None, 512), (20, 1)])
def test_a_token_of_a_picture_attends_to_all_of_it(
    window: int | None, filling: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over several tiles, and beyond a tile's own tokens by more than an iteration; history in two shares."""
    monkeypatch.setattr(kernels, "FILLING", filling)
    step = Step([(33, 1), (3, 5), (480, 36)], 4, 2, 16)
    reach = step.layout.positions.clone()
    reach[(reach >= 482) & (reach < 515)] = 514
    layout = replace(step.layout, reach=reach)
    found, _ = step.run(kernels.paged_attention, window, layout=layout)
    expected, _ = step.run(plain, window, layout=layout)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, step.run(plain, window)[0], atol=1e-3)


@pytest.mark.parametrize("chunk", [24, 300])
def test_a_token_attends_to_its_own_chunk(chunk: int) -> None:
    """Decodes, drafts and prompts in one chunk and over several; two programs share 600 positions."""
    step = Step([(23, 1), (24, 1), (600, 1), (20, 9), (280, 40)], 4, 2, 16)
    tensors = (step.query, step.key, step.value)
    found, expected = (
        attend(*tensors, *step.cache.clone(), step.layout, Scoring(0.5, chunk=chunk))
        for attend in (kernels.paged_attention, plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "value_size", "filling"), [(24, 12, 512), (16, 40, 1)])
def test_values_of_another_size_than_keys(
    size: int, value_size: int, filling: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention to some columns of the values is those columns of the attention to all."""
    monkeypatch.setattr(kernels, "FILLING", filling)
    wide, kept = max(size, value_size), slice(value_size)
    step = Step([(600, 1), (3, 5), (60, 20)], 2, 2, wide)
    step.query[..., size:] = step.key[..., size:] = 0
    step.cache[0, ..., size:] = 0
    expected, written = step.run(plain)
    keys, values = step.cache[0, ..., :size].contiguous(), step.cache[1, ..., kept].contiguous()
    found = kernels.paged_attention(
        step.query[..., :size],
        step.key[..., :size],
        step.value[..., kept],
        keys,
        values,
        step.layout,
        Scoring(0.7 * wide**-0.5),
    )
    torch.testing.assert_close(found, expected[..., kept], rtol=1e-4, atol=1e-5)
    assert torch.equal(keys, written[0, ..., :size])
    assert torch.equal(values, written[1, ..., kept])


@pytest.mark.parametrize(("window", "sinks"), [(None, None), (20, [-1.0, 0.0, 2.0, 30.0])])
@pytest.mark.parametrize("filling", [1, 512])
def test_programs_that_share_a_history_give_what_one_does(
    filling: int, window: int | None, sinks: list[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A history of 650 positions is shared by two programs where fewer than FILLING have work."""
    monkeypatch.setattr(kernels, "FILLING", filling)
    assert (kernels._splits(1, LONGEST) > 1) == (filling > 1)
    for parts in ([(650, 1), (1, 1)], [(600, 40), (0, 3)], PARTS):
        step = Step(parts, 4, 2, 16)
        options = window, None, None, None if sinks is None else torch.tensor(sinks, device=DEVICE)
        found, _ = step.run(kernels.paged_attention, *options)
        torch.testing.assert_close(found, step.run(plain, *options)[0], rtol=1e-4, atol=1e-5)


def test_more_programs_than_a_history_has_positions() -> None:
    step = Step([(20, 1), (0, 1)], 4, 2, 16)
    layout = replace(step.layout, longest=1 << 20)
    assert kernels._splits(4, layout.longest) == 32
    found, _ = step.run(kernels.paged_attention, layout=layout)
    torch.testing.assert_close(found, step.run(plain)[0], rtol=1e-4, atol=1e-5)


def test_addresses_beyond_32_bits() -> None:
    """The last block of a cache of more than 2**31 elements, of which only written pages are in memory."""
    blocks, kv_heads, block_size, size = (1 << 31) // (16 * 64) + 8, 1, 16, 64
    keys, values = (zeros((blocks, kv_heads, block_size, size), torch.float16, DEVICE) for _ in range(2))
    table = torch.full((3, 2), blocks - 1, dtype=torch.int32, device=DEVICE)
    owners, positions = torch.tensor([1], device=DEVICE), torch.tensor([3], device=DEVICE)
    layout = PagedLayout(table, owners, positions, 1, None, 4)
    query, key, value = torch.randn(3, 1, 1, size).to(DEVICE, torch.float16).unbind()
    found = kernels.paged_attention(query, key, value, keys, values, layout, Scoring(0.5, 1))
    torch.testing.assert_close(found, value)
    assert torch.equal(keys[blocks - 1, 0, 3], key[0, 0])


def test_the_null_layout_reads_one_position_of_the_null_block() -> None:
    tables = DeviceTables(3, 4, DEVICE)
    tables.table[:3] = 9
    layout = tables.null_layout(2, 3, 500)
    cache = torch.zeros(2, 1, 2, 16, 8, device=DEVICE)
    query, key, value = (torch.randn(5, heads, 8, device=DEVICE) for heads in (4, 2, 2))
    found = kernels.paged_attention(query, key, value, *cache, layout, Scoring(1.0))
    assert found.isfinite().all()
    assert cache[0, 0, :, 0].abs().sum() > 0
    assert cache[:, 0, :, 1:].abs().sum() == 0


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_half_precision_rounds_scores_like_eager_attention(softcap: float | None) -> None:
    """The rounding of wide scores is most of eager attention's error, and the kernel has the same."""
    step = Step([(40, 1), (90, 1), (3, 5), (60, 40)], 4, 2, 64, dtype=torch.float16, scale=4.0)
    found, _ = step.run(kernels.paged_attention, None, softcap)
    rounded, _ = step.run(_rounding, None, softcap)
    for name in ("query", "key", "value", "cache"):
        setattr(step, name, getattr(step, name).float())
    exact, _ = step.run(plain, None, softcap)
    assert (found.float() - rounded.float()).abs().mean() < 0.5 * (exact - rounded.float()).abs().mean()


def _rounding(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: PagedLayout,
    scoring: Scoring,
) -> Tensor:
    """transformers' eager attention, a token at a time."""
    from tests.engine.torch.test_attention import eager

    plain(query, key, value, keys, values, layout, scoring)
    rows = []
    for token, (owner, position) in enumerate(zip(layout.owners, layout.positions.tolist(), strict=True)):
        history = torch.stack(
            [
                cache[layout.table[owner].long()].transpose(0, 1).flatten(1, 2)[:, : position + 1]
                for cache in (keys, values)
            ]
        )
        rows.append(eager(query[token][:, None], history, position, scoring.scale, scoring.softcap)[0])
    return torch.stack(rows)


def test_blocks_are_copied_once_and_again_when_a_row_was_emptied() -> None:
    blocks = BlockTables(3, 20, 16, 160)
    tables = DeviceTables(3, 10, DEVICE)
    slots = np.array([2, 0])
    blocks.allocate(slots, np.array([3, 2], np.int32))
    tables.copy_new(blocks, slots)
    tables.table[0, 0] = 77  # a mark that a second copy would overwrite
    blocks.allocate(np.array([0]), np.array([2], np.int32))
    tables.copy_new(blocks, slots)
    assert tables.table[0, :4].tolist() == [77, *blocks.table[0, 1:4].tolist()]
    assert tables.table[2, :3].tolist() == blocks.table[2, :3].tolist()
    blocks.free(blocks.take_blocks(0))
    blocks.allocate(np.array([0]), np.array([4], np.int32))
    tables.copy_new(blocks, slots)
    assert tables.table[0, :4].tolist() == blocks.table[0, :4].tolist()
    assert tables.table[tables.null_row].tolist() == [0] * 10


def test_a_copy_with_shorter_rows_takes_what_fits() -> None:
    """A draft model that has fewer positions than the model."""
    blocks = BlockTables(2, 20, 16, 160)
    tables = DeviceTables(2, 3, DEVICE)
    slots = np.arange(2)
    blocks.allocate(slots, np.array([5, 4], np.int32))
    tables.copy_new(blocks, slots)
    assert tables.table[:2].tolist() == blocks.table[:, :3].tolist()
    assert tables.table[tables.null_row].tolist() == [0, 0, 0]


def test_tiles_hold_every_token_and_start_with_the_longest_histories() -> None:
    batch = make_batch(PARTS, drafts=2)
    tiles = paged_layout.cut_tiles(batch, 16)
    found = [first + token for first, count in tiles.tolist() for token in range(count)]
    assert sorted(found) == list(range(batch.singles, int(batch.count.sum())))
    ends = token_positions(batch)[tiles[:, 0] + tiles[:, 1] - 1]
    assert (np.diff(ends) <= 0).all()
    owners = np.repeat(batch.slots, batch.count)
    assert all((owners[first : first + count] == owners[first]).all() for first, count in tiles.tolist())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("gemma2", {}),  # windows and soft caps
        ("bloom", {}),  # ALiBi
        ("gpt_bigcode", {}),  # one KV head
        ("llama", {"speculative_method": "ngram", "async_scheduling": "off"}),
        ("llama", {"async_scheduling": "on", "max_num_seqs": 2}),
    ],
    ids=str,
)
def test_an_engine_with_kernels_gives_the_tokens_of_one_without(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside decodes, cached prefixes, slots that streams leave to others."""
    make_model(kind, tmp_path, num_hidden_layers=2 if kind == "gemma2" else 1)
    random = np.random.default_rng(3)
    prefix = random.integers(3, VOCAB, 20).tolist()
    prompts = [prefix + random.integers(3, VOCAB, length).tolist() for length in (1, 7, 20)] + [
        prefix[:5] * 4
    ]
    requests = [submit(stream, prompt, max_tokens=5) for stream, prompt in enumerate(prompts)]
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_model_len": 96} | options
    monkeypatch.setattr(model_module, "find_kernel", lambda device: None)
    usual = run_all(make_engine(tmp_path, **options), requests)
    used = []

    def attend(*arguments: Any) -> Tensor:
        used.append(arguments)
        return kernels.paged_attention(*arguments)

    found = Kernel(attend, kernels.tokens_per_tile)
    monkeypatch.setattr(model_module, "find_kernel", lambda device: found)
    monkeypatch.setattr(model_module, "FILLING", 0)  # the interpreter compiles nothing
    engine = make_engine(tmp_path, **options)
    warmed = len(used)
    outcomes = run_all(engine, requests)
    assert len(used) > warmed > 0
    assert {stream: each.tokens for stream, each in outcomes.items()} == {
        stream: each.tokens for stream, each in usual.items()
    }


def test_kernels_that_cannot_be_compiled_are_a_mistake_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify")

    monkeypatch.setattr(kernels, "probe", fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ConfigError, match=r"a C compiler.*: Failed to find C compiler. Please specify$"):
        find_kernel(torch.device("cuda"))


def test_the_probe_runs_a_kernel() -> None:
    kernels.probe(DEVICE)


def test_an_old_gpu_runs_without_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert find_kernel(torch.device("cuda")) is None
    assert "compute capability 7.5, and they need 8.0" in caplog.text
