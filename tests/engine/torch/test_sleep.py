"""What the torch engine gives back while it sleeps, and profiles."""

from __future__ import annotations

import gzip
import json
import weakref
from pathlib import Path

import pytest
import torch

from penstock.config.errors import ConfigError
from penstock.engine.torch import model as paged
from tests.engine.torch.harness import make_engine, make_model, run_all, submit

pytestmark = pytest.mark.gpu

PROMPT = [5, 6, 7, 8] * 12


@pytest.mark.parametrize("kind", ["llama", "bloom"])
@pytest.mark.parametrize("level", [1, 2])
def test_it_wakes_as_it_was(tmp_path: Path, kind: str, level: int) -> None:
    make_model(kind, tmp_path)
    engine = make_engine(tmp_path)
    before = run_all(engine, [submit(0, PROMPT, max_tokens=12, ignore_eos=True)])[0].tokens
    engine.call("sleep", {"level": level})
    engine.call("wake_up", {})
    assert engine.load().kv_used == 0
    after = run_all(engine, [submit(1, PROMPT, max_tokens=12, ignore_eos=True)])[1]
    assert after.tokens == before
    assert engine.metrics()["prefix_cache_hits_total"] == 0  # the cache went with its blocks


def test_memory_is_given_back(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    engine = make_engine(tmp_path)
    run_all(engine, [submit(0, PROMPT)])
    attention = engine._models[0].attention
    cache = [weakref.ref(tensor) for tensor in (*attention.keys, *attention.values)]
    weights = [weakref.ref(tensor) for tensor in engine._models[0]._model.parameters()]
    del attention
    engine.call("sleep", {"level": 1})
    assert not any(tensor() is not None for tensor in cache)
    assert all(tensor() is not None for tensor in weights)
    engine.call("sleep", {"level": 2})
    assert not any(tensor() is not None for tensor in weights)


def test_without_room_it_stays_asleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model("llama", tmp_path)
    engine = make_engine(tmp_path)
    before = run_all(engine, [submit(0, PROMPT)])[0].tokens
    engine.call("sleep", {"level": 2})
    with monkeypatch.context() as patch:

        def no_room(*arguments: object, **options: object) -> None:
            raise torch.OutOfMemoryError("no room")

        patch.setattr(paged, "PagedAttention", no_room)
        with pytest.raises(ConfigError, match=r"out of memory while allocating a KV cache .*: no room"):
            engine.call("wake_up", {})
    assert engine._models[0]._model is None
    engine.call("wake_up", {})
    assert run_all(engine, [submit(1, PROMPT)])[1].tokens == before


def test_running_streams_keep_what_a_reset_hides_from_others(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    alone = run_all(make_engine(tmp_path), [submit(0, PROMPT, max_tokens=12)])[0].tokens
    engine = make_engine(tmp_path)
    engine.submit(0, submit(0, PROMPT, max_tokens=12))
    tokens = []
    for step in range(12):
        if step == 3:
            engine.call("reset_prefix_cache", {})
            engine.submit(0, submit(1, PROMPT, max_tokens=1))
        rows = engine.step()
        tokens += [
            token
            for stream, token in zip(rows.stream.tolist(), rows.tokens.tolist(), strict=True)
            if not stream
        ]
    assert tokens == alone
    assert engine.metrics()["prefix_cache_hits_total"] == 0


def test_a_profile_is_a_trace(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    engine = make_engine(tmp_path)
    with pytest.raises(ValueError, match="no profile is being recorded"):
        engine.call("stop_profile", {"path": str(tmp_path / "p")})
    engine.call("start_profile", {})
    run_all(engine, [submit(0, PROMPT, max_tokens=2)])
    path = engine.call("stop_profile", {"path": str(tmp_path / "p")})
    with gzip.open(path) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::addmm" in names or "aten::mm" in names
