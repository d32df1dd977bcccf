"""A step that is launched before the tokens of the step before it are read gives what it would have given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.wire.frames import FinishReason
from penstock.wire.messages import Submit
from tests.engine.torch.harness import VOCAB, Driver, Outcome, assert_alike, make_engine, make_model, submit

MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    {"logprobs": 2},
    {"min_tokens": 6, "logit_bias": {1: 3.0}},
    {"stop_token_ids": tuple(range(10, 110)), "temperature": 1.5},
    {"interval": 3, "temperature": 1.0},
    {"max_tokens": 1},
    {"prompt_logprobs": 1, "temperature": 1.0},
]
PENALISED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7, "temperature": 1.0},
]
READING: list[dict[str, Any]] = [
    {"bad_words": ((5, 6), (9,)), "temperature": 1.2},
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model("llama", directory, num_hidden_layers=1)
    return directory


def requests(count: int, kinds: list[dict[str, Any]]) -> list[Submit]:
    random = np.random.default_rng(3)
    lengths = random.integers(1, 150, size=count).tolist()
    return [
        submit(
            stream,
            random.integers(3, VOCAB, size=length).tolist(),
            **{"max_tokens": 3 + stream % 20, **kinds[stream % len(kinds)]},
        )
        for stream, length in enumerate(lengths)
    ]


def both(
    directory: Path, options: dict[str, Any], play: Callable[[Driver], None]
) -> tuple[dict[int, Outcome], dict[int, Outcome]]:
    """What streams get without and with steps that are launched ahead."""
    outcomes = []
    for mode in ("off", "on"):
        driver = Driver(make_engine(directory, async_scheduling=mode, **options))
        play(driver)
        outcomes.append(driver.run())
        load = driver.engine.load()
        assert (load.running, load.waiting, load.kv_used) == (0, 0, 0)
    return outcomes[0], outcomes[1]


def carried(outcome: Outcome) -> list[tuple[int, int]]:
    """Position and number of tokens of the rows that carry some."""
    return [row for row in zip(outcome.positions, outcome.rows, strict=True) if row[1]]


def same(one: Outcome, other: Outcome) -> None:
    assert (one.tokens, one.finish, one.prompt.keys()) == (other.tokens, other.finish, other.prompt.keys())
    assert carried(one) == carried(other)
    for (ids, values, rank), (other_ids, other_values, other_rank) in zip(
        one.logprobs, other.logprobs, strict=True
    ):
        assert (ids, rank) == (other_ids, other_rank)
        assert values == pytest.approx(other_values, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kinds",
    [MIXED, MIXED[:6] + 2 * PENALISED, MIXED + PENALISED + READING],
    ids=["mixed", "penalised", "reading"],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 32},
        {"kv_cache_memory": 26 << 10, "block_size": 4, "enable_prefix_caching": False},
        {"kv_cache_memory": 26 << 10, "block_size": 4},
        {"max_num_seqs": 5, "block_size": 7},
    ],
    ids=["plain", "chunked", "preempted", "preempted-shared", "few-slots"],
)
def test_streams_get_the_same(llama: Path, options: dict[str, Any], kinds: list[dict[str, Any]]) -> None:
    preemptions = []

    def play(driver: Driver) -> None:
        for request in requests(44, kinds):
            driver.submit(request)
            if request.stream % 4:
                driver.step()
        driver.run()
        preemptions.append(driver.engine.metrics()["preemptions_total"])

    apart, ahead = both(llama, options, play)
    assert_alike(apart, ahead, same)
    assert {outcome.finish for outcome in apart.values()} >= {
        FinishReason.LENGTH,
        FinishReason.STOP_TOKEN,
        FinishReason.EOS,
    }
    if "kv_cache_memory" in options:
        assert min(preemptions) > 0


@settings(max_examples=12)
@given(
    st.lists(st.one_of(st.none(), st.integers(0, 23)), min_size=10, max_size=60),
    st.sampled_from([{}, {"kv_cache_memory": 26 << 10, "block_size": 4}, {"max_num_seqs": 3}]),
)
def test_aborts_at_any_time_leave_a_beginning_and_everything_free(
    llama: Path, acts: list[int | None], options: dict[str, Any]
) -> None:
    """None is a step, a number the abort of that stream."""

    def play(driver: Driver) -> None:
        for request in requests(24, MIXED + PENALISED + READING):
            driver.submit(request)
        for act in acts:
            if act is None:
                driver.step()
            else:
                driver.engine.abort(0, [act])

    apart, ahead = both(llama, options, play)
    for stream, outcome in apart.items():
        if FinishReason.ABORT in (outcome.finish, ahead[stream].finish):
            fewest = min(len(outcome.tokens), len(ahead[stream].tokens))
            assert outcome.tokens[:fewest] == ahead[stream].tokens[:fewest]
        else:
            same(outcome, ahead[stream])


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", [{}, *PENALISED], ids=str)
def test_tokens_are_read_one_step_later(llama: Path, sampling: dict[str, Any]) -> None:
    driver = Driver(make_engine(llama, async_scheduling="on"))
    driver.submit(submit(0, [4, 5, 6], max_tokens=3, ignore_eos=True, **sampling))
    received = []
    while driver.engine.has_work():
        driver.step()
        received.append(len(driver.outcomes[0].tokens))
    assert received == [0, 1, 2, 3]


def test_an_error_ends_what_is_in_flight(llama: Path) -> None:
    engine = make_engine(llama, async_scheduling="on")
    engine.submit(0, submit(0, [4, 5, 6], max_tokens=30, ignore_eos=True))
    tokens = sum(len(engine.step().tokens) for _ in range(4))
    assert tokens == 3
    rows = engine.fail_all("engine_error", "over")
    assert [(failure.stream, failure.position) for failure in rows.failed] == [(0, tokens)]
    assert not engine.has_work()
