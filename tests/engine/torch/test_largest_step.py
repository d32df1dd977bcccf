"""The steps whose memory is measured are as large as the scheduler's can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock.config.serve import ServeConfig
from penstock.engine.torch.largest_step import longest_streams, most_streams, run_largest_steps
from penstock.engine.torch.lora.lora_layers import SharedInput
from penstock.engine.torch.lora.lora_plan import LoraPlan
from penstock.engine.torch.model import PagedModel
from penstock.engine.torch.model_runner import ModelRunner
from penstock.engine.torch.sampling.sampler import Sampler
from tests.engine.torch.harness import DEVICE, SMALL_ENGINE, make_engine, make_model, run_all, submit

OPTIONS: list[tuple[int, dict[str, Any]]] = [
    (1024, {}),
    (1024, {"max_num_batched_tokens": 3000, "max_num_seqs": 2048}),
    (1024, {"max_num_batched_tokens": 16}),
    (100, {"max_num_seqs": 7}),
    (2, {"max_num_seqs": 3}),
]


@pytest.mark.parametrize(("longest", "options"), OPTIONS)
def test_steps_take_all_tokens_that_fit_and_no_part_is_too_long(
    longest: int, options: dict[str, Any]
) -> None:
    config = ServeConfig(**SMALL_ENGINE | options)
    tokens = config.max_num_batched_tokens
    for start, count in (most_streams(config, longest), longest_streams(config, longest)):
        assert (count >= 1).all()
        assert (start >= 0).all()
        assert (start + count < longest).all(), "no room for a sampled token"
        assert len(count) <= config.max_num_seqs
        assert count.sum() == min(tokens, len(count) * (longest - 1))
        assert sorted(count) == list(count), "single tokens come first"
    start, count = most_streams(config, longest)
    assert len(count) == min(tokens, config.max_num_seqs)
    start, count = longest_streams(config, longest)
    assert (start + count == longest - 1).all()


def test_they_run_like_a_batch_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path)
    requests = [submit(stream, range(3, 40 + stream), max_tokens=20) for stream in range(4)]
    expected = run_all(make_engine(tmp_path), requests)
    engine = make_engine(tmp_path)
    model, sampled, tokens = engine._models[0], list[Tensor](), list[int]()
    monkeypatch.setattr(Sampler, "sample", _noted(sampled, Sampler.sample))
    monkeypatch.setattr(type(model), "hidden", _counted(tokens, type(model).hidden))
    run_largest_steps([model], ServeConfig(**SMALL_ENGINE), 1024, DEVICE)
    monkeypatch.undo()
    assert tokens == [2048, 2048]
    assert [len(logits) for logits in sampled] == [64, 3]
    model.make_cache(engine._blocks.blocks + 1, 16)
    assert run_all(engine, requests) == expected


def test_their_sampler_sorts_the_whole_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path, vocab_size=2000)
    model = make_engine(tmp_path)._models[0]
    widths = []
    sort = Tensor.sort

    def noted(values: Tensor, *arguments: Any, **options: Any) -> Any:
        widths.append(tuple(values.shape))
        return sort(values, *arguments, **options)

    monkeypatch.setattr(Tensor, "sort", noted)
    run_largest_steps([model], ServeConfig(**SMALL_ENGINE), 1024, DEVICE)
    assert (64, 2000) in widths


def test_adapters_and_draft_models_run_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    make_model("llama", target)
    make_model("opt", draft, max_position_embeddings=100)  # a position beyond is an error
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "lora_modules": []}
    speculation = {"speculative_method": "draft", "draft_model": str(draft)}
    engine = make_engine(target, str(draft), **options, **speculation)
    reduced = []
    reduce = SharedInput._reduce

    def noted(self: SharedInput, plan: LoraPlan, ranks: list[int], values: Tensor) -> Any:
        reduced.append((plan.places.tolist(), ranks, len(values)))
        return reduce(self, plan, ranks, values)

    monkeypatch.setattr(SharedInput, "_reduce", noted)
    tokens: list[int] = []
    monkeypatch.setattr(PagedModel, "hidden", _counted(tokens, PagedModel.hidden))
    config = ServeConfig(**SMALL_ENGINE | options)
    run_largest_steps(engine._models, config, 1024, DEVICE)
    assert tokens == [2048, 2048, 2048, 2048]
    assert reduced[0] == ([0, 1, 2], [8, 8, 8], 2048)
    lora = engine._models[0].lora
    assert lora is not None
    assert lora._ranks == [0, 0, 0]
    assert not lora._changes.any()


@pytest.mark.parametrize(("tokens", "most", "rows"), [("auto", 32, 64 * 32), (3, 3, 64 * 4)])
def test_drafts_are_sampled_and_prompts_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: Any, most: int, rows: int
) -> None:
    make_model("llama", tmp_path)
    options = {"speculative_method": "ngram", "speculative_tokens": tokens}
    model = make_engine(tmp_path, **options)._models[0]
    sampled, scored = list[Tensor](), list[int]()
    monkeypatch.setattr(Sampler, "sample", _noted(sampled, Sampler.sample))
    score = ModelRunner._score

    def noted(self: ModelRunner, hidden: Tensor, *rest: Any) -> Any:
        scored.append(len(hidden))
        return score(self, hidden, *rest)

    monkeypatch.setattr(ModelRunner, "_score", noted)
    run_largest_steps([model], ServeConfig(**SMALL_ENGINE | options), 1024, DEVICE)
    longest = sum(map(len, sampled)) - rows
    assert longest == 2 + 2 * (1 + most), "of parts of 2, 1,023 and 1,023 tokens"
    # all others are tokens of prompts, which have a score each
    assert scored == [size for size in (2048 - rows, 2048 - longest) if size]


def _noted(sampled: list[Tensor], sample: Callable[..., Any]) -> Callable[..., Any]:
    def noted(self: Sampler, logits: Tensor, *rest: Any) -> Any:
        sampled.append(logits)
        return sample(self, logits, *rest)

    return noted


def _counted(counts: list[int], hidden: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def counted(self: Any, tokens: Tensor, *rest: Any) -> Tensor:
        counts.append(len(tokens))
        return hidden(self, tokens, *rest)

    return counted
