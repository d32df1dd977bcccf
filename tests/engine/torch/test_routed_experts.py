"""Streams that ask get the experts of all their tokens, as transformers' own forward pass chooses them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.engine.base import RequestRejected
from penstock.engine.batch import routed_experts
from penstock.engine.torch.engine import TorchEngine
from penstock.engine.torch.experts import RouteRecorder
from penstock.engine.torch.supported_models import WITH_EXPERTS
from penstock.wire.messages import RoutedExperts, Submit
from tests.engine.torch.harness import VOCAB, make_engine, make_model, submit

pytestmark = pytest.mark.gpu


def prompt(length: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(3, VOCAB, length).tolist()
    return drawn


@dataclass
class Found:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    experts: dict[int, NDArray[Any]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)


def run(engine: TorchEngine, requests: Iterable[Submit], abort_after: int | None = None) -> Found:
    """Run all; streams whose number is odd are aborted after so many steps."""
    found = Found()
    for request in requests:
        found.tokens[request.stream] = np.frombuffer(request.prompt, "<i4").tolist()
        engine.submit(0, request)
    steps = 0
    while engine.has_work():
        if steps == abort_after:
            engine.abort(0, [stream for stream in found.tokens if stream % 2])
        steps += 1
        rows = engine.step()
        assert not rows.failed
        for server, message in rows.routed:
            assert server == 0
            assert message.stream not in found.experts
            found.experts[message.stream] = array_of(message)
        counts = np.ones(len(rows.stream), np.int32) if rows.count is None else rows.count
        for stream, token in zip(np.repeat(rows.stream, counts).tolist(), rows.tokens.tolist(), strict=True):
            found.tokens[stream].append(token)
        if rows.finish is not None:
            found.ended |= set(rows.stream[rows.finish != 0].tolist())
    assert found.ended == found.tokens.keys()
    return found


def array_of(message: RoutedExperts) -> NDArray[Any]:
    dtype = {1: np.uint8, 2: np.uint16}[message.width]
    return np.frombuffer(message.data, dtype).reshape(-1, message.layers, message.per_token)


@torch.inference_mode()
def chosen_by(model: Any, tokens: list[int]) -> NDArray[Any]:
    with RouteRecorder(model).recording() as recorded:
        model(torch.tensor([tokens], device=model.device))
    experts: NDArray[Any] = torch.stack(recorded, 1).cpu().numpy()
    return experts


def check(model: Any, found: Found, asked: Iterable[int]) -> None:
    assert found.experts.keys() == set(asked)
    for stream, experts in found.experts.items():
        expected = chosen_by(model, found.tokens[stream][:-1])
        assert experts.shape == expected.shape
        differing = np.count_nonzero((np.sort(experts) != np.sort(expected)).any(axis=(1, 2)))
        assert differing <= len(experts) // 100, "more than near ties explain"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    directory = tmp_path_factory.mktemp("qwen")
    return make_model("qwen3_moe", directory), directory


@pytest.mark.parametrize("kind", sorted(WITH_EXPERTS))
def test_every_family_with_experts(kind: str, tmp_path: Path) -> None:
    model = make_model(kind, tmp_path)
    found = run(
        make_engine(tmp_path),
        [submit(stream, prompt(5 + 20 * stream, stream), routed_experts=stream != 1) for stream in range(3)],
    )
    check(model, found, (0, 2))
    assert all(experts.dtype == np.uint8 for experts in found.experts.values())


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"async_scheduling": "on"},
        {"kv_cache_memory": 1 << 16, "max_model_len": 128},
        {"speculative_method": "ngram"},
        {"max_num_seqs": 2},
    ],
    ids=str,
)
def test_however_tokens_are_computed(qwen: tuple[Any, Path], options: dict[str, Any]) -> None:
    model, directory = qwen
    engine = make_engine(directory, **options)
    requests = [
        submit(stream, prompt(12 + 9 * stream, stream) * 2, max_tokens=30, interval=3, routed_experts=True)
        for stream in range(4)
    ]
    check(model, run(engine, requests), range(4))
    if "kv_cache_memory" in options:
        assert engine.metrics()["preemptions_total"] > 0


def test_a_prompt_that_is_cached_is_computed_again(qwen: tuple[Any, Path]) -> None:
    model, directory = qwen
    engine = make_engine(directory)
    for stream in range(2):
        check(model, run(engine, [submit(stream, prompt(100), routed_experts=True)]), [stream])
    assert engine.metrics()["prefix_cache_hits_total"] == 0
    run(engine, [submit(2, prompt(100))])
    assert engine.metrics()["prefix_cache_hits_total"] > 0


def test_a_stream_that_another_engine_began_has_all(qwen: tuple[Any, Path]) -> None:
    model, directory = qwen
    request = submit(0, prompt(30), resumed=9, max_tokens=20, routed_experts=True)
    check(model, run(make_engine(directory), [request]), [0])


def test_an_aborted_stream_has_those_that_were_computed(qwen: tuple[Any, Path]) -> None:
    model, directory = qwen
    engine = make_engine(directory, max_num_batched_tokens=16)
    requests = [submit(stream, prompt(40, stream), max_tokens=40, routed_experts=True) for stream in range(3)]
    found = run(engine, requests, abort_after=8)
    experts = found.experts[1]
    assert len(experts) < 79
    assert np.array_equal(experts, chosen_by(model, found.tokens[1])[: len(experts)])
    assert engine._scheduler.streams.routes is not None
    assert engine._scheduler.streams.routes._bytes == 0


def test_nobody_asks_nothing_is_recorded(qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: RouteRecorder) -> None:
        raise AssertionError("recorded")

    monkeypatch.setattr(RouteRecorder, "recording", refuse)
    assert not run(make_engine(qwen[1]), [submit(0, prompt(9))]).experts


def test_streams_wait_for_memory(qwen: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, directory = qwen
    monkeypatch.setattr(routed_experts, "MAX_BYTES", 2 * 29 * 2 * 2)  # two streams of 29 positions
    engine = make_engine(directory)
    requests = [submit(stream, prompt(20, stream), max_tokens=10, routed_experts=True) for stream in range(5)]
    most = 0
    step = engine.step

    def noting() -> Any:
        nonlocal most
        rows = step()
        most = max(most, engine.load().running)
        return rows

    monkeypatch.setattr(engine, "step", noting)
    check(model, run(engine, requests), range(5))
    assert most == 2


def test_what_cannot_be_told_is_refused(
    qwen: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path)
    with pytest.raises(RequestRejected, match=r"^return_routed_experts: this engine has no model"):
        make_engine(tmp_path).submit(0, submit(0, prompt(9), routed_experts=True))
    monkeypatch.setattr(routed_experts, "MAX_ROUTED_BYTES", 95)
    with pytest.raises(RequestRejected, match=r"^return_routed_experts: 96 bytes"):
        make_engine(qwen[1]).submit(0, submit(0, prompt(9), routed_experts=True))


def test_more_than_256_experts_take_two_bytes() -> None:
    for experts, dtype in ((256, np.uint8), (257, np.uint16)):
        assert routed_experts.ExpertRoutes(layers=1, per_token=1, experts=experts).dtype == dtype
