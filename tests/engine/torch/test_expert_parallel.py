"""Experts split over two ranks: the tokens are those of one engine that has them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from penstock.config.errors import ConfigError
from penstock.engine.torch.supported_models import WITH_EXPERTS, check_supported
from penstock.wire.frames import FinishReason
from penstock.wire.messages import Submit
from penstock.wire.weights.desired import WeightSource
from tests.adapters import make_adapter
from tests.engine.torch.adapters import load, submit_to
from tests.engine.torch.harness import VOCAB, cpu_only, make_engine, make_model, run_all, submit
from tests.engine.torch.ranks import Plan, Ranks
from tests.engine.torch.test_mxfp4 import release
from tests.engine.torch.weights import changed

pytestmark = cpu_only("ranks need a CUDA device each")

SIZE = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(SIZE)
    yield ranks
    ranks.close()


def prompt(length: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, VOCAB, size=length).tolist()
    return tokens


def alone(directory: Path, requests: Sequence[Submit], **options: Any) -> dict[int, list[int]]:
    outcomes = run_all(make_engine(directory, **options), requests)
    return {stream: outcome.tokens for stream, outcome in outcomes.items()}


OF_MANY_NAMES = ("deepseek_v3", "gpt_oss", "granitemoe", "mixtral", "qwen3_moe")
"""Families whose experts' weights have different names and layouts in files."""


