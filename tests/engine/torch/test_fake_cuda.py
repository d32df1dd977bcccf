"""Steps on a CUDA device without values: nothing in them makes the host wait for the device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from penstock.engine.schedule.batch import Batch
from penstock.engine.schedule.block_tables import BlockTables
from penstock.engine.torch import model as model_module
from penstock.engine.torch.engine import TorchEngine
from penstock.engine.torch.lora.adapter_reader import AdapterReader
from penstock.engine.torch.lora.lora_layers import AdapterWeights
from penstock.engine.torch.media.families import is_whole_only
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_loader import Head, read_shape
from penstock.engine.torch.sampling import listed_bounds
from penstock.engine.torch.sampling.sampler import SOME_CANDIDATES
from penstock.wire.messages import Adapter
from tests.engine.support import byte_level_tokenizer
from tests.engine.torch.adapters import submit_to
from tests.engine.torch.fake_cuda import (
    CUDA,
    LISTED,
    TOKEN,
    FakeCuda,
    fake_config,
    fake_cuda,
    make_real_model,
)
from tests.engine.torch.harness import FAMILIES, Driver, cpu_only, make_engine, make_model
from tests.engine.torch.test_host_reads import ROPES

__all__ = ["fake_cuda"]
pytestmark = cpu_only("the device is a fake")

BLOCK_SIZE = 16
VOCAB = SOME_CANDIDATES + 400
OUTPUT = 8
CHARACTER = sorted(byte_level_tokenizer().get_vocab().items(), key=lambda item: item[1])[TOKEN][0]


# -- models


def batch_of(*counts: int) -> Batch:
    singles = counts.count(1)
    return Batch(
        slots=np.arange(len(counts)),
        start=np.arange(len(counts), dtype=np.int32),
        count=np.array(counts, np.int32),
        singles=singles,
        decodes=singles,
        samples=np.arange(len(counts)),
        generations=np.zeros(len(counts), np.int64),
    )


@torch.inference_mode()
def run_model(directory: Path, fake_cuda: FakeCuda, dtype: torch.dtype) -> None:
    """Record decodes, replay one, and run a batch with prompts."""
    shape = read_shape(str(directory))
    head: Head = "seeing" if is_whole_only(directory) else "text"
    model = PagedModel(str(directory), fake_config(), shape, dtype=dtype, device=CUDA, head=head)
    model.make_cache(40, BLOCK_SIZE)
    assert (model._graphs is None) == (model.attention.tables is None)
    for batch in batch_of(1, 1, 1), batch_of(1, 1, 5, 7):
        blocks = BlockTables(4, 39, BLOCK_SIZE, 64)
        blocks.allocate(batch.slots, blocks.missing(batch.slots, batch.start + batch.count))
        tokens = torch.zeros(int(batch.count.sum()), dtype=torch.int64, device=CUDA)
        rows = torch.zeros(3, dtype=torch.int64, device=CUDA)
        with fake_cuda.step():
            hidden = model.run(batch, tokens, blocks, rows)
        assert hidden.device == CUDA
        assert hidden.dtype == dtype


@pytest.mark.parametrize("kind", ["llama", "gemma2", "bloom"])
def test_attention_without_kernels_does_not_wait(
    kind: str, tmp_path: Path, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "find_kernel", lambda device: None)
    make_real_model(kind, tmp_path)
    run_model(tmp_path, fake_cuda, torch.float16)


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_forward_pass_waits(kind: str, tmp_path: Path, fake_cuda: FakeCuda) -> None:
    make_real_model(kind, tmp_path)
    run_model(tmp_path, fake_cuda, torch.bfloat16)


@pytest.mark.parametrize("name", ROPES)
def test_no_rotary_embedding_waits(name: str, tmp_path: Path, fake_cuda: FakeCuda) -> None:
    kind, changes = ROPES[name]
    make_real_model(kind, tmp_path, **changes)
    run_model(tmp_path, fake_cuda, torch.bfloat16)


@pytest.mark.parametrize("kind", ["granitemoe", "llama4", "qwen3_moe"])
@pytest.mark.parametrize(
    ("dtype", "capability"), [(torch.float32, (9, 0)), (torch.float16, (9, 0)), (torch.bfloat16, (8, 0))]
)
def test_no_experts_wait(
    kind: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    tmp_path: Path,
    fake_cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    make_real_model(kind, tmp_path)
    run_model(tmp_path, fake_cuda, dtype)


def test_products_in_float32_are_not_rounded_to_fewer_bits(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    torch.set_float32_matmul_precision("high")  # as NVIDIA's images of PyTorch do
    make_real_model("llama", tmp_path)
    run_model(tmp_path, fake_cuda, torch.float32)
    assert torch.get_float32_matmul_precision() == "highest"


# -- steps of an engine

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 1.0},
    "min-p": {"temperature": 1.0, "min_p": 0.01},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "large top-k": {"temperature": 1.0, "top_k": SOME_CANDIDATES + 20, "top_p": 0.5},
    "top-p": {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"repetition_penalty": 1.3},
    "occurrence": {"presence_penalty": 0.4, "frequency_penalty": 0.1, "temperature": 1.0},
    "bias": {"logit_bias": {3: 1.0}},
    "long bias": {"logit_bias": dict.fromkeys(range(500), 0.5)},
    "allowed": {"allowed_token_ids": (1, 2, TOKEN)},
    "bad words": {"bad_words": ((TOKEN, 2), (5,))},
    "min tokens": {"min_tokens": 300, "stop_token_ids": (4,)},
    "logprobs": {"logprobs": 3},
    "many logprobs": {"logprobs": 150},
    "prompt logprobs": {"prompt_logprobs": 2},
    "grammar": {"grammar": LLMatcher.grammar_from_regex(f"{CHARACTER}+")},
}
COPIES = {"greedy": 2, "random": 3, "top-k": 4, "top-p": 4}
"""To the device, in a step of decodes whose streams begin no blocks."""


@pytest.fixture(autouse=True)
def ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many distinct tokens a history has is asked for within a few steps."""
    monkeypatch.setattr(listed_bounds, "REFRESHED_FROM", 4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model("llama", directory, vocab_size=VOCAB, num_hidden_layers=1)
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def start(driver: Driver, names: list[str], adapters: list[str | None] | None = None) -> None:
    """Two streams of each kind; one of them stays when the other has ended."""
    for stream, name in enumerate(2 * names):
        prompt = [*range(2, LISTED + 2), *([TOKEN] * stream)]
        adapter = None if adapters is None else adapters[stream % len(adapters)]
        most = OUTPUT - 4 * (stream < len(names))
        options = {"max_tokens": most, "ignore_eos": True} | KINDS[name]
        driver.submit(submit_to(adapter, stream, prompt, **options))


def finish(driver: Driver, fake: FakeCuda) -> list[int]:
    """Take all steps. Returns how many copies each made to the device."""
    made = []
    while driver.engine.has_work():
        before = fake.copies["device"]
        with fake.step():
            driver.step()
        made.append(fake.copies["device"] - before)
    for outcome in driver.outcomes.values():
        assert not outcome.error
        assert len(outcome.tokens) >= OUTPUT - 4
    return made


def engine_of(directory: Path, **options: Any) -> TorchEngine:
    usual = {"max_num_batched_tokens": 64, "async_scheduling": "on", "enforce_eager": True}
    return make_engine(directory, **(usual | options))


@pytest.mark.parametrize("name", KINDS)
def test_no_step_waits(name: str, llama: Path, fake_cuda: FakeCuda) -> None:
    driver = Driver(engine_of(llama, enforce_eager=name not in COPIES))
    start(driver, [name])
    made = finish(driver, fake_cuda)
    if name in COPIES:
        assert Counter(made).most_common(1)[0][0] == COPIES[name]


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_no_step_of_all_kinds_together_waits(method: str, llama: Path, fake_cuda: FakeCuda) -> None:
    driver = Driver(engine_of(llama, speculative_method=method))
    start(driver, list(KINDS))
    finish(driver, fake_cuda)


def test_no_step_of_a_draft_model_waits_but_for_its_tokens(llama: Path, fake_cuda: FakeCuda) -> None:
    driver = Driver(
        engine_of(llama, draft_dir=str(llama), speculative_method="draft", draft_model=str(llama))
    )
    start(driver, ["greedy", "top-p", "repetition"])
    finish(driver, fake_cuda)


def test_no_step_with_adapters_waits(
    llama: Path, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(reader: AdapterReader, adapter: Adapter) -> AdapterWeights:
        def pinned(rank: int, size: int) -> torch.Tensor:
            return torch.empty((rank, size), dtype=torch.float32, pin_memory=True)

        rank = 4 + len(adapter.name)
        modules = reader._info.modules
        layers = {path: (pinned(rank, given), pinned(rank, made)) for path, (made, given) in modules.items()}
        return AdapterWeights(rank, layers)

    monkeypatch.setattr(AdapterReader, "read_weights", read)
    engine = engine_of(llama, enable_lora=True, max_loras=3, max_lora_rank=16)
    table = engine.adapters
    assert table is not None
    adapters = [Adapter(name, f"/{name}", digest="1") for name in ("one", "three", "fifth")]
    for adapter in adapters:
        table.add_adapter(adapter, table.loader.read_weights(adapter))
    table.make_current(adapters)
    driver = Driver(engine)
    start(driver, ["greedy", "random", "top-p"], [None, *(adapter.name for adapter in adapters)])
    finish(driver, fake_cuda)


# -- the fake itself


@torch.inference_mode()
@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda values: values.cpu(), "a blocking copy"),
        (lambda values: values.to("cpu", non_blocking=True), "not pinned"),
        (lambda values: torch.zeros(3).to(CUDA, non_blocking=True), "not pinned"),
        (lambda values: torch.tensor([1, 2]).to(CUDA), "a blocking copy"),
        (lambda values: torch.zeros(4, 3).pin_memory().t().to(CUDA, non_blocking=True), "gathers"),
        (lambda values: values[torch.tensor([0, 2])], "several devices"),
        (lambda values: values.__setitem__(values > 0, 1.0), "a mask as an index"),
        (lambda values: values[values > 0], "DynamicOutputShapeException"),
        (lambda values: values.sum().item(), "DataDependentOutputException"),
        (lambda values: values.nonzero(), "DynamicOutputShapeException"),
        (lambda values: bool(values[0, 0] > 0), "DataDependentOutputException"),
        (lambda values: values + torch.zeros(3, 4), "aten.add.Tensor: "),  # the error differs by version
    ],
)
def test_what_waits_is_found(call: Any, why: str, fake_cuda: FakeCuda) -> None:
    values = torch.zeros((3, 4), device=CUDA)
    with pytest.raises((AssertionError, RuntimeError)), fake_cuda.step():
        call(values)
    assert why in "\n".join(fake_cuda.waits)
