"""Adapters that a process of vLLM's loads and forgets while streams run, step by step."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from safetensors.numpy import load_file, save_file

from penstock.adapters.adapter_files import describe_adapter
from penstock.adapters.errors import AdapterError
from penstock.engine.attach.adapter_loader import AttachedAdapterLoader
from penstock.engine.attach.adapter_weights import MAX_NORM
from penstock.engine.attach.engine import AttachedEngine
from penstock.engine.attach.requests import encode_add
from penstock.wire.frames import FinishReason
from penstock.wire.kv_events import BlockStored, decode_batch
from penstock.wire.messages import Adapter
from penstock.wire.weights.desired import WeightSource
from tests.adapters import make_adapter
from tests.engine.attach.small_engine import (
    EOS,
    PROMPT,
    SLOTS,
    VOCAB,
    Run,
    generate,
    make_model,
    run,
    start_engine,
    step,
    wait,
)
from tests.engine.attach.weight_eraser import WeightEraser
from tests.engine.support import submit

pytestmark = pytest.mark.filterwarnings("ignore")

MAX_LORAS, MAX_LOADED, MAX_RANK = 2, 4, 8
MODULES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in {
        "self_attn.q_proj": (64, 64),
        "self_attn.v_proj": (32, 64),
        "mlp.down_proj": (64, 64),
    }.items()
}
EVENTS = f"ipc://{tempfile.mkdtemp()}/events"
SCALE = 0.5
"""Of weights that change most tokens."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttachedEngine]:
    directory, run_dir = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("run")
    make_model(directory)
    options = {
        "dtype": "float32",
        "max_num_seqs": SLOTS,
        "kv_cache_memory": 16 << 20,
        "enable_lora": True,
        "max_loras": MAX_LORAS,
        "max_cpu_loras": MAX_LOADED,
        "max_lora_rank": MAX_RANK,
    }
    events = json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": EVENTS})
    own = ["--enforce-eager", "--block-size", "32", "--kv-events-config", events]
    own += ["--worker-extension-cls", f"{WeightEraser.__module__}.{WeightEraser.__name__}"]
    made = start_engine(directory, run_dir, own, options)
    yield made
    made.close()


@pytest.fixture
def engine(shared: AttachedEngine) -> Iterator[AttachedEngine]:
    """Without a stream and an adapter before and after."""
    yield shared
    shared.drop_server(0)
    while shared.has_work():
        step(shared)
    use(shared)
    assert in_vllm(shared) == set()
    assert copies(shared) == []


def in_vllm(engine: AttachedEngine) -> set[int]:
    """Numbers of the adapters that vLLM has."""
    return set(engine._core.call("list_loras"))


def copies(engine: AttachedEngine) -> list[Path]:
    assert engine._loader is not None
    return list(Path(engine._loader._copies._parent).glob("adapters-*"))


def made(directory: Path, name: str = "sql", seed: int = 1, **config: Any) -> Adapter:
    """An adapter with files of its own."""
    config = {"modules": MODULES, "rank": 4, "scale": SCALE} | config
    path = make_adapter(directory / f"{name}-{seed}", seed=seed, **config)
    return Adapter(name, str(path), None, describe_adapter(str(path)).digest)


def load(engine: AttachedEngine, adapter: Adapter) -> None:
    table = engine.adapters
    assert table is not None
    table.add_adapter(adapter, table.loader.read_weights(adapter))


def use(engine: AttachedEngine, *adapters: Adapter) -> None:
    """Load those that are missing; streams may use these and no others."""
    table = engine.adapters
    assert table is not None
    for adapter in adapters:
        if adapter.key not in table:
            load(engine, adapter)
    table.make_current(adapters)
    table.remove_unused()


def start(engine: AttachedEngine, stream: int, received: Run, max_tokens: int = 40, **request: Any) -> None:
    """A greedy stream with its first token given out."""
    asked = {"prompt": PROMPT, "temperature": 0.0, "ignore_eos": True} | request
    engine.submit(0, submit(stream, max_tokens, **asked))
    while stream not in received.tokens:
        received.take(step(engine))


