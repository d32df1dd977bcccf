"""LoRA adapters: the tokens of PEFT, and nothing of one stream in another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.engine.base import RequestRejected
from penstock.engine.lora.adapter_table import LoadedAdapter
from penstock.engine.torch import attention
from penstock.engine.torch.attention import MAX_IN_CACHE, _bounded
from penstock.engine.torch.engine import TorchEngine
from penstock.engine.torch.lora import lora_layers
from penstock.wire.frames import FinishReason
from penstock.wire.kv_events import BlockRemoved, BlockStored
from penstock.wire.messages import Submit
from tests.adapters import make_adapter
from tests.engine.torch import harness
from tests.engine.torch.adapters import load, submit_to, train
from tests.engine.torch.harness import (
    VOCAB,
    Driver,
    Outcome,
    assert_alike,
    generate,
    make_engine,
    make_model,
    run_all,
    submit,
    top_logprobs,
)

pytest.importorskip("peft")

TOKENS = 10


def prompts(lengths: tuple[int, ...] = (1, 23, 70)) -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(3, VOCAB, size=length).tolist() for length in lengths]


FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {},
    "cohere2": {},
    "gemma3_text": {"target_modules": ["q_proj", "o_proj", "up_proj"]},
    "glm4": {},
    "gpt2": {"fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj", "c_fc"]},
    "gpt_bigcode": {"target_modules": ["c_attn", "c_proj", "c_fc"]},
    "gpt_neox": {},
    "granitemoe": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "llama": {"rank_pattern": {"q_proj": 7, "layers.1.mlp.up_proj": 2}, "alpha_pattern": {"v_proj": 20}},
    "mistral": {"use_rslora": True, "r": 16},
    "nemotron": {},
    "olmo2": {"layers_to_transform": [1], "target_modules": ["k_proj", "down_proj"]},
    "opt": {},
    "phi3": {},
    "qwen2_moe": {},
    "qwen3": {"target_modules": ["v_proj"]},
    "starcoder2": {},
}
"""Changes of PEFT's configuration, by model type; targets are all linear layers otherwise."""


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_and_logprobs_equal_those_of_peft(kind: str, tmp_path: Path) -> None:
    model = make_model(kind, tmp_path / "model")
    engine = make_engine(tmp_path / "model", max_num_batched_tokens=64, enable_lora=True)
    base = run_all(engine, [submit(0, prompts()[1], max_tokens=TOKENS, logprobs=2)])[0]
    options = {"target_modules": "all-linear"} | FAMILIES[kind]
    tuned = train(model, tmp_path / "adapter", **options)
    load(engine, {"a": tmp_path / "adapter"})
    outcomes = run_all(
        engine,
        [
            submit_to("a", 1 + index, prompt, max_tokens=TOKENS, logprobs=2)
            for index, prompt in enumerate(prompts())
        ],
    )
    assert outcomes[2].logprobs != base.logprobs
    for index, prompt in enumerate(prompts()):
        outcome = outcomes[1 + index]
        assert outcome.tokens == generate(tuned, prompt, TOKENS)
        values, ids = top_logprobs(tuned, prompt + outcome.tokens[:-1], 2)
        for step, (got_ids, got_values, _) in enumerate(outcome.logprobs):
            place = len(prompt) - 1 + step
            np.testing.assert_allclose(got_values[1:], values[place], rtol=1e-3, atol=5e-4)
            assert got_ids[1] == ids[place, 0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    make_model("llama", directory)
    return directory


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """16 adapters of several ranks; the last ones change a part of the layers."""
    layers = make_engine(llama, enable_lora=True).info.lora
    assert layers is not None
    made = {}
    for index in range(16):
        some = {
            path: size
            for path, size in layers.modules.items()
            if index < 12 or path.endswith(("q_proj", "v_proj"))
        }
        directory = tmp_path_factory.mktemp("adapters") / "a"
        made[f"a{index}"] = make_adapter(directory, some, 1 + 3 * (index % 6), seed=index, scale=0.2)
    return made


def engine_with(llama: Path, adapters: dict[str, Path], **options: Any) -> TorchEngine:
    engine = make_engine(llama, **{"enable_lora": True, "max_loras": 16, "max_lora_rank": 16} | options)
    load(engine, adapters)
    return engine


def mixed(count: int, names: Sequence[str | None], **options: Any) -> list[Submit]:
    """Requests of the adapters in turn, with prompts of several lengths."""
    random = np.random.default_rng(3)
    lengths = random.integers(1, 100, size=count).tolist()
    return [
        submit_to(
            names[stream % len(names)],
            stream,
            random.integers(3, VOCAB, size=length).tolist(),
            **{"max_tokens": 4 + stream % 13} | options,
        )
        for stream, length in enumerate(lengths)
    ]


def alone(engine: TorchEngine, requests: Sequence[Submit]) -> dict[int, list[int]]:
    """The tokens of each stream when nothing else runs, without shared prefixes."""
    tokens = {}
    for request in requests:
        engine.call("reset_prefix_cache", {})
        tokens[request.stream] = run_all(engine, [request])[request.stream].tokens
    return tokens


def tokens_of(outcomes: dict[int, Outcome]) -> dict[int, list[int]]:
    return {stream: outcome.tokens for stream, outcome in outcomes.items()}


@pytest.fixture(scope="module")
def expected(llama: Path, adapters: dict[str, Path]) -> dict[int, list[int]]:
    """The tokens of 64 streams of 16 adapters and the base model, each alone."""
    return alone(engine_with(llama, adapters), mixed(64, [*adapters, None]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 48},
        {"async_scheduling": "on"},
        {"kv_cache_memory": 40 << 10, "block_size": 4, "max_prefill_delay": 0.0},
        {"max_loras": 3, "max_num_seqs": 20},
    ],
    ids=["plain", "chunked", "ahead", "preempted", "few-places"],
)
def test_each_of_64_rows_gets_the_tokens_it_gets_alone(
    llama: Path, adapters: dict[str, Path], expected: dict[int, list[int]], options: dict[str, Any]
) -> None:
    engine = engine_with(llama, adapters, **options)
    assert_alike(expected, tokens_of(run_all(engine, mixed(64, [*adapters, None]))))
    if "kv_cache_memory" in options:
        assert engine.metrics()["preemptions_total"] > 0
    assert all(not loaded.streams for loaded in loaded_adapters(engine))


