"""Weights of the torch engine that are replaced while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.engine.base import Hold
from penstock.engine.torch.engine import TorchEngine
from penstock.engine.weights.weight_file import with_digest
from penstock.engine.weights.weight_loader import BrokenWeights
from penstock.wire.kv_events import AllBlocksCleared
from penstock.wire.weights.desired import WeightSource
from tests.engine.torch.harness import FAMILIES, Driver, generate, make_engine, make_model, run_all, submit
from tests.engine.torch.weights import changed

PROMPT = [5, 9, 200, 17]
WEIGHTS = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
HEAD = "lm_head.weight"


def source(path: Path, tensors: Iterable[str] | None = None) -> WeightSource:
    return WeightSource(str(path), None if tensors is None else list(tensors))


def load(engine: TorchEngine, *sources: WeightSource, drop_cache: bool = True) -> int:
    plan = engine.weights.plan(sources)
    return engine.weights.load(plan, drop_cache=drop_cache, in_step=False, tick=lambda: None)


def tokens(engine: TorchEngine, prompt: list[int] = PROMPT, **sampling: Any) -> list[int]:
    return run_all(engine, [submit(0, prompt, **({"max_tokens": 8} | sampling))])[0].tokens


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make_model("llama", tmp_path / "start")
    return tmp_path / "start"


@pytest.fixture
def other(llama: Path, tmp_path: Path) -> transformers.PreTrainedModel:
    """With the files in ``tmp_path / "other"``."""
    return changed(llama, tmp_path / "other")


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_family_gets_other_weights(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path / "start")
    model = changed(tmp_path / "start", tmp_path / "other")
    engine = make_engine(tmp_path / "start")
    before = engine.weights.checksum()
    assert load(engine, source(tmp_path / "other")) == len(load_file(tmp_path / "other" / WEIGHTS))
    assert tokens(engine) == generate(model, PROMPT, 8)
    fresh = make_engine(tmp_path / "other")
    assert engine.weights.checksum() == fresh.weights.checksum() != before
    load(engine)
    assert engine.weights.checksum() == before, "those of the start are read again"


@pytest.mark.parametrize("options", [{"enable_lora": True}, {"batch_invariant": True}, {"dtype": "bfloat16"}])
def test_wrapped_layers_get_other_weights(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    engine, fresh = make_engine(llama, **options), make_engine(tmp_path / "other", **options)
    load(engine, source(tmp_path / "other" / WEIGHTS))
    assert tokens(engine) == tokens(fresh)
    assert engine.weights.checksum() == fresh.weights.checksum()


def test_parameters_keep_their_memory(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    engine = make_engine(llama)
    parameters = engine._models[0].parameters
    assert parameters is not None
    places = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    load(engine, source(tmp_path / "other"))
    assert {name: parameter.data_ptr() for name, parameter in parameters.items()} == places


def test_sharded_files_and_half_precision(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    other.to(torch.bfloat16).save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    engine = make_engine(llama)
    load(engine, source(tmp_path / "shards"))
    assert tokens(engine) == tokens(make_engine(tmp_path / "shards", dtype="float32"))


@pytest.mark.parametrize(
    ("dtype", "stored", "value"),
    [
        ("float32", torch.float64, 1e300),
        ("bfloat16", torch.float64, -1e300),
        ("bfloat16", torch.float32, torch.finfo(torch.float32).max),
        ("float16", torch.float32, 65520.0),
        ("float16", torch.bfloat16, -65536.0),
        ("float16", torch.float32, float("nan")),
    ],
)
def test_values_beyond_the_type_of_the_model_are_refused(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path, dtype: str, stored: Any, value: float
) -> None:
    """Wherever they are: one that the digest does not cover is found, too."""
    engine = make_engine(llama, dtype=dtype)
    before, path = engine.weights.checksum(), tmp_path / "other" / WEIGHTS
    tensors = {name: tensor.to(stored) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    load(engine, source(path))
    load(engine)
    tensors[UP].view(-1)[tensors[UP].numel() // 2 + 99] = value
    save_file(tensors, path)
    kind = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}[stored]
    message = f"^{UP}, of type {kind}, has values that are infinite in the model's type, {dtype}$"
    with pytest.raises(ValueError, match=message):
        engine.weights.plan([with_digest(source(path))])
    assert engine.weights.checksum() == before


def test_the_largest_values_that_are_rounded_to_finite_ones_are_taken(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    engine, path = make_engine(llama, dtype="float16"), tmp_path / "other" / WEIGHTS
    tensors = load_file(path)
    tensors[UP].view(-1)[0], tensors[UP].view(-1)[-1] = 65519.0, -65519.0
    save_file(tensors, path)
    load(engine, source(path))


# -- some tensors


def test_some_tensors_upon_the_present_ones(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    engine = make_engine(llama)
    up = source(tmp_path / "other", [UP])
    assert load(engine, up) == 1
    mixed = load_file(llama / WEIGHTS)
    mixed[UP] = load_file(tmp_path / "other" / WEIGHTS)[UP]
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "config.json").write_text((llama / "config.json").read_text())
    save_file(mixed, tmp_path / "mixed" / WEIGHTS, metadata={"format": "pt"})
    expected = make_engine(tmp_path / "mixed").weights.checksum()
    assert engine.weights.checksum() == expected
    head = source(tmp_path / "other", [HEAD])
    load(engine, up, head)
    assert engine.weights.checksum() != expected
    load(engine, up)
    assert engine.weights.checksum() == expected, "from the start's weights on, as a rollback asks for"


def test_all_tensors_of_a_file_upon_the_present_ones(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    """They are a part of the model's; an update that names them does the same."""
    stored, path = load_file(tmp_path / "other" / WEIGHTS), tmp_path / "some.safetensors"
    save_file({UP: stored[UP], HEAD: stored[HEAD]}, path)
    part = WeightSource(str(path), part=True)
    engine, named = make_engine(llama), make_engine(llama)
    load(named, source(tmp_path / "other", [UP, HEAD]))
    assert load(engine, part) == 2
    assert engine.weights.checksum() == named.weights.checksum()
    load(engine, source(tmp_path / "other"))
    assert load(engine, source(tmp_path / "other"), part) == 2
    assert load(engine, source(llama), part) > 2
    assert engine.weights.checksum() == named.weights.checksum()
    with pytest.raises(ValueError, match="if the files have some only, update with whole: false"):
        engine.weights.plan([source(path)])
    save_file({"no.such": stored[UP]}, path)
    with pytest.raises(ValueError, match=r"the model has no parameter for no\.such"):
        engine.weights.plan([part])