def vllms_own(engine: AttachedEngine, adapter: Adapter, max_tokens: int) -> list[int]:
    """The greedy tokens by vLLM, with the files as their user made them."""
    core, ids, tokens, lora = engine._core, engine._ids, [], ["own", 1000, adapter.path]
    assert core.call("add_lora", lora)
    asked = submit(0, max_tokens, prompt=PROMPT, temperature=0.0, ignore_eos=True)
    core.send(encode_add(ids.assign(0), asked, (EOS,), VOCAB, lora))
    core.flush()
    while len(tokens) < max_tokens:
        received = core.receive()
        if received is not None:
            tokens += received[0].tokens.tolist()
        wait(engine)
    ids.forget(0)
    assert core.call("remove_lora", 1000)
    engine.call("reset_prefix_cache", {})
    return tokens


def test_what_it_can_load(engine: AttachedEngine) -> None:
    lora = engine.info.lora
    assert lora is not None
    assert (lora.max_loras, lora.max_cpu_loras, lora.max_lora_rank) == (MAX_LORAS, MAX_LOADED, MAX_RANK)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dtype": "BF16"},
        {"use_rslora": True},
        {"ranks": {"model.layers.1.self_attn.v_proj": 2}},
        {"dtype": "F16", "alpha_pattern": {"q_proj": 3}},
        {"dtype": "BF16", "alpha_pattern": {"layers.1.mlp.down_proj": 24}},
        {"modules": {"model.layers.1.self_attn.o_proj": (64, 64)}, "scale": 1.0},
    ],
    ids=str,
)
def test_tokens_are_those_of_vllm_with_the_users_files(
    engine: AttachedEngine, tmp_path: Path, config: dict[str, Any]
) -> None:
    adapter = made(tmp_path, **config)
    base, expected = generate(engine, max_tokens=30), vllms_own(engine, adapter, 30)
    assert base != expected
    use(engine, adapter)
    assert generate(engine, max_tokens=30, adapter="sql") == expected
    assert generate(engine, max_tokens=30) == base


def test_loading_leaves_running_streams_alone(engine: AttachedEngine, tmp_path: Path) -> None:
    expected = generate(engine, max_tokens=40)
    received = Run()
    start(engine, 0, received)
    use(engine, made(tmp_path))
    start(engine, 1, received, adapter="sql")
    run(engine, received)
    assert received.tokens[0] == expected
    assert received.tokens[1] == generate(engine, max_tokens=40, adapter="sql") != expected


def test_an_unloaded_adapter_is_kept_for_its_streams(engine: AttachedEngine, tmp_path: Path) -> None:
    adapter = made(tmp_path)
    use(engine, adapter)
    expected = generate(engine, max_tokens=40, adapter="sql")
    received = Run()
    start(engine, 0, received, adapter="sql")
    use(engine)
    with pytest.raises(ValueError, match="the adapter 'sql' is not loaded"):
        engine.submit(0, submit(1, 5, prompt=PROMPT, adapter="sql"))
    assert (len(in_vllm(engine)), len(copies(engine))) == (1, 1)
    run(engine, received)
    assert (received.tokens[0], received.finish[0]) == (expected, FinishReason.LENGTH)
    use(engine)
    assert (in_vllm(engine), copies(engine)) == (set(), [])


def test_an_adapter_that_is_replaced_runs_beside_the_one_in_its_place(
    engine: AttachedEngine, tmp_path: Path
) -> None:
    old, new = made(tmp_path, seed=1), made(tmp_path, seed=2)
    expected = [vllms_own(engine, each, 40) for each in (old, new)]
    assert expected[0] != expected[1]
    use(engine, old)
    received = Run()
    start(engine, 0, received, 400, adapter="sql")
    use(engine, new)
    assert len(in_vllm(engine)) == 2
    start(engine, 1, received, 400, adapter="sql")
    run(engine, received)
    assert [received.tokens[stream][:40] for stream in (0, 1)] == expected


