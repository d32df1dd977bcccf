"""Logprobs of prompts: those of the model, each token once, whatever else happens meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.engine.torch.harness import (
    Driver,
    Outcome,
    make_engine,
    make_model,
    next_logprobs,
    run_all,
    submit,
)

Model = tuple[Path, transformers.PreTrainedModel]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("llama")
    return directory, make_model("llama", directory)


def prompt_of(stream: int, length: int) -> list[int]:
    return [3 + (stream * 31 + place * 7) % 300 for place in range(length)]


def check(model: transformers.PreTrainedModel, prompt: Sequence[int], most: int, outcome: Outcome) -> None:
    """Every token but the first has its logprob, its rank and the ``most`` best."""
    assert list(outcome.prompt) == list(range(1, len(prompt)))
    exact = next_logprobs(model, prompt)
    for place, (ids, values, rank) in outcome.prompt.items():
        expected = exact[place - 1]
        assert ids[0] == prompt[place]
        assert ids[1 : most + 1] == expected.topk(most).indices.tolist()
        assert set(ids[most + 1 :]) <= {-1}
        assert values[: most + 1] == pytest.approx(expected[ids[: most + 1]].tolist(), abs=1e-4)
        assert rank == int((expected > expected[prompt[place]]).sum()) + 1


@pytest.mark.gpu
def test_they_are_the_models_in_chunks_beside_other_streams(llama: Model) -> None:
    directory, model = llama
    engine = make_engine(directory, max_num_batched_tokens=40)
    driver = Driver(engine)
    lengths = [1, 2, 30, 41, 97]
    for stream, length in enumerate(lengths):
        driver.submit(submit(stream, prompt_of(stream, length), max_tokens=5, prompt_logprobs=stream))
        driver.submit(submit(100 + stream, prompt_of(stream, length), max_tokens=5))
    pieces = []
    while engine.has_work():
        before = {stream: len(outcome.prompt) for stream, outcome in driver.outcomes.items()}
        driver.step()
        pieces += [len(outcome.prompt) - before[stream] for stream, outcome in driver.outcomes.items()]
    assert max(pieces) <= 40  # no more than a step computes
    for stream, length in enumerate(lengths):
        check(model, prompt_of(stream, length), stream, driver.outcomes[stream])
        assert driver.outcomes[stream].tokens == driver.outcomes[100 + stream].tokens
        assert not driver.outcomes[100 + stream].prompt


def test_a_prompt_that_is_computed_again_is_not_scored_again(llama: Model) -> None:
    directory, model = llama
    few = 40 * 16 * 2 * 2 * 2 * 8 * 4  # 40 blocks of 16 tokens
    engine = make_engine(directory, kv_cache_memory=few, max_num_batched_tokens=64)
    requests = [
        submit(stream, prompt_of(stream, 60), max_tokens=100, prompt_logprobs=1) for stream in range(8)
    ]
    outcomes = run_all(engine, requests)
    assert engine.metrics()["preemptions_total"] > 0
    for stream, outcome in outcomes.items():
        check(model, prompt_of(stream, 60), 1, outcome)


def test_a_resumed_stream_scores_its_prompt_alone(llama: Model) -> None:
    directory, model = llama
    prompt = prompt_of(0, 20)
    settings: dict[str, Any] = {"max_tokens": 8, "prompt_logprobs": 0}
    whole = run_all(make_engine(directory), [submit(0, prompt, **settings)])[0].tokens
    outcome = run_all(make_engine(directory), [submit(0, [*prompt, *whole[:3]], resumed=3, **settings)])[0]
    assert outcome.tokens == whole[3:]
    check(model, prompt, 0, outcome)


def test_slots_that_are_used_again_score_nothing_unasked(llama: Model) -> None:
    engine = make_engine(llama[0], max_num_seqs=1)
    first, second = submit(0, prompt_of(0, 9), prompt_logprobs=2), submit(1, prompt_of(1, 9))
    outcomes = run_all(engine, [first, second])
    assert len(outcomes[0].prompt) == 8
    assert not outcomes[1].prompt
    assert engine._sampling.prompt_logprobs.active_slots == 0
