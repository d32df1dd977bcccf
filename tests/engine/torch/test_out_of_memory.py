"""A device without memory for a step: streams wait for smaller ones, and get the same tokens."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.config.errors import ConfigError
from penstock.engine.schedule.device_memory_shortage import GROW_STEPS, MAX_TRIES
from penstock.engine.torch import engine as engine_module
from penstock.engine.torch.draft.draft_model import PAUSE
from penstock.engine.torch.engine import NO_MEMORY, TorchEngine
from penstock.engine.torch.out_of_memory import is_out_of_memory, stating_shortage
from penstock.engine.torch.sampling.penalties import TokenCounts
from penstock.logging_setup import RateLimitedLog
from tests.engine.torch.adapters import load, submit_to, train
from tests.engine.torch.harness import (
    DEVICE,
    Driver,
    assert_alike,
    generate,
    make_engine,
    make_model,
    run_all,
    submit,
)
from tests.engine.torch.test_speculation import (
    FEW_BLOCKS,
    MIXES,
    Family,
    assert_all_free,
    assert_same,
    mixes,
)

CPU = torch.device("cpu")
OUTPUT = 12
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture
def llama(tmp_path: Path) -> transformers.PreTrainedModel:
    return make_model("llama", tmp_path)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("llama", tmp_path_factory.mktemp("family"))


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    log = RateLimitedLog(logging.getLogger(engine_module.__name__))
    monkeypatch.setattr(engine_module, "_log_shortage", log)


def limit_memory(engine: TorchEngine, lacks: Callable[[torch.Tensor], bool], model: int = 0) -> list[int]:
    """Have the model's first layer find no memory; returns the sizes of the batches that it was given."""
    sizes: list[int] = []

    def refuse(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        tokens = arguments[0]
        sizes.append(tokens.numel())
        if lacks(tokens):
            raise torch.OutOfMemoryError(FULL)

    engine._models[model]._model.get_input_embeddings().register_forward_pre_hook(refuse)
    return sizes


@pytest.mark.parametrize("ahead", ["on", "off"])
@pytest.mark.parametrize("most", [1, 2, pytest.param(7, marks=pytest.mark.gpu), 40])
def test_streams_get_the_same_tokens_in_steps_that_fit(
    llama: transformers.PreTrainedModel, tmp_path: Path, most: int, ahead: str
) -> None:
    prompts = [[5, 9, 200, 17], [40 + token for token in range(90)], [3], [250, 251, 252]] * 3
    options = {"block_size": 4, "max_num_batched_tokens": 64, "enforce_eager": True}
    engine = make_engine(tmp_path, async_scheduling=ahead, **options)
    sizes = limit_memory(engine, lambda tokens: tokens.numel() > most)
    outcomes = run_all(
        engine, [submit(stream, prompt, max_tokens=OUTPUT) for stream, prompt in enumerate(prompts)]
    )
    assert not any(outcome.error for outcome in outcomes.values())
    alone = [generate(llama, prompt, OUTPUT) for prompt in prompts[:4]]
    expected = dict(enumerate(alone * 3))
    assert_alike(expected, {stream: outcome.tokens for stream, outcome in outcomes.items()})
    assert_all_free(engine)
    failed = sum(size > most for size in sizes)
    assert 0 < failed < len(sizes) / 2, "most steps fit"


@pytest.mark.parametrize(
    ("method", "options"),
    [
        pytest.param("ngram", {}, marks=pytest.mark.slow),
        ("none", {"async_scheduling": "on"}),
        ("draft", {"kv_cache_memory": FEW_BLOCKS}),
    ],
)
def test_no_mix_of_sampling_changes(family: Family, method: str, options: dict[str, Any]) -> None:
    """Penalties, logprobs, grammars, bans, drafts; every fifth batch of several tokens finds no memory, some
    before the model and some in the sampler."""
    engine = family.engine(method, **options)
    calls = 0

    def fail(tokens: int) -> None:
        nonlocal calls
        calls += tokens > 1
        if tokens > 1 and calls % 5 == 0:
            raise torch.OutOfMemoryError(FULL)

    limit_memory(engine, lambda tokens: fail(tokens.numel()) is not None)
    choose = engine._runner.sampler._choose

    def choose_or_fail(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
        fail(len(logits))
        return choose(logits, *arguments)

    engine._runner.sampler._choose = choose_or_fail  # type: ignore[method-assign]
    outcomes = run_all(engine, mixes(MIXES))
    assert calls >= 10
    assert_alike(family.plain(MIXES), outcomes, assert_same)
    assert_all_free(engine)


def has(token: int) -> Callable[[torch.Tensor], bool]:
    return lambda tokens: bool((tokens == token).any())


@pytest.mark.parametrize("ahead", ["on", "off"])
def test_a_stream_that_never_fits_ends_alone(
    llama: transformers.PreTrainedModel, tmp_path: Path, ahead: str
) -> None:
    engine = make_engine(tmp_path, async_scheduling=ahead)
    sizes = limit_memory(engine, has(77))
    driver = Driver(engine)
    prompts = [[5, 9], [40, 41, 77, 42], *([token, 8] for token in range(100, 110))]
    for stream, prompt in enumerate(prompts):
        driver.submit(submit(stream, prompt, max_tokens=OUTPUT))
    driver.run()
    outcomes = driver.outcomes
    assert outcomes[1].error == f"{NO_MEMORY} OutOfMemoryError: {FULL}"
    for stream in {*range(len(prompts))} - {1}:
        assert outcomes[stream].tokens == generate(llama, prompts[stream], OUTPUT)
    assert_all_free(engine)
    assert engine.metrics()["preemptions_total"] == MAX_TRIES - 1
    # the other streams' steps are as large as before
    assert len(sizes) < OUTPUT + 8 * MAX_TRIES
    assert engine._scheduler.max_batched_tokens == 2048


def test_a_stream_that_fits_later_goes_on(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    full = [True]
    limit_memory(engine, lambda tokens: full[0] and bool((tokens == 77).any()))
    driver = Driver(engine)
    prompts = [[5, 9, 14], [40, 41, 77, 42]]
    for stream, prompt in enumerate(prompts):
        driver.submit(submit(stream, prompt, max_tokens=OUTPUT))
    for _ in range(5):
        driver.step()
    assert len(driver.outcomes[0].tokens) == 5
    assert driver.outcomes[1].tokens == []
    assert engine.load().running == 2
    full[0] = False
    driver.run()
    for stream, prompt in enumerate(prompts):
        assert driver.outcomes[stream].tokens == generate(llama, prompt, OUTPUT)


@pytest.mark.parametrize("place", ["_add", "_make_room", "_gather"])
@pytest.mark.parametrize("seed", range(3))
def test_no_token_is_counted_twice(
    llama: transformers.PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    seed: int,
) -> None:
    """A step that fails in the middle of counting tokens for penalties; streams by themselves as well."""
    requests = [
        submit(
            stream,
            [stream + 5] * (stream + 2),
            max_tokens=16,
            temperature=1.0,
            seed=stream,
            presence_penalty=1.5,
        )
        for stream in range(6)
    ]
    options = {"speculative_method": "ngram", "speculative_tokens": 3, "max_num_seqs": 6}
    plain = run_all(make_engine(tmp_path, **options), requests)
    engine = make_engine(tmp_path, **options)
    random, faults = np.random.default_rng(seed), list[str]()
    whole = getattr(TokenCounts, place)

    def fail_at_times(self: TokenCounts, *arguments: Any) -> Any:
        after = random.random() < 0.5
        result = whole(self, *arguments) if after else None
        if random.random() < 0.2:
            faults.append(place)
            raise torch.OutOfMemoryError(FULL)
        return result if after else whole(self, *arguments)

    monkeypatch.setattr(TokenCounts, place, fail_at_times)
    outcomes = run_all(engine, requests)
    assert faults
    assert (engine.metrics()["preemptions_total"] > 0) is (place != "_add"), "a stream alone is counted anew"
    assert_alike(plain, outcomes, assert_same)


def test_no_memory_for_larger_counts_leaves_the_smaller_ones(
    llama: transformers.PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = make_engine(tmp_path)._runner.sampler._token_counts
    counts._make_room(np.arange(3), 5, DEVICE)
    before = counts._counts, counts._tokens, counts._listed
    zeros, calls = torch.zeros, []

    def refuse(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 3:
            raise torch.OutOfMemoryError(FULL)
        return zeros(*arguments, **options)

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        counts._make_room(np.arange(20), 5, DEVICE)
    assert all(
        now is then
        for now, then in zip((counts._counts, counts._tokens, counts._listed), before, strict=True)
    )
    counts._make_room(np.arange(20), 5, DEVICE)
    assert len(counts._counts) == len(counts._tokens) == len(counts._listed) == 32


def test_drafts_without_memory_pause(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    make_model("llama", draft, num_hidden_layers=1)
    options = {"speculative_method": "draft", "draft_model": str(draft), "draft_dir": str(draft)}
    engine = make_engine(tmp_path, speculative_tokens=2, **options)
    full = [True]
    sizes = limit_memory(engine, lambda tokens: full[0], model=1)
    driver = Driver(engine)
    driver.submit(submit(0, [5, 9, 14], max_tokens=200, ignore_eos=True))
    for _ in range(3 * PAUSE):
        driver.step()
    assert 2 <= len(sizes) <= 4
    full[0] = False
    tokens = driver.run()[0].tokens
    assert len(sizes) > 4
    plain = run_all(make_engine(tmp_path), [submit(0, [5, 9, 14], max_tokens=200, ignore_eos=True)])
    assert tokens == plain[0].tokens


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="fills a GPU")
def test_a_gpu_that_is_full_computes_smaller_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """2,000 tokens take 60 MiB for each of three tensors of a layer, the allocator may have 48 in all."""
    make_model("llama", tmp_path, hidden_size=1024, intermediate_size=8192)
    engine = make_engine(tmp_path, max_num_batched_tokens=2048)
    requests = [submit(stream, [stream + 5] * 250, max_tokens=8, ignore_eos=True) for stream in range(8)]
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (48 << 20)) / total)
    try:
        outcomes = run_all(engine, requests)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [(len(outcome.tokens), outcome.error) for outcome in outcomes.values()] == [(8, "")] * 8
    assert any("no memory for a step of 2000 tokens" in record.message for record in caplog.records)
    assert_all_free(engine)


def test_steps_grow_again(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, max_num_batched_tokens=64)
    faults = [True]
    limit_memory(engine, lambda tokens: tokens.numel() > 20 and bool(faults and faults.pop()))
    driver = Driver(engine)
    for stream in range(32):
        driver.submit(submit(stream, [stream + 5], max_tokens=200, ignore_eos=True))
    driver.step()
    assert all(len(outcome.tokens) == 1 for outcome in driver.outcomes.values())
    most = [engine._scheduler.max_batched_tokens]
    for _ in range(3 * GROW_STEPS):
        driver.step()
        most.append(engine._scheduler.max_batched_tokens)
    assert most == sorted(most)
    assert sorted({*most}) == [16, 32, 64]


def test_a_step_that_fails_leaves_no_tensors_behind(
    llama: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    """The smaller steps find the memory of the one that failed."""
    engine = make_engine(tmp_path)
    held: list[weakref.ref[torch.Tensor]] = []
    alive = []

    def refuse(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        activations = arguments[0] + 1
        alive.append(sum(tensor() is not None for tensor in held))
        held.append(weakref.ref(activations))
        if len(activations) > 2:
            raise torch.OutOfMemoryError(FULL)

    layer = engine._models[0]._model.base_model.layers[1].mlp
    layer.register_forward_pre_hook(lambda module, arguments: refuse(module, (arguments[0][0],)))
    outcomes = run_all(engine, [submit(stream, [stream + 5], max_tokens=2) for stream in range(8)])
    assert all(len(outcome.tokens) == 2 for outcome in outcomes.values())
    assert len(alive) > 4
    assert not any(alive)


def test_adapters_without_memory_wait(
    llama: transformers.PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights are copied again with a later step; streams without one advance meanwhile."""
    train(llama, tmp_path / "adapter")
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2}
    requests = [
        submit_to(name, stream, [5 + stream, 9]) for stream, name in enumerate([None, "a", None, "a"])
    ]
    usual = make_engine(tmp_path, **options)
    load(usual, {"a": tmp_path / "adapter"})
    expected = run_all(usual, requests)
    engine, refused = make_engine(tmp_path, **options), [True] * 5
    load(engine, {"a": tmp_path / "adapter"})
    lora = engine._models[0].lora
    assert lora is not None
    put = lora.put

    def refuse(*arguments: Any) -> None:
        if refused:
            raise torch.OutOfMemoryError(FULL[: len(FULL) * refused.pop()])
        put(*arguments)

    monkeypatch.setattr(lora, "put", refuse)
    found = run_all(engine, requests)
    assert not refused
    assert {stream: each.error for stream, each in found.items()} == dict.fromkeys(range(4), "")
    assert_alike(expected, found)


def test_a_device_without_memory_for_one_token_ends_the_engine(
    llama: transformers.PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(tmp_path)
    limit_memory(engine, lambda tokens: True)
    engine.submit(0, submit(0, [5, 6]))
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
    assert [record.message for record in caplog.records] == [
        f"no memory for a step of 2 tokens: OutOfMemoryError: {FULL}"
    ]
    rows = engine.fail_all("engine_error", "it failed")
    assert [failure.stream for failure in rows.failed] == [0]


def test_a_broken_context_is_no_lack_of_memory(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    """What comes up where a result is read is nobody's fault alone: the engine ends."""
    engine = make_engine(tmp_path, async_scheduling="on")
    driver = Driver(engine)
    driver.submit(submit(0, [5, 6], max_tokens=9))
    driver.step()
    _, pending = engine._in_flight[-1]

    class Broken:
        scored = None

        def read_tokens(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine._in_flight[-1] = (engine._in_flight[-1][0], Broken())  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        driver.step()
    del pending


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError(FULL), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_are_told_apart(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


def test_a_start_without_memory_is_an_error_of_the_configuration() -> None:
    with (
        pytest.raises(ConfigError) as raised,
        stating_shortage("loading the weights of m", "take --dtype bfloat16", CPU),
    ):
        raise torch.OutOfMemoryError(FULL)
    text = str(raised.value)
    assert text.startswith(f"out of memory while loading the weights of m (OutOfMemoryError: {FULL}): ")
    assert text.endswith(" of the host's memory are available; take --dtype bfloat16")
    with pytest.raises(RuntimeError, match="no such thing"), stating_shortage("doing it", "", CPU):
        raise RuntimeError("no such thing")