def test_versions_of_an_adapter_share_no_prefix(engine: AttachedEngine, tmp_path: Path) -> None:
    prompt = list(range(100, 200))
    old, new = made(tmp_path, seed=1), made(tmp_path, seed=2)
    found = []
    for stream, adapter in enumerate((old, old, new, new, None)):
        use(engine, *[each for each in (adapter,) if each])
        name = adapter and adapter.name
        engine.submit(0, submit(stream, 2, prompt=prompt, temperature=0.0, adapter=name))
        found.append(run(engine).cached.get(stream, 0))
    assert found == [0, 96, 0, 96, 0]


def test_kv_events_name_the_adapter_as_requests_do(engine: AttachedEngine, tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe(b"")
    subscriber.connect(EVENTS)
    use(engine, made(tmp_path))
    stored: list[BlockStored] = []
    for start in range(100, 300, 40):  # until the subscription has reached vLLM
        engine.submit(0, submit(0, 2, prompt=list(range(start, start + 40)), temperature=0.0, adapter="sql"))
        run(engine)
        while subscriber.poll(500):
            batch = decode_batch(subscriber.recv_multipart()[-1])
            stored += [event for event in batch if isinstance(event, BlockStored)]
        if stored:
            break
    subscriber.close()
    context.term()
    assert {event.lora_name for event in stored} == {"sql"}
    assert [tuple(extra or ()) for event in stored for extra in event.extra_keys or ()] == [("sql",)]


def test_more_adapters_than_run_in_a_step_need_no_files_of_their_users(
    engine: AttachedEngine, tmp_path: Path
) -> None:
    adapters = [made(tmp_path, name, seed) for seed, name in enumerate("abcdef")]
    use(engine, *adapters)
    for adapter in adapters:
        shutil.rmtree(adapter.path)
    alone = {name: generate(engine, max_tokens=12, adapter=name) for name in "abcdef"}
    assert len({tuple(tokens) for tokens in alone.values()}) == len(adapters)
    for stream, name in enumerate("abcdef"):
        engine.submit(0, submit(stream, 12, prompt=PROMPT, temperature=0.0, ignore_eos=True, adapter=name))
    assert list(run(engine).tokens.values()) == list(alone.values())
    assert len(in_vllm(engine)) == len(adapters)


# -- what is refused


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rank": 16}, "its rank is 16; --max-lora-rank is 8"),
        (
            {"modules": {"model.layers.0.self_attn.q_proj": (64, 32)}},
            "q_proj: its lora_B and lora_A have 64 output and 32 input features; the model's",
        ),
        ({"scale": 1e38}, "lora_A has the norm .* after scaling; at most 10000 is run"),
        (
            {"modules": {"model.layers.0.self_attn.x_proj": (64, 64)}},
            "vLLM: While loading .*/sql-1",
        ),
    ],
)
def test_what_does_not_suit_is_refused(
    engine: AttachedEngine, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    adapter = made(tmp_path, **config)
    with pytest.raises(AdapterError, match=message) as caught:
        load(engine, adapter)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1002
    assert copies(engine) == []


def test_files_that_have_changed_are_refused(engine: AttachedEngine, tmp_path: Path) -> None:
    adapter = made(tmp_path)
    config = Path(adapter.path) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 1}))
    with pytest.raises(AdapterError, match=r"its files have changed: their digest is .*, not "):
        load(engine, adapter)


