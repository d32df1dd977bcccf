"""A forward pass that raises because of one stream ends that stream; the others go on exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.engine.torch.engine import CANNOT_COMPUTE, TorchEngine
from penstock.wire.frames import FinishReason
from tests.engine.torch.harness import (
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

POISON = 77
OUTPUT = 12
PROMPTS = [[5, 9, 200, 17], [40 + token for token in range(30)], [3], [250, 251, 252]]


@pytest.fixture
def llama(tmp_path: Path) -> transformers.PreTrainedModel:
    return make_model("llama", tmp_path)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("llama", tmp_path_factory.mktemp("family"))


def poison(engine: TorchEngine, is_poison: Callable[[torch.Tensor], bool], model: int = 0) -> list[int]:
    """Have the model's embedding raise; returns the sizes of the batches that it was given."""
    sizes: list[int] = []

    def refuse(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        sizes.append(arguments[0].numel())
        if is_poison(arguments[0]):
            raise IndexError("index out of range in self")

    engine._models[model]._graphs = None  # their replays run no hooks
    engine._models[model]._model.get_input_embeddings().register_forward_pre_hook(refuse)
    return sizes


def has_poison(tokens: torch.Tensor) -> bool:
    return bool((tokens == POISON).any())


@pytest.mark.parametrize("ahead", ["on", "off"])
def test_a_prompt_that_cannot_be_computed_ends_its_own_stream(
    llama: transformers.PreTrainedModel, tmp_path: Path, ahead: str
) -> None:
    engine = make_engine(tmp_path, async_scheduling=ahead, block_size=4)
    poison(engine, has_poison)
    driver = Driver(engine)
    sampling = {"max_tokens": OUTPUT, "repetition_penalty": 1.0}
    for stream, prompt in enumerate(PROMPTS):
        driver.submit(submit(stream, prompt, **sampling))
    for _ in range(3):
        driver.step()
    shared = list(range(100, 120))
    driver.submit(submit(10, [*shared, POISON], **sampling))
    driver.submit(submit(11, [9, 8, 7, 6], **sampling))
    driver.run()
    outcomes = driver.outcomes
    assert outcomes[10].error == f"{CANNOT_COMPUTE} IndexError: index out of range in self"
    assert outcomes[10].tokens == []
    for stream, prompt in [*enumerate(PROMPTS), (11, [9, 8, 7, 6])]:
        assert outcomes[stream].error == ""
        assert outcomes[stream].tokens == generate(llama, prompt, OUTPUT)
    # what it left in the cache is not what the next prompt with the same beginning reads
    driver.submit(submit(12, [*shared, 5], **sampling))
    driver.run()
    assert outcomes[12].tokens == generate(llama, [*shared, 5], OUTPUT)
    assert engine.load().kv_used == 0


@pytest.mark.parametrize("ahead", ["on", "off"])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_tokens_before_the_fault_arrive_and_others_are_exact(
    llama: transformers.PreTrainedModel, tmp_path: Path, ahead: str, penalty: float
) -> None:
    sampling = {"max_tokens": OUTPUT, "temperature": 0.8, "repetition_penalty": penalty, "logprobs": 1}

    def run(engine: TorchEngine, streams: range) -> Driver:
        driver = Driver(engine)
        for stream in streams:
            driver.submit(submit(stream, PROMPTS[stream % len(PROMPTS)], interval=5, **sampling))
        driver.run()
        return driver

    expected = run(make_engine(tmp_path, async_scheduling=ahead), range(20)).outcomes
    engine = make_engine(tmp_path, async_scheduling=ahead)
    victim = expected[3]
    fatal = victim.tokens[7]
    poison(engine, lambda tokens: bool((tokens == fatal).any()))
    outcomes = run(engine, range(20)).outcomes
    for stream, outcome in outcomes.items():
        whole = expected[stream].tokens
        prompt = PROMPTS[stream % len(PROMPTS)]
        last = OUTPUT if fatal not in whole[:-1] else whole.index(fatal) + 1
        assert fatal not in prompt
        assert outcome.tokens == whole[:last]
        assert [entry[0][0] for entry in outcome.logprobs] == outcome.tokens
        if last < len(whole):
            assert outcome.error.startswith(CANNOT_COMPUTE)
        else:
            assert outcome.finish is expected[stream].finish is not FinishReason.NONE
    assert outcomes[3].error


def test_one_fault_among_many_costs_few_forward_passes(
    llama: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    engine = make_engine(tmp_path)
    sizes = poison(engine, has_poison)
    driver = Driver(engine)
    for stream in range(64):
        driver.submit(submit(stream, [stream + 100, POISON if stream == 41 else 5], max_tokens=1))
    driver.step()
    assert driver.outcomes[41].error
    assert all(driver.outcomes[stream].tokens for stream in range(64) if stream != 41)
    assert len(sizes) < 20


def test_a_model_that_cannot_compute_anything_ends_the_engine(
    llama: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    engine = make_engine(tmp_path)
    poison(engine, lambda tokens: True)
    engine.submit(0, submit(0, [5]))
    with pytest.raises(IndexError):
        engine.step()
    rows = engine.fail_all("engine_error", "it failed")
    assert [failure.stream for failure in rows.failed] == [0]


def test_a_fault_that_does_not_return_costs_nobody_anything(
    llama: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    engine = make_engine(tmp_path)
    faults = [True]
    poison(engine, lambda tokens: faults.pop() if faults else False)
    driver = Driver(engine)
    for stream, prompt in enumerate(PROMPTS):
        driver.submit(submit(stream, prompt, max_tokens=OUTPUT))
    driver.run()
    for stream, prompt in enumerate(PROMPTS):
        assert driver.outcomes[stream].tokens == generate(llama, prompt, OUTPUT)
        assert np.array_equal(driver.outcomes[stream].positions, range(len(driver.outcomes[stream].tokens)))


def test_a_draft_model_that_cannot_compute_a_token_costs_drafts_alone(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    model = make_model("llama", target)
    make_model("llama", draft, num_hidden_layers=1)
    options = {"speculative_method": "draft", "draft_model": str(draft), "draft_dir": str(draft)}
    engine = make_engine(target, speculative_tokens=2, **options)
    poison(engine, has_poison, model=1)
    prompts = [[5, 9, POISON], *PROMPTS]
    outcomes = run_all(engine, [submit(at, prompt, max_tokens=OUTPUT) for at, prompt in enumerate(prompts)])
    for stream, prompt in enumerate(prompts):
        assert outcomes[stream].tokens == generate(model, prompt, OUTPUT)
    assert run_all(engine, [submit(9, [5, 9], max_tokens=OUTPUT)])[9].tokens == generate(
        model, [5, 9], OUTPUT
    )
    assert engine.metrics()["spec_decode_draft_tokens_total"] > 0


@pytest.mark.parametrize("place", ["before the model", "after the model", "after the penalties"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": "on"},
        pytest.param({"kv_cache_memory": FEW_BLOCKS}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("method", ["none", "ngram"])
def test_batches_that_fail_change_no_token(
    family: Family, method: str, options: dict[str, Any], place: str
) -> None:
    """Every fifth batch of several tokens fails; streams have penalties, logprobs, grammars, bans, drafts."""
    engine = family.engine(method, **options)
    calls = 0

    def fail(tokens: int) -> None:
        nonlocal calls
        calls += tokens > 1
        if tokens > 1 and calls % 5 == 0:
            raise RuntimeError("it failed")

    engine._models[0]._graphs = None
    model = engine._models[0]._model
    if place == "before the model":
        model.get_input_embeddings().register_forward_pre_hook(lambda module, given: fail(given[0].numel()))
    elif place == "after the model":
        model.base_model.norm.register_forward_hook(lambda module, given, out: fail(given[0].shape[1]))
    else:
        sampler = engine._runner.sampler
        choose = sampler._choose

        def choose_or_fail(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
            fail(len(logits))
            return choose(logits, *arguments)

        sampler._choose = choose_or_fail  # type: ignore[method-assign]
    plain = family.plain(MIXES)
    outcomes = run_all(engine, mixes(MIXES))
    assert calls >= 10
    assert_alike(plain, outcomes, assert_same)
    assert_all_free(engine)
