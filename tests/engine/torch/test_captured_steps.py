"""CUDA graphs as a GPU records and replays them: streams get what they get without, whatever the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.engine.torch.cuda.decode_graphs import padded_sizes
from penstock.engine.torch.engine import TorchEngine
from penstock.wire.messages import Submit
from tests.engine.torch.harness import (
    DEVICE,
    ROUNDED,
    VOCAB,
    Driver,
    Outcome,
    assert_alike,
    make_engine,
    make_model,
    submit,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="test_decode_graphs.py has recordings on a CPU"),
]

STREAMS = 20
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "repetition_penalty": 1.2},
    {"logprobs": 2},
]


def requests(dtype: str) -> list[Submit]:
    """Of unlike lengths and ends, so that steps are of many sizes, beside prompts and alone."""
    random = np.random.default_rng(7)
    # in half precision a random choice may turn where a graph's kernels add up otherwise
    kinds = SAMPLING if dtype == "float32" else [{}]
    return [
        submit(
            stream,
            random.integers(3, VOCAB, random.integers(1, 60)).tolist(),
            max_tokens=STREAMS + 4 + 2 * stream,  # all run together, then ever fewer
            ignore_eos=True,
            **kinds[stream % len(kinds)],
        )
        for stream in range(STREAMS)
    ]


def played(engine: TorchEngine, dtype: str) -> dict[int, Outcome]:
    driver = Driver(engine)
    for request in requests(dtype):
        driver.submit(request)
        driver.step()
    return driver.run()


def tokens_of(outcomes: dict[int, Outcome]) -> dict[int, list[int]]:
    return {stream: outcome.tokens for stream, outcome in outcomes.items()}


def replays(engine: TorchEngine) -> list[int]:
    """Has the engine note the sizes of the graphs that it replays."""
    noted: list[int] = []
    graphs = engine._models[0]._graphs
    assert graphs is not None, "no graphs were recorded"
    for size, replay in list(graphs._replays.items()):

        def noting(size: int = size, replay: Any = replay) -> Any:
            noted.append(size)
            return replay()

        graphs._replays[size] = noting
    return noted


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("llama", "float32"),
        ("gemma2", "float32"),
        ("bloom", "float32"),
        ("opt", "float32"),
        ("phi3", "float32"),
        ("qwen3", "float32"),
        ("llama", "bfloat16"),
    ],
)
def test_streams_get_what_they_get_without_graphs(tmp_path: Path, kind: str, dtype: str) -> None:
    make_model(kind, tmp_path)
    options: dict[str, Any] = {"max_num_seqs": STREAMS, "max_model_len": 256, "dtype": dtype}
    eager = make_engine(tmp_path, enforce_eager=True, **options)
    assert eager._models[0]._graphs is None
    expected = played(eager, dtype)
    engine = make_engine(tmp_path, async_scheduling="on", **options)
    noted = replays(engine)
    found = played(engine, dtype)
    assert set(noted) == set(padded_sizes(STREAMS)), "every size is replayed"
    same = [found[stream].tokens == outcome.tokens for stream, outcome in expected.items()]
    # a product of another number of rows rounds otherwise, in half precision often
    assert sum(same) >= STREAMS * (1 - ROUNDED if dtype == "float32" else 0.5)


@pytest.mark.parametrize("level", [1, 2])
def test_they_are_recorded_again_after_a_sleep(tmp_path: Path, level: int) -> None:
    make_model("llama", tmp_path)
    engine = make_engine(tmp_path, max_num_seqs=STREAMS, max_model_len=256)
    before = played(engine, "float32")
    for _ in range(2):
        engine.call("sleep", {"level": level})
        engine.call("wake_up", {})
        noted = replays(engine)
        assert_alike(tokens_of(before), tokens_of(played(engine, "float32")))
        assert noted


def test_experts_are_served_with_graphs_or_without(tmp_path: Path) -> None:
    """Their routing may need the host; then the engine says so and goes on."""
    make_model("qwen3_moe", tmp_path)
    options: dict[str, Any] = {"max_num_seqs": STREAMS, "max_model_len": 256}
    expected = played(make_engine(tmp_path, enforce_eager=True, **options), "float32")
    assert_alike(tokens_of(expected), tokens_of(played(make_engine(tmp_path, **options), "float32")))
