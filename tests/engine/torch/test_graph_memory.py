"""The memory of CUDA graphs is measured with two recordings, and part of the budget of the KV cache."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.engine.torch import engine as engine_module
from penstock.engine.torch import memory as memory_module
from penstock.engine.torch.cuda.decode_graphs import padded_sizes
from penstock.engine.torch.cuda.graph_memory import measure_graphs
from penstock.engine.torch.device import DevicePlace
from penstock.engine.torch.largest_step import run_largest_steps
from penstock.engine.torch.memory import CudaMemory
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_loader import read_shape
from penstock.engine.torch.sampling.penalties import TokenCounts
from tests.engine.torch.harness import DEVICE, SMALL_ENGINE, VOCAB, make_engine, make_model, run_all, submit
from tests.engine.torch.test_decode_graphs import Recordings, recordings
from tests.engine.torch.test_memory import CUDA, CountingDevice

__all__ = ["recordings"]

POOL, DRIVER, OUTPUT, KEPT = 200, 2, 1, 90
"""What all graphs compute in; of the driver, for each; tensors that stay, for each row; pieces that the
allocator keeps after a recording."""
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Pool:
    """Graphs on a device that counts."""

    def __init__(self, device: CountingDevice) -> None:
        self.device = device
        self.sizes: list[int] = []

    def record(self, size: int) -> None:
        if not self.sizes:
            self.device.tensors += POOL
        self.sizes.append(size)
        self.device.tensors += OUTPUT * size
        self.device.driver += DRIVER
        self.device.kept = KEPT

    def free(self) -> None:
        self.device.tensors -= POOL + OUTPUT * sum(self.sizes)
        self.device.driver -= DRIVER * len(self.sizes)
        self.sizes = []


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("most", [1, 2, 20, 200])
def test_two_recordings_tell_what_all_take(most: int, shared: bool) -> None:
    sizes = padded_sizes(most)
    device = CountingDevice(weights=0, shared=shared)
    pool = Pool(device)

    def record(capture: Callable[[Any], Any], some: list[int]) -> Any:
        for size in reversed(some):
            capture(lambda size=size: pool.record(size))
        return pool

    found = measure_graphs(record, lambda call: call(), sizes, device)  # type: ignore[arg-type,func-returns-value]
    assert pool.sizes == sizes[:-3:-1]
    pool.free()
    device.release()
    before = device.in_use()
    record(lambda call: call(), sizes)
    device.release()
    assert found == device.in_use() - before


def test_nothing_is_measured_where_nothing_can_be_recorded() -> None:
    device = CountingDevice()
    assert measure_graphs(lambda capture, sizes: None, lambda call: call, [1, 2], device) is None


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Engines measure on a device that counts 5 bytes for each recording; returns recordings and bytes."""
    budgets: list[tuple[int, int]] = []

    def budget(
        config: ServeConfig, place: DevicePlace, run: Any, graph_bytes: Any, later: int, memory: Any = None
    ) -> int:
        device = CountingDevice()

        def counted_bytes(memory: Any) -> int:
            recorded: Recordings = engine_module.PagedModel.graph_bytes.__globals__["find_capture"](CUDA)
            before = recorded.recorded
            device.in_use = lambda: 5 * recorded.recorded  # type: ignore[method-assign]
            found: int = graph_bytes(device)
            budgets.append((recorded.recorded - before, found))
            return found

        memory_module.cache_budget(config, DevicePlace(CUDA, 1), run, counted_bytes, 0, device)
        assert later == TokenCounts.most_bytes(config.max_num_seqs, VOCAB)
        return 32 << 20

    monkeypatch.setattr(engine_module, "cache_budget", budget)
    return budgets


def test_an_engine_counts_the_graphs_of_its_models_and_drops_these_recordings(
    tmp_path: Path, recordings: Recordings, counted: list[tuple[int, int]]
) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    make_model("llama", target)
    make_model("llama", draft, num_hidden_layers=1, max_position_embeddings=64)
    options: dict[str, Any] = {"max_num_seqs": 9, "kv_cache_memory": None, "max_num_batched_tokens": 128}
    make_engine(target, **options)
    sizes = len(padded_sizes(9))
    assert counted == [(2, 5 * sizes)]
    assert recordings.recorded == 2 + sizes
    speculation = {"speculative_method": "draft", "draft_model": str(draft), "draft_dir": str(draft)}
    engine = make_engine(target, **options, **speculation)
    assert counted[1:] == [(4, 2 * 5 * sizes)]
    assert recordings.recorded == 2 + sizes + 4 + 2 * sizes
    assert run_all(engine, [submit(0, [5, 6, 7], max_tokens=6)])[0].tokens
    make_engine(target, **options, enforce_eager=True)
    assert counted[2:] == [(0, 0)]


