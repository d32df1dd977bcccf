"""Shared prefixes with a real model: the same tokens, computed once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import transformers
from msgspec.structs import replace

from penstock.dispatch import sent_prompts
from penstock.dispatch.sent_prompts import SentPrompts
from penstock.engine.loop.kept_prompts import KeptPrompts
from penstock.wire.decoding import decode_from_server
from penstock.wire.messages import (
    Submit,
    encode,
)
from tests.engine.torch.harness import Driver, generate, make_engine, make_model, run_all, submit

PROMPT = [5 + 7 * index % 300 for index in range(50)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, make_model("llama", directory)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [4, 16])
def test_greedy_output_is_that_of_transformers(
    llama: tuple[Path, transformers.PreTrainedModel], block_size: int
) -> None:
    directory, model = llama
    engine = make_engine(directory, block_size=block_size, max_num_batched_tokens=24)
    prompts = [PROMPT[:length] + [9] * own for length in (20, 32, 50) for own in (0, 0, 3)]
    for _ in range(2):
        outcomes = run_all(
            engine, [submit(stream, prompt, max_tokens=12) for stream, prompt in enumerate(prompts)]
        )
        for stream, prompt in enumerate(prompts):
            assert outcomes[stream].tokens == generate(model, prompt, 12)
    metrics = engine.metrics()
    assert metrics["prefix_cache_queries_total"] == 2 * sum(map(len, prompts))
    assert metrics["prefix_cache_hits_total"] > metrics["prefix_cache_queries_total"] / 2


def test_the_next_turn_finds_the_answer_of_the_last(
    llama: tuple[Path, transformers.PreTrainedModel],
) -> None:
    directory, model = llama
    driver = Driver(make_engine(directory, block_size=4))
    driver.submit(submit(0, PROMPT[:10], max_tokens=15, ignore_eos=True))
    history = PROMPT[:10] + driver.run()[0].tokens
    driver.submit(submit(1, [*history, 8, 8], max_tokens=8))
    rows = driver.engine.step()
    assert rows.cached is not None
    assert rows.cached.tolist() == [24]
    first = rows.tokens.tolist()
    assert first + driver.run()[1].tokens == generate(model, [*history, 8, 8], 8)


def test_a_reset_is_a_call(llama: tuple[Path, transformers.PreTrainedModel]) -> None:
    engine = make_engine(llama[0])
    for stream in range(2):
        run_all(engine, [submit(stream, PROMPT, max_tokens=1)])
    hits = engine.metrics()["prefix_cache_hits_total"]
    assert hits == 48
    assert engine.call("reset_prefix_cache", {}) is None
    run_all(engine, [submit(2, PROMPT, max_tokens=1)])
    assert engine.metrics()["prefix_cache_hits_total"] == hits
    with pytest.raises(ValueError, match="no operation 'reset'"):
        engine.call("reset", {})


def test_without_the_cache_nothing_is_shared(llama: tuple[Path, transformers.PreTrainedModel]) -> None:
    engine = make_engine(llama[0], enable_prefix_caching=False)
    for stream in range(2):
        run_all(engine, [submit(stream, PROMPT, max_tokens=1)])
    assert engine.metrics()["prefix_cache_queries_total"] == 0


def test_prompts_of_which_only_new_tokens_came_are_as_whole_ones(
    llama: tuple[Path, transformers.PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, cached tokens and events, from sessions that go on, fork and are cut, two at a time,
    in a cache that has no room for all."""
    monkeypatch.setattr(sent_prompts, "MIN_BYTES", 80)
    monkeypatch.setattr(sent_prompts, "_ENDS", tuple(range(80, 4000, 40)))
    monkeypatch.setattr(sent_prompts, "_PROBE_BYTES", 40)
    options = {"block_size": 4, "kv_cache_memory": 1 << 16, "max_prefill_delay": 0}  # independent of clocks
    events = '{"enable_kv_cache_events": true}'
    engines = [make_engine(llama[0], kv_events_config=events, **options) for _ in range(2)]
    drivers = [Driver(engine) for engine in engines]
    sent, kept = SentPrompts(3000), KeptPrompts(3000)
    randoms = random.Random(3)
    histories = {number: [4 + number] * 5 + PROMPT[:20] for number in range(5)}
    for stream in range(0, 40, 2):
        turns = randoms.sample(sorted(histories), 2)
        for at, session in enumerate(turns):
            salt = "salt" if session == 4 else None
            request = replace(submit(stream + at, histories[session], max_tokens=6), cache_salt=salt)
            drivers[0].submit(request)
            received = decode_from_server(encode(sent.shorten(request)))
            assert isinstance(received, Submit)
            drivers[1].submit(kept.restore(b"peer", received))
        whole, short = (driver.run() for driver in drivers)
        assert whole == short
        for at, session in enumerate(turns):
            history = histories[session] + whole[stream + at].tokens
            cut = randoms.choice((0, 0, 0, 3, 30)) if len(history) > 60 else 0
            histories[session] = history[: len(history) - cut] + randoms.choices(range(4, 300), k=5)
        if stream == 20:
            histories[5] = list(histories[0])
    assert kept.hits > 12
    assert kept.misses == 0
    assert engines[0].metrics() == engines[1].metrics()
    assert engines[0].metrics()["prefix_cache_hits_total"] > 500
    assert engines[0].take_kv_events() == engines[1].take_kv_events()
