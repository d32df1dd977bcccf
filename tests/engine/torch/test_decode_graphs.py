"""Decode steps in fixed buffers. Recordings on a CPU stand for CUDA graphs: they replay operators."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.config.serve import ServeConfig
from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import NULL_BLOCK, BlockTables
from penstock.engine.torch import model as model_module
from penstock.engine.torch.attention_metadata import CacheGeometry, DecodeMetadata
from penstock.engine.torch.cuda.decode_graphs import DecodeBuffers, padded_sizes
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_loader import read_shape
from tests.engine.torch.harness import VOCAB, make_engine, make_model, run_all, submit

CPU = torch.device("cpu")
SLOTS, BLOCK_SIZE, LENGTH = 20, 8, 64

READS = (
    torch.ops.aten.item.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
)
"""Operators with which the host waits for the device."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators. Like a capture it fails where the host reads a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise RuntimeError("the host reads a tensor\nwhile it is recorded")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class Recordings:
    """Replays recorded operators on the tensors of the recording."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        call()
        with Recorder() as recorder:
            output = call()
        self.recorded += 1

        def replay() -> torch.Tensor:
            self.replayed += 1
            for func, args, kwargs, result in recorder.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
            return output

        return replay


def masked_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decodes: DecodeMetadata,
    scaling: float,
    window: int | None,
    softcap: float | None,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    """What a kernel computes, over all blocks of the table; blocks behind a row's length are masked."""
    heads, kv_heads = query.shape[1], keys.shape[1]
    known, given = (
        cache[decodes.table].transpose(1, 2).flatten(2, 3).repeat_interleave(heads // kv_heads, 1)
        for cache in (keys, values)
    )
    scores = torch.einsum("nhd,nhld->nhl", query, known) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    distance = decodes.length[:, None] - 1 - torch.arange(known.shape[2])
    if slopes is not None:
        scores = scores - slopes.view(1, heads, 1) * distance[:, None]
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    weights = torch.softmax(scores.masked_fill(hidden[:, None], -torch.inf), -1)
    return torch.einsum("nhl,nhld->nhd", weights, given)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    """Models record their decodes, as on a CUDA device."""
    made = Recordings()
    monkeypatch.setattr(model_module, "find_kernel", lambda device: masked_decode)
    monkeypatch.setattr(model_module, "find_capture", lambda device: made)
    return made


def load(directory: Path, **options: Any) -> PagedModel:
    """A model with a cache of 200 blocks with random keys and values, the same for each call."""
    config = ServeConfig(max_num_seqs=SLOTS, max_model_len=LENGTH, **options)
    shape = read_shape(str(directory))
    model = PagedModel(str(directory), config, shape, dtype=torch.float32, device=CPU)
    model.make_cache(200, BLOCK_SIZE)
    torch.manual_seed(1)
    for cache in (*model.attention.keys, *model.attention.values):
        cache[NULL_BLOCK + 1 :] = torch.randn_like(cache[NULL_BLOCK + 1 :])
    return model


def decodes(blocks: BlockTables, random: np.random.Generator, count: int) -> Batch:
    slots = random.permutation(SLOTS)[:count].astype(np.intp)
    start = np.sort(random.integers(0, LENGTH, count)).astype(np.int32)
    blocks.allocate(slots, blocks.missing(slots, start + 1))
    everyone = np.arange(count)
    return Batch(
        slots=slots,
        start=start,
        count=np.ones(count, np.int32),
        singles=count,
        decodes=count,
        samples=everyone,
        generations=np.zeros(count, np.int64),
    )


@pytest.mark.parametrize("kind", ["llama", "gemma2", "bloom", "qwen3_moe", "opt"])
@torch.inference_mode()
def test_recorded_decodes_are_those_of_the_usual_path(
    kind: str, tmp_path: Path, recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(kind, tmp_path)
    recorded = load(tmp_path)
    assert recordings.recorded == len(padded_sizes(SLOTS)) == 6
    monkeypatch.setattr(model_module, "find_capture", lambda device: None)
    usual = load(tmp_path)
    blocks = BlockTables(SLOTS, 199, BLOCK_SIZE, LENGTH)
    random = np.random.default_rng(4)
    counts = [1, 20, 3, 7, 8, 9, 2, 16, 17, 1]
    for count in counts:
        batch = decodes(blocks, random, count)
        tokens = torch.from_numpy(random.integers(0, VOCAB, count))
        rows = random.permutation(count)[: max(1, count - 2)]
        found = recorded.run(batch, tokens, blocks, rows)
        expected = usual.run(batch, tokens, blocks, rows)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for layer in range(2):
            for cache, other in (
                (recorded.attention.keys[layer], usual.attention.keys[layer]),
                (recorded.attention.values[layer], usual.attention.values[layer]),
            ):
                torch.testing.assert_close(cache[1:], other[1:], rtol=1e-4, atol=1e-5)
                assert cache[NULL_BLOCK].isfinite().all()
    assert recordings.replayed == len(counts)


def test_an_eager_engine_records_nothing(tmp_path: Path, recordings: Recordings) -> None:
    make_model("llama", tmp_path)
    model = load(tmp_path, enforce_eager=True)
    assert recordings.recorded == 0
    assert model.attention.geometry.in_place


@torch.inference_mode()
def test_chunks_drafts_and_large_batches_take_the_usual_path(tmp_path: Path, recordings: Recordings) -> None:
    make_model("llama", tmp_path)
    model = load(tmp_path)
    blocks = BlockTables(SLOTS + 1, 199, BLOCK_SIZE, LENGTH)
    for count, drafts in (([1, 3], 0), ([1, 3], 1), ([1] * (SLOTS + 1), 0)):
        slots = np.arange(len(count), dtype=np.intp)
        batch = Batch(
            slots=slots,
            start=np.zeros(len(count), np.int32),
            count=np.array(count, np.int32),
            singles=count.count(1),
            decodes=count.count(1) + drafts,
            samples=slots,
            generations=np.zeros(len(count), np.int64),
        )
        blocks.allocate(slots, blocks.missing(slots, batch.start + batch.count))
        model.run(batch, torch.zeros(sum(count), dtype=torch.int64), blocks, slots[:1])
    assert recordings.replayed == 0


def test_streams_get_the_same_tokens(tmp_path: Path, recordings: Recordings) -> None:
    """Streams come and go, batches are launched ahead of the tokens before them, and after a sleep the graphs
    are recorded again."""
    make_model("llama", tmp_path)
    random = np.random.default_rng(5)
    requests = [
        submit(stream, random.integers(3, VOCAB, random.integers(1, 40)).tolist(), max_tokens=5 + stream)
        for stream in range(11)
    ]
    options: dict[str, Any] = {"max_num_seqs": 9, "max_num_batched_tokens": 32, "max_model_len": 128}
    engine = make_engine(tmp_path, async_scheduling="on", **options)
    recorded = recordings.recorded
    assert recorded == len(padded_sizes(9)) == 5
    first = run_all(engine, requests)
    assert recordings.replayed > 10
    engine.call("sleep", {"level": 1})
    engine.call("wake_up", {})
    assert recordings.recorded == 2 * recorded
    replayed = recordings.replayed
    again = run_all(engine, requests)
    assert recordings.replayed > replayed + 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "find_capture", lambda device: None)
        patch.setattr(model_module, "find_kernel", lambda device: None)
        usual = run_all(make_engine(tmp_path, **options), requests)
    tokens = {stream: outcome.tokens for stream, outcome in usual.items()}
    for outcomes in (first, again):
        assert {stream: outcome.tokens for stream, outcome in outcomes.items()} == tokens


def test_a_model_that_cannot_be_recorded_is_served_without(
    tmp_path: Path, recordings: Recordings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def reads_lengths(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        assert int(arguments[2].length.max()) > 0
        return masked_decode(query, *arguments)

    monkeypatch.setattr(model_module, "find_kernel", lambda device: reads_lengths)
    make_model("llama", tmp_path)
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path)
    assert [record.message for record in caplog.records] == [
        "decode steps run without CUDA graphs, as the model cannot be recorded: the host reads a tensor"
    ]
    blocks = BlockTables(SLOTS, 199, BLOCK_SIZE, LENGTH)
    batch = decodes(blocks, np.random.default_rng(0), 3)
    with torch.inference_mode():
        model.run(batch, torch.zeros(3, dtype=torch.int64), blocks, np.arange(3))
    assert recordings.replayed == 0


def test_the_usual_path_without_a_kernel(tmp_path: Path, recordings: Recordings) -> None:
    make_model("llama", tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "find_kernel", lambda device: None)
        load(tmp_path)
    assert recordings.recorded == 0


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (4, [1, 2, 4]), (20, [1, 2, 4, 8, 16, 20]), (64, [1, 2, 4, *range(8, 65, 8)])],
)
def test_sizes(most: int, sizes: list[int]) -> None:
    assert padded_sizes(most) == sizes


