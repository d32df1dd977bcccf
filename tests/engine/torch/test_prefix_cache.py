"""Shared prefixes with a real model: the same tokens, computed once."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.engine.torch.harness import Driver, generate, make_engine, make_model, run_all, submit

PROMPT = [5 + 7 * index % 300 for index in range(50)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, make_model("llama", directory)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [4, 16])
def test_greedy_output_is_that_of_transformers(
    llama: tuple[Path, transformers.PreTrainedModel], block_size: int
) -> None:
    directory, model = llama
    engine = make_engine(directory, block_size=block_size, max_num_batched_tokens=24)
    prompts = [PROMPT[:length] + [9] * own for length in (20, 32, 50) for own in (0, 0, 3)]
    for _ in range(2):
        outcomes = run_all(
            engine, [submit(stream, prompt, max_tokens=12) for stream, prompt in enumerate(prompts)]
        )
        for stream, prompt in enumerate(prompts):
            assert outcomes[stream].tokens == generate(model, prompt, 12)
    metrics = engine.metrics()
    assert metrics["prefix_cache_queries_total"] == 2 * sum(map(len, prompts))
    assert metrics["prefix_cache_hits_total"] > metrics["prefix_cache_queries_total"] / 2


def test_the_next_turn_finds_the_answer_of_the_last(
    llama: tuple[Path, transformers.PreTrainedModel],
) -> None:
    directory, model = llama
    driver = Driver(make_engine(directory, block_size=4))
    driver.submit(submit(0, PROMPT[:10], max_tokens=15, ignore_eos=True))
    history = PROMPT[:10] + driver.run()[0].tokens
    driver.submit(submit(1, [*history, 8, 8], max_tokens=8))
    rows = driver.engine.step()
    assert rows.cached is not None
    assert rows.cached.tolist() == [24]
    first = rows.tokens.tolist()
    assert first + driver.run()[1].tokens == generate(model, [*history, 8, 8], 8)


def test_a_reset_is_a_call(llama: tuple[Path, transformers.PreTrainedModel]) -> None:
    engine = make_engine(llama[0])
    for stream in range(2):
        run_all(engine, [submit(stream, PROMPT, max_tokens=1)])
    hits = engine.metrics()["prefix_cache_hits_total"]
    assert hits == 48
    assert engine.call("reset_prefix_cache", {}) is None
    run_all(engine, [submit(2, PROMPT, max_tokens=1)])
    assert engine.metrics()["prefix_cache_hits_total"] == hits
    with pytest.raises(ValueError, match="no operation 'reset'"):
        engine.call("reset", {})


def test_without_the_cache_nothing_is_shared(llama: tuple[Path, transformers.PreTrainedModel]) -> None:
    engine = make_engine(llama[0], enable_prefix_caching=False)
    for stream in range(2):
        run_all(engine, [submit(stream, PROMPT, max_tokens=1)])
    assert engine.metrics()["prefix_cache_queries_total"] == 0
