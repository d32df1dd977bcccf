"""Which measurements of steps a device has memory for; these tests need the torch extra."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from scripts.gpu.decoding import SteppedEngine
from scripts.gpu.measuring import Stage
from scripts.gpu.shapes import Shape, find_shape
from scripts.gpu.steps import GIB, ROOM, ROOM_EAGER, TAKEN, Steps, plan_of


def steps_of(shape: Shape, free: float, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """On a GPU with so many GiB free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free * GIB), 80 * GIB))
    return Steps(cast(Stage, SimpleNamespace(device="cuda", tiny=False)), shape, "")


def engine_of(cache_tokens: int) -> SteppedEngine:
    info = SimpleNamespace(kv_cache_tokens=cache_tokens)
    return cast(SteppedEngine, SimpleNamespace(engine=SimpleNamespace(info=info)))


@pytest.mark.parametrize("name", ["opt-125m", "llama-8b"])
def test_80_gb_hold_everything(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = find_shape(name, tiny=False)
    plan, steps = plan_of(shape, tiny=False), steps_of(shape, 78.5, monkeypatch)
    cache = steps._cache_bytes()
    assert cache == plan.kv_bytes
    stepped = engine_of(cache // shape.kv_bytes_per_token(2) - 16)
    for streams, prompt in [*plan.decodes, *plan.long_decodes]:
        assert steps._fits(stepped, "", streams, prompt + TAKEN)
    weights = 2 * shape.parameters
    assert weights + cache + ROOM + weights + plan.kv_bytes_eager + ROOM_EAGER < 78.5 * GIB
    assert capsys.readouterr().out == ""


def test_on_a_smaller_device_the_cache_is_what_is_free(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it cannot hold is skipped, in a line each; a second engine as well."""
    shape = find_shape("llama-8b", tiny=False)
    steps = steps_of(shape, 23.5, monkeypatch)
    cache = steps._cache_bytes()
    assert cache == int(23.5 * GIB) - 2 * shape.parameters - ROOM
    stepped = engine_of(cache // shape.kv_bytes_per_token(2))
    assert steps._fits(stepped, "1 stream", 1, 512 + TAKEN)
    assert not steps._fits(stepped, "64 streams", 64, 512 + TAKEN)
    monkeypatch.setattr(steps, "_start", lambda *_, **__: pytest.fail("a second engine"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (ROOM, 24 * GIB))
    steps._without_graphs(stepped)
    lines = capsys.readouterr().out.splitlines()
    told: list[dict[str, Any]] = [json.loads(line.partition(": ")[2]) for line in lines]
    assert [(each["table"], each["name"]) for each in told] == [
        ("skipped", "llama-8b: 64 streams"),
        ("skipped", "llama-8b: steps without graphs"),
    ]
    assert told[0]["values"] == {"KV cache tokens needed": 38_912, "there are": cache // 131072}
    assert told[1]["values"] == {"GiB needed": pytest.approx(22.96, abs=0.01), "there are": 6.0}
