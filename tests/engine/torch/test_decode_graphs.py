"""Decode steps in fixed buffers. Recordings on a CPU stand for CUDA graphs: they replay operators."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
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
from penstock.engine.torch.cuda import decode_graphs
from penstock.engine.torch.cuda.decode_graphs import DecodeBuffers, padded_sizes
from penstock.engine.torch.cuda.paged_layout import DeviceTables
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_loader import read_shape
from tests.engine.torch.harness import VOCAB, cpu_only, make_engine, make_model, run_all, submit
from tests.engine.torch.plain_kernel import KERNEL

pytestmark = cpu_only("test_captured_steps.py has the graphs of a GPU")

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


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    """Models record their decodes, as on a CUDA device."""
    made = Recordings()
    monkeypatch.setattr(model_module, "find_kernel", lambda device: KERNEL)
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


@pytest.mark.parametrize("kind", ["llama", "gemma2", "bloom", "qwen3_moe", "opt", "llama4"])
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
        found = recorded.run(batch, tokens, blocks, torch.from_numpy(rows))
        expected = usual.run(batch, tokens, blocks, torch.from_numpy(rows))
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
    assert model.attention.tables is not None


@torch.inference_mode()
def test_chunks_and_drafts_take_the_usual_path(tmp_path: Path, recordings: Recordings) -> None:
    make_model("llama", tmp_path)
    model = load(tmp_path)
    blocks = BlockTables(SLOTS, 199, BLOCK_SIZE, LENGTH)
    for count, drafts in (([1, 3], 0), ([1, 3], 1)):
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
        model.run(
            batch, torch.zeros(sum(count), dtype=torch.int64), blocks, torch.zeros(1, dtype=torch.int64)
        )
    assert recordings.replayed == 0


@torch.inference_mode()
def test_larger_batches_than_the_largest_size_take_the_usual_path(
    tmp_path: Path, recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "MAX_SIZE", 8)
    make_model("llama", tmp_path)
    model = load(tmp_path)
    blocks = BlockTables(SLOTS, 199, BLOCK_SIZE, LENGTH)
    random = np.random.default_rng(0)
    for count, replayed in ((9, 0), (8, 1)):
        batch = decodes(blocks, random, count)
        model.run(batch, torch.zeros(count, dtype=torch.int64), blocks, torch.arange(count))
        assert recordings.replayed == replayed


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
    def reads_positions(*arguments: Any) -> torch.Tensor:
        assert int(arguments[5].positions.max()) >= 0
        return KERNEL.attend(*arguments)

    monkeypatch.setattr(model_module, "find_kernel", lambda device: replace(KERNEL, attend=reads_positions))
    make_model("llama", tmp_path)
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path)
    assert [record.message for record in caplog.records] == [
        "decode steps run without CUDA graphs, as the model cannot be recorded: the host reads a tensor"
    ]
    blocks = BlockTables(SLOTS, 199, BLOCK_SIZE, LENGTH)
    batch = decodes(blocks, np.random.default_rng(0), 3)
    with torch.inference_mode():
        model.run(batch, torch.zeros(3, dtype=torch.int64), blocks, torch.arange(3))
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
    assert len(sizes) <= 67
    assert sizes[-1] == 1024
    assert all(next_size <= 2 * size for size, next_size in pairwise(sizes))


def test_padding_belongs_to_no_stream() -> None:
    tables = DeviceTables(3, 4, CPU)
    buffers = DecodeBuffers(4, tables, 32, CPU)
    tokens, rotary, layout = buffers.views(2)
    buffers.fill(4, torch.tensor([7, 8, 9]), np.array([0, 2, 1]), np.array([31, 30, 29]))
    buffers.fill(2, torch.tensor([5]), np.array([2]), np.array([9]))
    assert tokens[0] == 5
    assert rotary.tolist() == layout.positions.tolist() == [9, 0]
    buffers.fill(2, torch.tensor([5]), np.array([2]), np.array([9]), np.array([4]))
    assert (rotary.tolist(), layout.positions.tolist()) == ([4, 0], [9, 0])
    assert layout.owners.tolist() == [2, tables.null_row]
    assert (layout.singles, layout.tiles, layout.longest) == (2, None, 32)


def test_the_buffers_take_the_memory_that_they_state() -> None:
    buffers = DecodeBuffers(24, DeviceTables(24, 100, CPU), 1600, CPU)
    held = [value for value in vars(buffers).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in held) == 24 * 32