def loaded_adapters(engine: TorchEngine) -> list[LoadedAdapter]:
    table = engine.adapters
    assert table is not None
    return [*table._loaded.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(llama: Path, adapters: dict[str, Path], dtype: str) -> None:
    engine = engine_with(llama, adapters, dtype=dtype)
    exact = engine_with(llama, adapters)
    requests = mixed(16, ["a1", None, "a13"], logprobs=1, max_tokens=1)
    outcomes, expected = run_all(engine, requests), run_all(exact, requests)
    for stream, outcome in outcomes.items():
        (_, values, _), (_, other, _) = outcome.logprobs[0], expected[stream].logprobs[0]
        assert values[1] == pytest.approx(other[1], abs=0.35)
    errors = [
        abs(outcome.logprobs[0][1][1] - expected[stream].logprobs[0][1][1])
        for stream, outcome in outcomes.items()
    ]
    assert np.median(errors) < 0.06


# -- streams of one adapter do not change those of others


@pytest.fixture(scope="module")
def poisoned(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter whose values are finite, and overflow in every layer."""
    layers = make_engine(llama, enable_lora=True).info.lora
    assert layers is not None
    return make_adapter(tmp_path_factory.mktemp("poisoned") / "a", layers.modules, scale=1e30)


@pytest.mark.parametrize("prefill", [16, 256])
def test_what_overflows_in_one_stream_stays_there(
    llama: Path, adapters: dict[str, Path], poisoned: Path, prefill: int
) -> None:
    options = {"kv_cache_memory": 96 << 10, "block_size": 16, "max_num_batched_tokens": prefill}
    requests = mixed(24, ["a0", "bad", None, "a3", "bad"])
    sane = [request for request in requests if request.adapter != "bad"]
    expected = alone(engine_with(llama, adapters), sane)
    engine = engine_with(llama, adapters | {"bad": poisoned}, **options)
    together = run_all(engine, requests)
    assert {stream: together[stream].tokens for stream in expected} == expected
    # its blocks, which are free or cached, are used by others
    again = [msgspec.structs.replace(request, stream=request.stream + 100) for request in sane]
    after = tokens_of(run_all(engine, again))
    assert after == {stream + 100: tokens for stream, tokens in expected.items()}


def test_the_cache_holds_finite_values_of_an_adapter_that_overflows(llama: Path, poisoned: Path) -> None:
    engine = engine_with(llama, {"bad": poisoned})
    outcome = run_all(engine, mixed(1, ["bad"], logprobs=2))[0]
    assert len(outcome.tokens) == 4
    assert all(np.isfinite(values).all() for _, values, _ in outcome.logprobs)
    cache = engine._models[0].attention
    for cached in (*cache.keys, *cache.values):
        assert cached.isfinite().all()
        assert cached.abs().max() <= MAX_IN_CACHE


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("mixtral", "float32"), ("bloom", "float32"), ("gemma2", "float32"), ("qwen2", "float16")],
)
def test_what_overflows_stays_in_its_stream_in_other_families(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overflown = []

    def bounded(values: Tensor) -> Tensor:
        overflown.append(not values.isfinite().all())
        return _bounded(values)

    monkeypatch.setattr(attention, "_bounded", bounded)
    make_model(kind, tmp_path / "model")
    options = {"kv_cache_memory": 96 << 10, "enable_lora": True, "dtype": dtype}
    engine = make_engine(tmp_path / "model", **options)
    assert engine.info.lora is not None
    modules = engine.info.lora.modules
    scale = 1e30 if dtype == "float32" else 60.0
    load(
        engine,
        {
            "bad": make_adapter(tmp_path / "bad", modules, 16, scale=scale),
            "good": make_adapter(tmp_path / "good", modules),
        },
    )
    requests = mixed(12, ["bad", None, "good"], max_tokens=8)
    sane = [request for request in requests if request.adapter != "bad"]
    expected = alone(engine, sane)
    assert_alike(expected, tokens_of(run_all(engine, requests)))
    assert any(overflown)


def test_adapters_do_not_share_prefixes(llama: Path, adapters: dict[str, Path]) -> None:
    prompt = prompts((50,))[0]
    engine = engine_with(llama, adapters)
    names = (None, "a0", "a1", "a0", None)
    cached = []
    for stream, name in enumerate(names):
        driver = Driver(engine)
        driver.submit(submit_to(name, stream, prompt, max_tokens=6))
        rows = driver.engine.step()
        cached.append(0 if rows.cached is None else rows.cached.tolist()[0])
        driver.run()
    assert cached == [0, 0, 0, 48, 48]
    both = [submit_to(name, 10 + index, prompt, max_tokens=6) for index, name in enumerate(names)]
    together = tokens_of(run_all(engine, both))
    assert together == alone(engine_with(llama, adapters), both)


# -- adapters come and go


def test_streams_end_with_the_weights_they_began_with(llama: Path, adapters: dict[str, Path]) -> None:
    first, second = adapters["a0"], adapters["a1"]
    requests = [submit_to("a", stream, prompts((40,))[0], max_tokens=12) for stream in range(4)]
    old = alone(engine_with(llama, {"a": first}), requests)[0]
    new = alone(engine_with(llama, {"a": second}), requests)[0]
    assert old != new
    engine = engine_with(llama, {"a": first}, max_num_seqs=1)
    driver = Driver(engine)
    driver.submit(requests[0])
    driver.submit(requests[1])  # it waits for a slot
    for _ in range(4):
        driver.step()
    load(engine, {"a": second})
    driver.submit(requests[2])
    table = engine.adapters
    assert table is not None
    assert table.remove_unused()
    driver.run()
    assert [driver.outcomes[stream].tokens for stream in range(3)] == [old, old, new]
    assert not table.remove_unused()
    assert len(table) == 1
    load(engine, {})
    with pytest.raises(RequestRejected, match="the adapter 'a' is not loaded"):
        driver.submit(requests[3])


def test_an_adapter_that_is_removed_leaves_no_blocks(llama: Path, adapters: dict[str, Path]) -> None:
    events = '{"enable_kv_cache_events": true}'
    engine = engine_with(llama, {"a": adapters["a0"]}, kv_events_config=events)
    requests = [submit_to(name, stream, prompts((50,))[0]) for stream, name in enumerate(("a", None))]
    run_all(engine, requests)
    stored = engine.take_kv_events()
    mine = {
        hash
        for event in stored
        if isinstance(event, BlockStored) and event.lora_name == "a"
        for hash in event.block_hashes
    }
    assert len(mine) == 4
    assert engine._blocks.idle == 8
    load(engine, {})
    table = engine.adapters
    assert table is not None
    assert not table.remove_unused()
    (removed,) = engine.take_kv_events()
    assert isinstance(removed, BlockRemoved)
    assert set(removed.block_hashes) == mine
    assert engine._blocks.idle == 4
    assert engine._blocks.free_count() == engine._blocks.blocks


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_adapters_wake_with_the_model(llama: Path, adapters: dict[str, Path], level: int) -> None:
    engine = engine_with(llama, adapters)
    requests = mixed(8, ["a0", "a1", None])
    before = tokens_of(run_all(engine, requests))
    for _ in range(2):
        engine.call("sleep", {"level": level})
        load(engine, {name: adapters[name] for name in ("a0", "a1", "a5")})
        engine.call("wake_up", {})
        assert tokens_of(run_all(engine, requests)) == before


def test_a_request_with_several_choices(llama: Path, adapters: dict[str, Path]) -> None:
    prompt = prompts((30,))[0]
    choices = [submit_to("a2", stream, prompt, temperature=1.0, seed=stream) for stream in range(4)]
    together = tokens_of(run_all(engine_with(llama, adapters), choices))
    assert together == alone(engine_with(llama, adapters), choices)
    assert len({tuple(tokens) for tokens in together.values()}) == 4


def test_without_adapters_nothing_is_wrapped(llama: Path) -> None:
    engine = make_engine(llama)
    assert engine.info.lora is None
    assert engine.adapters is None
    assert not any("forward" in vars(module) for module in engine._models[0]._model.modules())
    with pytest.raises(RequestRejected, match="the adapter 'a' is not loaded"):
        engine.submit(0, submit_to("a", 0, [5]))


def test_layers_that_adapters_may_change(tmp_path: Path) -> None:
    make_model("qwen2_moe", tmp_path)
    info = make_engine(tmp_path, enable_lora=True, max_loras=2, max_lora_rank=5, max_cpu_loras=7).info.lora
    assert info is not None
    assert (info.max_loras, info.max_lora_rank, info.max_cpu_loras) == (2, 5, 7)
    first = {
        path.removeprefix("model.layers.0."): size for path, size in info.modules.items() if ".0." in path
    }
    assert first == {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.shared_expert.gate_proj": (32, 32),
        "mlp.shared_expert.up_proj": (32, 32),
        "mlp.shared_expert.down_proj": (32, 32),
        "mlp.shared_expert_gate": (1, 32),
    }
    assert all(path.startswith("model.layers.") for path in info.modules)


def test_stacks_without_memory_are_an_error_of_their_options(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(lora_layers, "zeros", no_memory)
    with pytest.raises(ConfigError, match="--max-loras 5, --max-lora-rank 16: there is no memory"):
        make_engine(llama, enable_lora=True, max_loras=5)


@pytest.mark.parametrize("seed", range(3))
def test_streams_among_adapters_that_come_and_go(
    llama: Path, adapters: dict[str, Path], poisoned: Path, seed: int
) -> None:
    """Few places and blocks; names that get other files while their streams run and wait; aborts; one adapter
    that overflows."""
    random = np.random.default_rng(seed)
    driver = Driver(
        engine_with(
            llama,
            {},
            max_loras=2,
            max_num_seqs=12,
            kv_cache_memory=40 << 10,
            block_size=4,
            max_prefill_delay=0.0,
        )
    )
    table = driver.engine.adapters
    assert table is not None
    names: list[str | None] = ["x", "y", "z", "bad", None]
    files: dict[str, str] = {}
    sent: list[tuple[Submit, str | None]] = []
    for stream, request in enumerate(mixed(48, [None])):
        if stream % 8 == 0:
            files = {name: f"a{random.integers(16)}" for name in ("x", "y", "z")}
            load(driver.engine, {name: adapters[file] for name, file in files.items()} | {"bad": poisoned})
        table.remove_unused()
        name = names[random.integers(len(names))]
        driver.submit(msgspec.structs.replace(request, adapter=name))
        if name != "bad":
            sent.append((request, None if name is None else files[name]))
        for _ in range(random.integers(4)):
            driver.step()
        if random.random() < 0.1:
            driver.engine.abort(0, [int(random.integers(stream + 1))])
    outcomes = driver.run()
    reference = engine_with(llama, adapters)
    for request, file in sent:
        got = outcomes[request.stream]
        expected = run_all(reference, [msgspec.structs.replace(request, adapter=file)])[request.stream]
        if got.finish is FinishReason.ABORT:
            assert got.tokens == expected.tokens[: len(got.tokens)]
        else:
            assert got.tokens == expected.tokens
    assert driver.engine.metrics()["preemptions_total"] > 0
    assert not table.remove_unused()
    assert len(table) == 4
    assert driver.engine.load().kv_used == 0


def test_the_inputs_of_earlier_layers_are_given_back(
    llama: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a prefill would need the memory of all layers' activations at a time."""
    kept = []
    end = lora_layers.LoraLayers.end

    def count(self: lora_layers.LoraLayers) -> None:
        kept.append(sum(shared._input is not None for shared in self._shared))
        end(self)

    monkeypatch.setattr(lora_layers.LoraLayers, "end", count)
    run_all(engine_with(llama, adapters), mixed(4, ["a1", None]))
    assert max(kept) == 1


@pytest.mark.parametrize("kind", harness.FAMILIES)
def test_every_layer_that_is_offered_can_be_changed(kind: str, tmp_path: Path) -> None:
    make_model(kind, tmp_path / "model")
    engine = make_engine(tmp_path / "model", enable_lora=True)
    info = engine.info.lora
    assert info is not None
    assert info.modules
    load(engine, {"a": make_adapter(tmp_path / "adapter", info.modules, 4)})
    ran = set()
    add = lora_layers.SharedInput.add

    def note(self: lora_layers.SharedInput, member: int, *rest: Any) -> None:
        ran.add(self.paths[member])
        add(self, member, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_layers.SharedInput, "add", note)
        outcome = run_all(engine, [submit_to("a", 0, prompts()[1], max_tokens=2, ignore_eos=True)])[0]
    assert len(outcome.tokens) == 2
    assert ran == info.modules.keys()