@pytest.mark.parametrize("kind", sorted(WITH_EXPERTS))
def test_tokens_are_those_of_one_engine(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Work that begins and ends at different times, prompts longer than a chunk, a rank that idles."""
    make_model(kind, tmp_path)
    requests = [
        submit(stream, prompt(length, stream), max_tokens=12, ignore_eos=True)
        for stream, length in enumerate((1, 150, 70, 23, 90))
    ]
    plans = [Plan({0: requests[:1], 3: requests[1:3]}), Plan({8: requests[3:]})]
    expected = alone(tmp_path, requests, max_num_batched_tokens=64)
    told = ranks.run(tmp_path, plans, 40, max_num_batched_tokens=64)
    tokens = {stream: one.tokens for rank in told for stream, one in rank.outcomes.items()}
    assert tokens == expected
    assert all(rank.idle_steps > 0 for rank in told)
    assert {shape[0] for rank in told for shape in rank.experts} == {4 // SIZE}


def test_each_rank_unpacks_its_share_of_experts(ranks: Ranks, tmp_path: Path) -> None:
    release(tmp_path)
    requests = [submit(stream, prompt(30, stream), max_tokens=8, ignore_eos=True) for stream in range(2)]
    told = ranks.run(tmp_path, [Plan({0: requests[:1]}), Plan({0: requests[1:]})], 20)
    tokens = {stream: one.tokens for rank in told for stream, one in rank.outcomes.items()}
    assert tokens == alone(tmp_path, requests)
    assert {shape[0] for rank in told for shape in rank.experts} == {4 // SIZE}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in OF_MANY_NAMES else pytest.mark.slow)
        for kind in sorted(WITH_EXPERTS)
    ],
)
def test_each_rank_takes_its_share_of_other_weights(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    make_model(kind, tmp_path)
    changed(tmp_path, tmp_path / "other")
    names = [name for name in load_file(tmp_path / "other" / "model.safetensors") if ".layers.1." in name]
    requests = [submit(stream, prompt(20, stream), max_tokens=8, ignore_eos=True) for stream in range(2)]
    other = str(tmp_path / "other")
    first = Plan({0: requests}, weights=[WeightSource(other)])
    told = ranks.run(tmp_path, [first, Plan(weights=first.weights)], 30)
    expected = alone(tmp_path / "other", requests)
    assert {stream: one.tokens for stream, one in told[0].outcomes.items()} == expected
    first.weights = [WeightSource(other, names)]
    told = ranks.run(tmp_path, [first, Plan(weights=first.weights)], 30)
    mixed = make_engine(tmp_path)
    mixed.weights.load(mixed.weights.plan(first.weights), drop_cache=True, in_step=False, tick=lambda: None)
    outcomes = run_all(mixed, requests)
    assert [told[0].outcomes[stream].tokens for stream in range(2)] == [
        outcomes[stream].tokens for stream in range(2)
    ]


def test_each_rank_tells_the_experts_of_its_own_tokens(ranks: Ranks, tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path)
    requests = [
        submit(stream, prompt(30 + 50 * stream, stream), max_tokens=9, routed_experts=stream != 1)
        for stream in range(4)
    ]
    plans = [Plan({0: requests[:2]}), Plan({2: requests[2:]})]
    expected = run_all(make_engine(tmp_path), requests)
    told = ranks.run(tmp_path, plans, 40, max_num_batched_tokens=64)
    found = {stream: one.experts for rank in told for stream, one in rank.outcomes.items()}
    assert found == {stream: one.experts for stream, one in expected.items()}
    assert [stream for stream, experts in found.items() if experts is None] == [1]


def test_aborts_and_preemptions_on_one_rank_change_no_tokens(ranks: Ranks, tmp_path: Path) -> None:
    make_model("mixtral", tmp_path)
    first = [
        submit(stream, prompt(40, stream), max_tokens=60, ignore_eos=True, logprobs=2) for stream in range(8)
    ]
    second = [
        submit(stream, prompt(100, stream), max_tokens=20, ignore_eos=True, temperature=0.8)
        for stream in range(8, 12)
    ]
    plans = [Plan({0: first}, aborts={20: [0, 3]}), Plan({5: second}, aborts={9: [8]})]
    memory = 450 * 2 * 2 * 2 * 8 * 4  # of 450 tokens in 2 layers: 4 or 5 of rank 0's streams
    expected = alone(tmp_path, [*first, *second])
    told = ranks.run(tmp_path, plans, 200, kv_cache_memory=memory)
    assert told[0].metrics["preemptions_total"] > 0
    tokens = {stream: one.tokens for rank in told for stream, one in rank.outcomes.items()}
    for stream, whole in expected.items():
        if stream in (0, 3, 8):
            assert whole[: len(tokens[stream])] == tokens[stream]
            assert len(tokens[stream]) < len(whole)
        else:
            assert tokens[stream] == whole
    assert told[1].outcomes[8].finish is FinishReason.ABORT


def test_adapters_run_beside_split_experts(ranks: Ranks, tmp_path: Path) -> None:
    make_model("qwen2_moe", tmp_path / "model")
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 1}
    engine = make_engine(tmp_path / "model", **options)
    assert engine.info.lora is not None
    paths = {
        name: make_adapter(tmp_path / name, engine.info.lora.modules, 4, seed=seed, scale=0.2)
        for seed, name in enumerate(("a", "b"))
    }
    load(engine, paths)
    requests = [
        submit_to(name, stream, prompt(30 + stream, stream), max_tokens=10, ignore_eos=True)
        for stream, name in enumerate(("a", None, "b", "a"))
    ]
    expected = {stream: outcome.tokens for stream, outcome in run_all(engine, requests).items()}
    plans = [Plan({0: requests[:3]}, adapters=paths), Plan({2: requests[3:]}, adapters=paths)]
    told = ranks.run(tmp_path / "model", plans, 50, **options)
    assert {stream: one.tokens for rank in told for stream, one in rank.outcomes.items()} == expected


def test_random_weights_are_those_of_one_engine(ranks: Ranks, tmp_path: Path) -> None:
    """Also with steps that are launched ahead."""
    make_model("qwen3_moe", tmp_path)
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    options = {"load_format": "dummy", "seed": 5}
    requests = [submit(stream, prompt(30, stream), max_tokens=10) for stream in range(4)]
    plans = [Plan({0: requests[:3]}), Plan({2: requests[3:]})]
    told = ranks.run(tmp_path, plans, 30, async_scheduling="on", **options)
    tokens = {stream: one.tokens for rank in told for stream, one in rank.outcomes.items()}
    assert tokens == alone(tmp_path, requests, **options)


def test_experts_that_cannot_be_split_evenly_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    make_model("mixtral", tmp_path, num_local_experts=3)
    for refusal in ranks.refusals(tmp_path):
        assert refusal.startswith("ConfigError: --data-parallel-size 2: the model's 3 experts")


@pytest.mark.parametrize("kind", ["llama", "gemma4_text"])
def test_a_model_without_experts_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    """Of Gemma 4 some models have experts."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    check_supported(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"--enable-expert-parallel: .*'{kind}', which has no experts.*mixtral"
    ):
        check_supported(tmp_path, with_experts=True)