def test_a_whole_model_in_several_files(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    stored = load_file(tmp_path / "other" / WEIGHTS)
    names = sorted(stored)
    paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    for path, own in zip(paths, (names[:5], names[5:]), strict=True):
        save_file({name: stored[name] for name in own}, path)
    engine = make_engine(llama)
    for _ in range(2):
        load(engine, *map(source, paths))
        assert engine.weights.checksum() == make_engine(tmp_path / "other").weights.checksum()


def test_files_that_were_replaced_are_not_taken_for_those_before(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    first = with_digest(source(tmp_path / "other" / WEIGHTS))
    engine = make_engine(llama)
    load(engine, first)
    rewrite(tmp_path / "other", lambda tensors: tensors.update({UP: -tensors[UP]}))
    second = with_digest(source(tmp_path / "other" / WEIGHTS))
    with pytest.raises(ValueError, match=r"model\.safetensors has changed since the update"):
        make_engine(llama).weights.plan([first])
    before = engine.weights.checksum()
    load(engine, second)
    assert engine.weights.checksum() != before


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "phi3", "gpt_neox"])
def test_tensors_that_are_put_together(kind: str, tmp_path: Path) -> None:
    """Of a layer's experts all, but not the other layers."""
    make_model(kind, tmp_path / "start")
    changed(tmp_path / "start", tmp_path / "other")
    names = [name for name in load_file(tmp_path / "other" / WEIGHTS) if ".layers.1." in name]
    engine = make_engine(tmp_path / "start")
    assert load(engine, source(tmp_path / "other", names)) == len(names)
    assert engine.weights.checksum() != make_engine(tmp_path / "start").weights.checksum()
    rest = [name for name in load_file(tmp_path / "other" / WEIGHTS) if name not in names]
    load(engine, source(tmp_path / "other", names), source(tmp_path / "other", rest))
    assert engine.weights.checksum() == make_engine(tmp_path / "other").weights.checksum()


