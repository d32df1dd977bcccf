"""Storms through a real model; the sizes of tests/engine/schedule/test_storms.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers

from penstock.wire.frames import FinishReason
from tests.engine.torch.harness import VOCAB, Driver, assert_alike, make_engine, make_model, submit


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, make_model("llama", directory)


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    shared = random.integers(3, VOCAB, size=40).tolist()
    return [
        shared[: 40 * (stream % 2)] + random.integers(3, VOCAB, size=int(random.integers(1, 40))).tolist()
        for stream in range(count)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("requests", "room_for"), [(48, 8), pytest.param(512, 64, marks=pytest.mark.slow)])
def test_preemptions_change_no_greedy_output(
    llama: tuple[Path, transformers.PreTrainedModel], requests: int, room_for: int
) -> None:
    """KV cache for ``room_for`` streams of 80 tokens; a token takes 256 bytes."""
    outputs = []
    for tokens in (requests * 128, room_for * 80):
        engine = make_engine(llama[0], max_num_seqs=requests, kv_cache_memory=tokens * 256, block_size=8)
        driver = Driver(engine)
        for stream, prompt in enumerate(prompts(requests)):
            driver.submit(submit(stream, prompt, max_tokens=60, ignore_eos=True))
        outcomes = driver.run(20_000)
        assert {outcome.finish for outcome in outcomes.values()} == {FinishReason.LENGTH}
        assert engine.load().kv_used == 0
        outputs.append({stream: outcome.tokens for stream, outcome in outcomes.items()})
        preemptions = engine.metrics()["preemptions_total"]
    assert preemptions > requests // 10
    assert_alike(*outputs)


@pytest.mark.slow
def test_5000_requests_aborted_at_random_points_leave_nothing(
    llama: tuple[Path, transformers.PreTrainedModel],
) -> None:
    random = np.random.default_rng(6)
    engine = make_engine(llama[0], max_num_seqs=128, kv_cache_memory=128 * 40 * 256, block_size=8)
    driver = Driver(engine)
    asked = prompts(5000)
    doomed: dict[int, int] = {}
    step = 0
    while asked or engine.has_work():
        for _ in range(int(random.integers(0, 40))):
            if asked:
                stream = len(asked)
                driver.submit(submit(stream, asked.pop(), max_tokens=60, ignore_eos=True))
                doomed[stream] = step + int(random.choice([0, 1, 2, 5, 20, 50, 100]))
        due = [stream for stream, when in doomed.items() if when <= step]
        for stream in due:
            del doomed[stream]
        engine.abort(0, due)
        driver.step()
        step += 1
    finishes = [outcome.finish for outcome in driver.outcomes.values()]
    assert len(finishes) == 5000
    assert FinishReason.NONE not in finishes
    assert finishes.count(FinishReason.ABORT) > 2500
    load = engine.load()
    assert (load.waiting, load.running, load.kv_used) == (0, 0, 0)