def test_sizes_are_few_and_waste_little() -> None:
    sizes = padded_sizes(100_000)
    assert len(sizes) <= 51
    assert sizes[-1] == 512
    assert all(next_size <= 2 * size for size, next_size in pairwise(sizes))


def test_padding_writes_to_the_null_block_and_reads_one_position_of_it() -> None:
    geometry = CacheGeometry(2, 8, 1 << 20, in_place=True)
    buffers = DecodeBuffers(4, 4, geometry, CPU)
    blocks = BlockTables(3, 20, BLOCK_SIZE, 32)
    slots = np.array([0, 2, 1])
    blocks.allocate(slots, np.array([4, 4, 4], np.int32))
    everything = np.array([31, 30, 29])
    buffers.fill(4, torch.tensor([7, 8, 9]), slots, everything, blocks)
    tokens, positions, layout = buffers.views(2)
    buffers.fill(2, torch.tensor([5]), slots[1:2], np.array([9]), blocks)
    assert layout.decodes is not None
    assert layout.parts == []
    assert tokens[0] == 5
    assert positions.tolist() == [9, 0]
    assert layout.decodes.length.tolist() == [10, 1]
    assert layout.decodes.table[0, :2].tolist() == blocks.table[2, :2].tolist()
    assert layout.decodes.table[1, 0] == NULL_BLOCK
    block = int(blocks.table[2, 1])
    own = [(block * 2 + head) * BLOCK_SIZE + 1 for head in range(2)]
    assert layout.writes.tolist() == [*own, 0, BLOCK_SIZE]


def test_the_buffers_take_the_memory_that_they_state() -> None:
    buffers = DecodeBuffers(24, 100, CacheGeometry(8, 128, 1, in_place=True), CPU)
    held = [value for value in vars(buffers).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in held) == 24 * (24 + 8 * 8 + 4 * 100)