def test_a_model_that_cannot_be_recorded_is_tried_once(
    tmp_path: Path,
    recordings: Recordings,
    counted: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(call: Any) -> None:
        raise RuntimeError("the host reads a tensor")

    monkeypatch.setattr(Recordings, "__call__", lambda self, call: refuse(call))
    make_model("llama", tmp_path)
    with caplog.at_level(logging.WARNING):
        make_engine(tmp_path, max_num_seqs=4, kv_cache_memory=None, max_num_batched_tokens=128)
    assert counted == [(0, 0)]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("in_context", [False, True])
def test_no_memory_for_a_recording_ends_the_start(
    tmp_path: Path, recordings: Recordings, monkeypatch: pytest.MonkeyPatch, in_context: bool
) -> None:
    def refuse(self: Recordings, call: Any) -> None:
        try:
            raise torch.OutOfMemoryError(FULL)
        except torch.OutOfMemoryError:
            if in_context:  # as the end of a capture does
                raise RuntimeError("CUDA error: operation failed due to a previous error")  # noqa: B904
            raise

    monkeypatch.setattr(Recordings, "__call__", refuse)
    make_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"out of memory while recording CUDA graphs .* lower --kv-cache"):
        make_engine(tmp_path, max_num_seqs=4)


@pytest.mark.parametrize("failing", [0, 1])
def test_no_memory_for_a_recording_leaves_all_models_asleep(
    tmp_path: Path, recordings: Recordings, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    make_model("llama", target)
    make_model("llama", draft, num_hidden_layers=1)
    speculation = {"speculative_method": "draft", "draft_model": str(draft), "draft_dir": str(draft)}
    engine = make_engine(target, max_num_seqs=9, max_num_batched_tokens=128, **speculation)
    requests = [submit(0, [5, 6, 7], max_tokens=9, presence_penalty=1.0)]
    before = run_all(engine, requests)[0].tokens
    engine.call("sleep", {"level": 1})
    models = engine._models
    assert engine._runner.sampler._token_counts._counts.numel() == 0
    sizes = recordings.recorded // 2
    caches = []

    def refuse(self: Recordings, call: Any) -> Any:
        if self.recorded == 2 * sizes + failing * sizes + 2:
            caches.extend(
                weakref.ref(cache) for model in models if model._attention for cache in model._attention.keys
            )
            raise torch.OutOfMemoryError(FULL)
        return record(self, call)

    record = Recordings.__call__
    with monkeypatch.context() as patch:
        patch.setattr(Recordings, "__call__", refuse)
        with pytest.raises(ConfigError, match="out of memory while recording CUDA graphs"):
            engine.call("wake_up", {})
        assert len(caches) == 2 + failing
        assert not any(cache() is not None for cache in caches), "their memory is not free"
    assert all(model._attention is model._graphs is model._head is None for model in models)
    recordings.recorded = recordings.replayed = 0
    engine.call("wake_up", {})
    assert recordings.recorded == 2 * sizes
    assert run_all(engine, requests)[0].tokens == before
    assert recordings.replayed


def test_penalties_take_no_more_than_is_kept_for_them(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    engine = make_engine(tmp_path, max_num_seqs=20)
    for first in (0, 30):
        run_all(
            engine,
            [submit(stream, range(10, 290), presence_penalty=1.0) for stream in range(first, first + 30)],
        )
    counts = engine._runner.sampler._token_counts
    held = [counts._counts, counts._tokens, counts._listed]
    assert counts._rows == 20
    assert sum(tensor.nbytes for tensor in held) == TokenCounts.most_bytes(20, VOCAB)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="measures a GPU")
def test_the_graphs_of_a_gpu_take_what_was_measured(tmp_path: Path) -> None:
    """As far as PyTorch's allocator has it: other tests may run on the device."""
    make_model("llama", tmp_path, hidden_size=512, intermediate_size=2048)
    config = ServeConfig(**SMALL_ENGINE | {"max_num_seqs": 256})
    shape = read_shape(str(tmp_path))
    model = PagedModel(str(tmp_path), config, shape, dtype=torch.bfloat16, device=DEVICE)
    memory = CudaMemory(DevicePlace(DEVICE, 2))
    run_largest_steps([model], config, 1024, DEVICE)
    expected = model.graph_bytes(memory)
    memory.release()
    before = memory.in_use()
    model.make_cache(1, 16)
    memory.release()
    taken = memory.in_use() - before
    assert taken > 0
    assert taken - (24 << 20) <= expected <= taken + (64 << 20)