def test_weights_that_vllm_refuses_halfway_leave_nothing(
    engine: AttachedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = made(tmp_path, "good")
    use(engine, good)
    expected = generate(engine, max_tokens=12, adapter="good")
    bad = made(tmp_path, "bad", modules=MODULES | {"model.layers.1.mlp.down_proj": (96, 96)})
    with monkeypatch.context() as patch:
        assert engine._loader is not None
        patch.setattr(engine._loader._shapes, "check_shapes", lambda files: None)
        for _ in range(MAX_LORAS + 1):
            with pytest.raises(AdapterError, match="vLLM: The size of tensor "):
                load(engine, bad)
    assert (len(in_vllm(engine)), len(copies(engine))) == (1, 1)
    assert generate(engine, max_tokens=12, adapter="good") == expected


# -- sleep


def test_a_sleeping_engine_loads_none_and_unloads(
    engine: AttachedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's CPU build takes the calls and does nothing; its memory stays."""
    monkeypatch.setattr(engine, "can_sleep", True)
    kept, dropped = made(tmp_path, "kept", 1), made(tmp_path, "dropped", 2)
    use(engine, kept, dropped)
    for level in (1, 2):
        engine.call("sleep", {"level": level})
        with pytest.raises(AdapterError, match="the engine sleeps; wake it up first"):
            load(engine, made(tmp_path, "late", 3))
        use(engine, kept)
        engine.call("wake_up", {})
        assert len(in_vllm(engine)) == 1
    use(engine, kept, made(tmp_path, "late", 3))
    assert generate(engine, max_tokens=3, adapter="late")


def test_dropped_weights_are_read_again_and_adapters_with_them(
    engine: AttachedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "can_sleep", True)
    adapter = made(tmp_path)
    use(engine, adapter)
    base, tuned = generate(engine, max_tokens=12), generate(engine, max_tokens=12, adapter="sql")
    engine.call("sleep", {"level": 2})
    engine._core.call("collective_rpc", "erase_weights")
    shutil.rmtree(adapter.path)
    engine.call("wake_up", {})
    assert generate(engine, max_tokens=12) == base
    assert generate(engine, max_tokens=12, adapter="sql") == tuned


def test_adapters_stay_with_other_weights_which_are_read_again_after_a_sleep(
    engine: AttachedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(*paths: Path) -> tuple[list[int], list[int]]:
        assert engine.weights is not None
        plan = engine.weights.plan([WeightSource(str(path)) for path in paths])
        engine.weights.load(plan, drop_cache=True, in_step=False, tick=lambda: None)
        return tokens()

    def tokens() -> tuple[list[int], list[int]]:
        return generate(engine, max_tokens=12), generate(engine, max_tokens=12, adapter="sql")

    monkeypatch.setattr(engine, "can_sleep", True)
    use(engine, made(tmp_path))
    before = tokens()
    weights = load_file(engine._weights._model_dir / "model.safetensors")
    other = tmp_path / "other.safetensors"
    save_file({name: weight[::-1].copy() for name, weight in weights.items()}, other)
    base, tuned = replace(other)
    assert base not in (before[0], tuned)
    engine.call("sleep", {"level": 2})
    engine._core.call("collective_rpc", "erase_weights")
    engine.call("wake_up", {})
    assert tokens() == (base, tuned)
    assert replace() == before


def test_the_loader_is_one(engine: AttachedEngine) -> None:
    assert engine.adapters is not None
    assert isinstance(engine.adapters.loader, AttachedAdapterLoader)


def test_the_largest_weights_that_are_run_change_no_other_stream(
    engine: AttachedEngine, tmp_path: Path
) -> None:
    """The blocks of their streams go to others: what is left in them must be finite."""
    draw = np.random.default_rng(1)
    prompts = [draw.integers(3, 300, 40).tolist() for _ in range(4)]
    expected = [generate(engine, prompt=prompt, max_tokens=10) for prompt in prompts]
    engine.call("reset_prefix_cache", {})
    large = made(tmp_path, scale=MAX_NORM / 40)  # 4 x 64 values, scaled by 2
    use(engine, large)
    for stream in range(80):  # all blocks of the cache
        prompt = draw.integers(3, 300, 480).tolist()
        engine.submit(0, submit(stream, 2, prompt=prompt, adapter="sql", temperature=0.0, ignore_eos=True))
    run(engine)
    engine.call("reset_prefix_cache", {})
    assert [generate(engine, prompt=prompt, max_tokens=10) for prompt in prompts] == expected
