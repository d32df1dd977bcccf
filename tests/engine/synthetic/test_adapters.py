"""Adapters of the synthetic engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.adapters.adapter_files import describe_adapter
from penstock.adapters.errors import AdapterError
from penstock.config.serve import ServeConfig
from penstock.engine.base import RequestRejected
from penstock.engine.lora.adapter_state import AdapterState
from penstock.engine.synthetic.engine import SyntheticEngine
from penstock.wire.messages import Adapter, LoraInfo, Submit
from tests.adapters import make_adapter
from tests.engine.support import Clock, Received, byte_level_tokenizer, submit


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def make_engine(model_dir: Path, **options: Any) -> SyntheticEngine:
    config = ServeConfig(engine="synthetic", max_model_len=64, **options)
    clock = Clock()
    return SyntheticEngine(config, str(model_dir), clock=clock, sleep=clock.sleep)


def adapter(directory: Path, name: str, seed: int = 0, rank: int = 8) -> Adapter:
    path = str(make_adapter(directory / f"{name}{seed}", seed=seed, rank=rank))
    return Adapter(name, path, digest=describe_adapter(path).digest)


def load(engine: SyntheticEngine, *adapters: Adapter) -> AdapterState:
    assert engine.adapters is not None
    state = AdapterState(engine.adapters)
    state.load_at_start(adapters, tolerant=False)
    return state


def tokens(engine: SyntheticEngine, request: Submit) -> list[int]:
    engine.submit(0, request)
    received = Received()
    while engine.has_work():
        received.step(engine.step())
    return received.tokens[request.stream]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_depend_on_the_adapter_s_files_alone(
    model_dir: Path, tmp_path: Path, temperature: float
) -> None:
    a, b = adapter(tmp_path, "a"), adapter(tmp_path, "b", seed=1)
    same = msgspec.structs.replace(a, name="c")
    engine = make_engine(model_dir, enable_lora=True)
    load(engine, a, b, same)
    base = submit(7, temperature=temperature)
    drawn = {
        name: tokens(engine, msgspec.structs.replace(base, adapter=name)) for name in (None, "a", "b", "c")
    }
    assert drawn["a"] == drawn["c"]
    assert len({tuple(each) for each in drawn.values()}) == 3
    assert drawn[None] == tokens(make_engine(model_dir), base)
    other = make_engine(model_dir, enable_lora=True)
    load(other, b, a)
    assert drawn["a"] == tokens(other, msgspec.structs.replace(base, adapter="a"))


def test_a_stream_finishes_with_the_files_that_it_began_with(model_dir: Path, tmp_path: Path) -> None:
    old, new = adapter(tmp_path, "a"), adapter(tmp_path, "a", seed=1)
    engine = make_engine(model_dir, enable_lora=True)
    state = load(engine, old)
    request = submit(7, adapter="a")
    alone = tokens(engine, request)
    engine.submit(0, request)
    received = Received()
    received.step(engine.step())
    state.load_at_start([new], tolerant=False)
    while engine.has_work():
        received.step(engine.step())
    assert received.tokens[7] == alone
    assert tokens(engine, request) != alone


def test_what_it_can_load(model_dir: Path) -> None:
    assert make_engine(model_dir).info.lora is None
    assert make_engine(model_dir).adapters is None
    engine = make_engine(model_dir, enable_lora=True, max_loras=2, max_lora_rank=4, max_cpu_loras=3)
    assert engine.info.lora == LoraInfo(2, 4, 3)
    assert engine.adapters is not None
    assert engine.adapters.max_loaded == 3


def test_files_that_cannot_be_loaded_are_named(model_dir: Path, tmp_path: Path) -> None:
    engine = make_engine(model_dir, enable_lora=True, max_lora_rank=4)
    for bad, message in (
        (adapter(tmp_path, "a", rank=8), "its rank is 8; --max-lora-rank is 4"),
        (msgspec.structs.replace(adapter(tmp_path, "b", rank=4), digest="0"), "its files have changed"),
        (Adapter("c", str(tmp_path / "none"), digest="0"), "it does not exist"),
    ):
        with pytest.raises(AdapterError, match=message):
            load(engine, bad)


@pytest.mark.parametrize("enable_lora", [True, False])
def test_an_unknown_adapter_is_refused_and_leaves_nothing(model_dir: Path, enable_lora: bool) -> None:
    engine = make_engine(model_dir, enable_lora=enable_lora)
    with pytest.raises(RequestRejected, match="the adapter 'a' is not loaded"):
        engine.submit(0, submit(0, adapter="a"))
    assert not engine.has_work()