# -- what does not fit


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(path / WEIGHTS)
    change(weights)
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "names", "message"),
    [
        (lambda tensors: tensors.pop(UP), None, f"no weights for {UP}; if the files have some only"),
        (lambda tensors: tensors.pop(UP), [UP], f"has no tensor {UP}"),
        (
            lambda tensors: tensors.update({UP: tensors[UP][:10].contiguous()}),
            None,
            rf"{UP} is \[10, 32\], not \[64, 32\]",
        ),
        (
            lambda tensors: tensors.update({UP: tensors[UP].to(torch.int8)}),
            None,
            f"{UP} is of type I8; taken are F64, F32, F16, BF16",
        ),
        (
            lambda tensors: tensors.update({"model.up": tensors[UP].clone()}),
            ["model.up"],
            "the model has no parameter for model.up",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    llama: Path,
    other: transformers.PreTrainedModel,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    names: list[str] | None,
    message: str,
) -> None:
    engine = make_engine(llama)
    before = engine.weights.checksum()
    rewrite(tmp_path / "other", change)
    with pytest.raises(ValueError, match=message):
        engine.weights.plan([source(tmp_path / "other", names)])
    assert engine.weights.checksum() == before


def test_a_tensor_that_the_model_does_not_have_is_left_out_of_a_whole_update(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    engine = make_engine(llama)
    rewrite(tmp_path / "other", lambda tensors: tensors.update({"rotary_emb.inv_freq": torch.ones(4)}))
    load(engine, source(tmp_path / "other"))
    assert tokens(engine) == generate(other, PROMPT, 8)


def test_of_the_experts_of_a_layer_all_are_needed(tmp_path: Path) -> None:
    make_model("mixtral", tmp_path / "start")
    changed(tmp_path / "start", tmp_path / "other")
    names = [name for name in load_file(tmp_path / "other" / WEIGHTS) if ".experts." in name]
    engine = make_engine(tmp_path / "start")
    with pytest.raises(ValueError, match=rf"{names[0].replace('.', '.')[:20]}"):
        engine.weights.plan([source(tmp_path / "other", names[:1])])


def test_weights_of_no_file_cannot_be_read_again(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    engine = make_engine(llama, load_format="dummy")
    load(engine, source(tmp_path / "other"))
    assert tokens(engine) == generate(other, PROMPT, 8)
    with pytest.raises(ValueError, match="cannot be read again"):
        engine.weights.plan([])


# -- a copy that fails


def test_a_copy_that_fails_leaves_what_was_there(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(llama)
    before = engine.weights.checksum()
    plan = engine.weights.plan([source(tmp_path / "other")])
    calls = []

    def tick() -> None:
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError("no room")

    with pytest.raises(MemoryError):
        engine.weights.load(plan, drop_cache=True, in_step=False, tick=tick)
    assert engine.weights.checksum() == before
    plan = engine.weights.plan([source(tmp_path / "other")])
    calls.clear()
    monkeypatch.setattr(engine.weights, "_start", None)
    with pytest.raises(BrokenWeights):
        engine.weights.load(plan, drop_cache=True, in_step=False, tick=tick)


# -- streams and caches


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": "on"},
        {"speculative_method": "ngram", "speculative_tokens": 3},
        {"speculative_method": "draft", "draft_model": "small", "speculative_tokens": 3},
    ],
)
@pytest.mark.parametrize("at", [2, 9])
def test_streams_that_are_kept_go_on_as_after_a_prefill_with_the_new_weights(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path, at: int, options: dict[str, Any]
) -> None:
    prompts = [PROMPT * 9, [7, 7, 8], PROMPT * 9]
    draft = str(llama) if options.get("speculative_method") == "draft" else None
    engine = make_engine(llama, draft, block_size=16, **options)
    driver = Driver(engine)
    for stream, prompt in enumerate(prompts):
        driver.submit(submit(stream, prompt, max_tokens=60, interval=1 + 6 * stream, logprobs=1))
    for _ in range(at):
        driver.step()
    engine.hold(Hold.ALL)
    while engine.can_step():
        driver.step()
    driver.take(engine.flush())
    before = [list(driver.outcomes[stream].tokens) for stream in range(3)]
    assert any(before)
    load(engine, source(tmp_path / "other"))
    engine.hold(Hold.NOTHING)
    outcomes = driver.run()
    for stream, prompt in enumerate(prompts):
        history = prompt + before[stream]
        expected = before[stream] + generate(other, history, 60 - len(before[stream]))
        assert outcomes[stream].tokens == expected
        assert len(outcomes[stream].logprobs) == 60


def test_a_prefix_is_of_one_version_unless_it_is_kept(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    long = PROMPT * 12
    engine = make_engine(llama, block_size=16)
    tokens(engine, long)
    load(engine, source(tmp_path / "other"), drop_cache=True)
    assert tokens(engine, long) == generate(other, long, 8)
    hits = engine.metrics()["prefix_cache_hits_total"]
    assert hits == 0
    load(engine, source(llama), drop_cache=False)
    tokens(engine, long)
    assert engine.metrics()["prefix_cache_hits_total"] == 32


def test_kv_events_tell_that_the_cache_is_dropped(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    config = '{"enable_kv_cache_events": true}'
    engine = make_engine(llama, block_size=16, kv_events_config=config)
    tokens(engine, PROMPT * 12)
    assert AllBlocksCleared() not in engine.take_kv_events()
    load(engine, source(tmp_path / "other"), drop_cache=False)
    assert engine.take_kv_events() == []
    load(engine, source(llama))
    assert engine.take_kv_events() == [AllBlocksCleared()]


def test_a_model_that_slept_wakes_up_with_the_present_weights(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    engine = make_engine(llama)
    load(engine, source(tmp_path / "other"))
    for level in (1, 2):
        engine.call("sleep", {"level": level})
        engine.call("wake_up", {})
        assert tokens(engine) == generate(other, PROMPT, 8)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_are_replaced_in_sleep(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path, level: int
) -> None:
    engine = make_engine(llama)
    engine.call("sleep", {"level": level})
    if level == 2:
        with pytest.raises(ValueError, match="asleep"):
            engine.weights.checksum()
    load(engine, source(tmp_path / "other"))
    engine.call("wake_up", {})
    assert tokens(engine) == generate(other, PROMPT, 8)


def test_an_engine_whose_files_are_gone_stays_asleep(
    llama: Path, other: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    engine = make_engine(llama)
    load(engine, source(tmp_path / "other" / WEIGHTS))
    engine.call("sleep", {"level": 2})
    (tmp_path / "other" / WEIGHTS).rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        engine.call("wake_up", {})
    (tmp_path / "away").rename(tmp_path / "other" / WEIGHTS)
    engine.call("wake_up", {})
    assert tokens(engine) == generate(other, PROMPT, 8)
