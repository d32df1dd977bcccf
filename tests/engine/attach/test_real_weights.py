"""vLLM's own pause and its reading of other weights, in a process that is started and attached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.engine.attach.engine import AttachedEngine
from penstock.engine.base import Hold
from penstock.wire.frames import FinishReason
from penstock.wire.weights.desired import WeightSource
from tests.engine.attach.small_engine import (
    PROMPT,
    SLOTS,
    Run,
    generate,
    make_model,
    run,
    start_engine,
    step,
    wait,
)
from tests.engine.support import submit

pytestmark = pytest.mark.filterwarnings("ignore")

LONG = 400
"""Tokens of a stream that is to be held before its end."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``start/`` has the model, ``other.safetensors`` and ``other/`` have other weights; and wrong ones."""
    made = tmp_path_factory.mktemp("model")
    (made / "start").mkdir()
    make_model(made / "start")
    torch.manual_seed(7)
    config = transformers.LlamaConfig.from_pretrained(made / "start")
    other = transformers.LlamaForCausalLM(config)
    other.save_pretrained(made / "other")
    weights = load_file(made / "other" / "model.safetensors")
    save_file(weights, made / "other.safetensors")
    name = next(iter(weights))
    save_file({each: w for each, w in weights.items() if each != name}, made / "lacking.safetensors")
    save_file(weights | {name: weights[name][1:].contiguous()}, made / "narrow.safetensors")
    save_file(weights | {"model.layers.9.dance.weight": weights[name].clone()}, made / "strange.safetensors")
    return made


@pytest.fixture(scope="module")
def shared(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttachedEngine]:
    options = {"dtype": "float32", "max_num_seqs": SLOTS, "kv_cache_memory": 16 << 20}
    own = ["--enforce-eager", "--block-size", "32"]
    made = start_engine(directory / "start", tmp_path_factory.mktemp("run"), own, options)
    yield made
    made.close()


@pytest.fixture
def engine(shared: AttachedEngine) -> Iterator[AttachedEngine]:
    """Without a stream, and with the weights of the start, before and after."""
    yield shared
    shared.drop_server(0)
    load(shared)
    shared.hold(Hold.NOTHING)
    run(shared)
    assert shared.load().running == shared.load().waiting == 0


def load(engine: AttachedEngine, *paths: Path, drop_cache: bool = True) -> int:
    assert engine.weights is not None
    plan = engine.weights.plan([WeightSource(str(path)) for path in paths])
    return engine.weights.load(plan, drop_cache=drop_cache, in_step=False, tick=lambda: None)


def frozen(engine: AttachedEngine, **fields: Any) -> Run:
    """What stream 0 has got when all are held, before its end. An engine may have made all tokens before this
    process has its turn: then it is begun anew."""
    for _ in range(20):
        engine.submit(0, submit(0, LONG, prompt=PROMPT, temperature=0.0, ignore_eos=True, **fields))
        received = Run()
        while not received.tokens.get(0):
            received.take(step(engine))
        engine.hold(Hold.ALL)
        while engine.can_step():
            received.take(engine.step())
        if 0 not in received.finish:
            return received
        engine.hold(Hold.NOTHING)
    raise AssertionError("no stream was running when it was to be held")


def test_kept_streams_stand_still_and_go_on_with_the_same_tokens(engine: AttachedEngine) -> None:
    expected = generate(engine, max_tokens=LONG)
    received = frozen(engine)
    assert engine._core.call("is_scheduler_paused")
    engine.submit(0, submit(1, 5, prompt=PROMPT, temperature=0.0, ignore_eos=True))
    for _ in range(5):
        assert not engine.can_step()
        wait(engine)
    assert (engine.load().running, engine.load().waiting) == (1, 1)
    engine.hold(Hold.NOTHING)
    run(engine, received)
    assert received.tokens == {0: expected, 1: expected[:5]}


def test_streams_that_are_held_can_be_aborted(engine: AttachedEngine) -> None:
    received = frozen(engine)
    engine.abort(0, [0])
    received.take(engine.step())
    assert received.finish[0] == FinishReason.ABORT
    assert not engine.has_work()
    engine.hold(Hold.NOTHING)
    assert len(generate(engine, max_tokens=4)) == 4


def test_other_weights_by_file_and_directory_and_back(engine: AttachedEngine, directory: Path) -> None:
    assert engine.weights is not None
    before, checksum = generate(engine, max_tokens=12), engine.weights.checksum()
    assert load(engine, directory / "other.safetensors") == 21
    after, changed = generate(engine, max_tokens=12), engine.weights.checksum()
    assert load(engine) == 0
    assert (generate(engine, max_tokens=12), engine.weights.checksum()) == (before, checksum)
    assert load(engine, directory / "other") == 21
    assert (generate(engine, max_tokens=12), engine.weights.checksum()) == (after, changed)
    assert before != after
    assert checksum != changed


def test_a_kept_stream_goes_on_with_the_new_weights(engine: AttachedEngine, directory: Path) -> None:
    """Its KV cache is computed again: it continues as a prompt with its tokens would."""
    received = frozen(engine, interval=7)
    received.take(engine.flush())
    kept = list(received.tokens[0])
    load(engine, directory / "other.safetensors")
    engine.hold(Hold.NOTHING)
    run(engine, received)
    rest = generate(engine, prompt=[*PROMPT, *kept], max_tokens=LONG - len(kept))
    assert received.tokens[0] == [*kept, *rest]


def test_what_does_not_fit_is_refused_before_anything_changes(
    engine: AttachedEngine, directory: Path
) -> None:
    expected = generate(engine, max_tokens=12)
    for name, reason in (
        ("lacking", r"no weights for "),
        ("narrow", r" is \[.*\], not \["),
        ("nothing", "cannot be read: No such file"),
    ):
        with pytest.raises(ValueError, match=reason):
            load(engine, directory / f"{name}.safetensors")
    with pytest.raises(ValueError, match="whole models, each from one path"):
        load(engine, directory / "other", directory / "other.safetensors")
    assert engine._core.call("get_weight_version") == "default"
    assert generate(engine, max_tokens=12) == expected


def test_what_vllm_refuses_is_taken_back(engine: AttachedEngine, directory: Path) -> None:
    assert engine.weights is not None
    load(engine, directory / "other.safetensors")
    expected, checksum = generate(engine, max_tokens=12), engine.weights.checksum()
    with pytest.raises(ValueError, match=r"vLLM: There is no module or parameter named 'layers\.9'"):
        load(engine, directory / "strange.safetensors")
    assert engine.weights.checksum() == checksum
    assert generate(engine, max_tokens=12) == expected
