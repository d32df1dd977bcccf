"""Engines in lock-step, as processes: nothing is lost between waves, and they stand and fall together."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from tests.integration.clients import Streams, texts_of
from tests.integration.server import SYNTHETIC, Server, wait_until
from tests.integration.weight_marks import TOLD, WeightFiles, check_marks, update

RANKS = 3
GROUP = (
    *SYNTHETIC,
    *("--data-parallel-size", str(RANKS), "--enable-expert-parallel", "--api-server-count", "2"),
)
WAIT_S = 90


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("group")
    with Server(*GROUP, directory=directory) as running:
        yield running


def of_ranks(group: Server, name: str, ranks: int = RANKS) -> list[float]:
    return [group.metric(name, engine=str(rank)) for rank in range(ranks)]


def steps_of(group: Server, ranks: int = RANKS) -> list[float]:
    """All steps of each rank, as last reported."""
    real = of_ranks(group, "penstock:engine_steps_total", ranks)
    dummies = of_ranks(group, "penstock:engine_dummy_steps_total", ranks)
    return [sum(pair) for pair in zip(real, dummies, strict=True)]


def at_rest(group: Server, interval: int = 32) -> bool:
    """Whether all reports are those of the last agreement."""
    steps, waves = steps_of(group), of_ranks(group, "penstock:engine_waves_total")
    return steps[0] > 0 and steps[0] % interval == 0 and len(set(steps)) == len(set(waves)) == 1


def storm(group: Server, bursts: int, seed: int) -> None:
    """Bursts of requests to random ranks, with pauses in which the ranks may or may not fall asleep."""
    draw = random.Random(seed)
    pause = threading.Event()
    with httpx.Client(base_url=group.url, timeout=WAIT_S) as client, ThreadPoolExecutor(16) as pool:
        for _ in range(bursts):
            tokens = [draw.randint(1, 12) for _ in range(draw.randint(1, 8))]
            replies = [
                pool.submit(
                    client.post,
                    "/v1/completions",
                    json={"prompt": "x", "max_tokens": count, "ignore_eos": True},
                    headers={"x-data-parallel-rank": str(draw.randrange(RANKS))},
                )
                for count in tokens
            ]
            for reply, count in zip(replies, tokens, strict=True):
                assert reply.result(WAIT_S).json()["usage"]["completion_tokens"] == count
            pause.wait(draw.choice([0, 0, 0.002, 0.01, 0.03]))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bursts", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_no_request_is_lost_between_waves_and_all_ranks_make_the_same_steps(
    group: Server, bursts: int
) -> None:
    storm(group, bursts, seed=bursts)
    wait_until(lambda: at_rest(group), WAIT_S, "agreeing on the number of steps")
    assert of_ranks(group, "penstock:engine_waves_total")[0] > 1
    assert all(steps > 0 for steps in of_ranks(group, "penstock:engine_dummy_steps_total"))


def test_a_drained_rank_takes_part_and_gets_no_streams(group: Server) -> None:
    assert group.post("/admin/engines/1/drain", {}).status_code == 200
    wait_until(
        lambda: all(group.metric("penstock:engine_draining", engine="1") == 1 for _ in range(10)),
        WAIT_S,
        "both API servers to know",
    )
    before = of_ranks(group, "penstock:engine_steps_total")
    for _ in range(6):
        assert group.complete(max_tokens=5)["usage"]["completion_tokens"] == 5
    wait_until(lambda: at_rest(group), WAIT_S, "agreeing on the number of steps")
    after = of_ranks(group, "penstock:engine_steps_total")
    assert after[1] == before[1]
    assert sum(after) > sum(before)
    assert group.post("/admin/engines/1/resume", {}).status_code == 200


def test_ranks_change_their_weights_between_the_same_two_steps(group: Server, tmp_path: Path) -> None:
    files = WeightFiles(tmp_path)
    bodies = [body | TOLD for body in bodies_of(12, 400)]
    with httpx.Client(base_url=group.url, timeout=WAIT_S) as client:
        assert update(client, files.make(1), "one")["status"] == 200
        for number, mode in enumerate(("keep", "wait", "keep"), 2):
            with Streams(group.url, bodies) as streams:
                streams.until_each_has(3)
                made = update(client, files.make(number), str(number), query="?timeout=300", streams=mode)
                assert made["status"] == 200, made
                assert len({receipt["result"]["generation"] for receipt in made["engines"]}) == 1
                streams.until_all_ended()
                assert streams.failures == []
                earlier = {"one" if number == 2 else str(number - 1): number - 1}
                check_marks(streams.completions, earlier | ({str(number): number} if mode == "keep" else {}))
        bad = update(client, files.make(9, dtype="F32"), "bad")
        assert (bad["status"], bad["outcome"]) == (502, "aborted")
        versions = client.get("/weight_version").json()["engines"]
        assert [each["weight_version"] for each in versions] == ["4"] * RANKS
        assert group.complete(max_tokens=5)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_ranks_pause_and_go_on(group: Server, mode: str) -> None:
    tokens = 1900 if mode == "abort" else 200  # which do not end by themselves
    with (
        httpx.Client(base_url=group.url, timeout=WAIT_S) as client,
        Streams(group.url, bodies_of(9, tokens)) as streams,
    ):
        streams.until_each_has(3)
        assert client.post(f"/pause?mode={mode}&timeout=300").status_code == 200
        steps = of_ranks(group, "penstock:engine_steps_total")
        if mode != "keep":
            streams.until_all_ended()
        assert of_ranks(group, "penstock:engine_steps_total") == steps
        assert client.post("/resume").status_code == 200
        streams.until_all_ended()
        assert streams.failures == []
        reasons = {each.last_choice["finish_reason"] for each in streams.completions}
        assert reasons == {"abort" if mode == "abort" else "length"}
        assert group.complete(max_tokens=5)["usage"]["completion_tokens"] == 5


def bodies_of(streams: int, tokens: int) -> list[dict[str, Any]]:
    return [
        {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "seed": seed} for seed in range(streams)
    ]


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_dies_or_hangs_takes_its_group_along_and_all_streams_go_on(
    server: Server, tmp_path: Path, stopped: bool
) -> None:
    bodies = bodies_of(12, 500)
    undisturbed = texts_of(server.url, bodies)
    options = ("--synthetic-step-ms", "5", *(("--engine-hang-timeout", "3") if stopped else ()))
    with Server(*GROUP, *options, directory=tmp_path) as group:
        engines = group.children("engine")
        with Streams(group.url, bodies) as streams:
            streams.until_each_has(3)
            if stopped:
                engines[1].suspend()
            else:
                engines[1].kill()
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        assert group.metric("penstock:streams_interrupted_total", outcome="given_up") == 0
        psutil.wait_procs(engines, WAIT_S)
        wait_until(lambda: len(group.children("engine")) == RANKS, WAIT_S, "their successors")
        assert {engine.pid for engine in group.children("engine")}.isdisjoint(e.pid for e in engines)
        assert "the group of engine 0, engine 1, engine 2 is started again" in group.log
        if stopped:
            assert group.log.count("not heard of for 3 s (--engine-hang-timeout)") == 1
            assert "engine 1 was killed by SIGKILL" in group.log


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_group_killed_again_and_again_loses_no_token(server: Server, tmp_path: Path) -> None:
    bodies = bodies_of(24, 1500)
    undisturbed = texts_of(server.url, bodies)
    options = ("--synthetic-step-ms", "5", "--resume-timeout", "300")
    with Server(*GROUP, *options, directory=tmp_path) as group, Streams(group.url, bodies) as streams:
        for kill in range(5):
            wait_until(lambda: len(group.children("engine")) == RANKS, WAIT_S, "the start of the group")
            streams.longest_pause_after(time.monotonic())
            assert streams.running > 0
            engines = group.children("engine")
            engines[kill % RANKS].kill()
            psutil.wait_procs(engines, WAIT_S)
        streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        assert group.metric("penstock:streams_interrupted_total", outcome="given_up") == 0


def test_a_drain_lets_streams_of_one_rank_end_and_ends_all_in_order(server: Server, tmp_path: Path) -> None:
    bodies = bodies_of(5, 150)
    undisturbed = texts_of(server.url, bodies)
    options = ("--synthetic-step-ms", "5", "--drain-timeout", "300")
    with Server(*GROUP, *options, directory=tmp_path) as group:
        with Streams(group.url, bodies) as streams:
            streams.until_each_has(3)
            group.process.send_signal(signal.SIGTERM)
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        assert group.process.wait(60) == 0
        assert "while shutting down" not in group.log


# -- with a model --------------------------------------------------------------------------------------


def write_mixture(directory: Path) -> None:
    """Configuration and tokenizer of a small mixture of experts; its weights are drawn at the start."""
    transformers = pytest.importorskip("transformers")
    for path in (Path(__file__).parent.parent / "data" / "tiny_llama").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    vocabulary = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab()
    transformers.MixtralConfig(
        vocab_size=max(vocabulary.values()) + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=1024,
        initializer_range=0.4,  # wide enough for greedy choices without near ties
        architectures=["MixtralForCausalLM"],
        bos_token_id=None,
        eos_token_id=None,
    ).save_pretrained(directory)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_split_over_ranks_generates_what_one_engine_does_also_over_a_kill(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = tmp_path / "model"
    model.mkdir()
    write_mixture(model)
    common: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True, "temperature": 0}
    bodies = [common | {"prompt": "The list " * (1 + 10 * (place % 5)) + str(place)} for place in range(10)]
    options = (str(model), "--load-format", "dummy", "--dtype", "float32", "--threads", "1")
    options += ("--max-num-batched-tokens", "64", "--kv-cache-memory", str(4 << 20))
    with Server(*options, directory=tmp_path) as alone:
        undisturbed = texts_of(alone.url, bodies)
    options += ("--data-parallel-size", "2", "--enable-expert-parallel", "--drain-timeout", "300")
    options += ("--resume-timeout", "600")
    with Server(*options, directory=tmp_path) as pair:
        assert texts_of(pair.url, bodies) == undisturbed
        wait_until(lambda: len(set(steps_of(pair, 2))) == 1, WAIT_S, "agreeing on the number of steps")
        with Streams(pair.url, bodies) as streams:
            streams.until_each_has(1)
            pair.children("engine")[0].kill()
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        assert pair.metric("penstock:streams_interrupted_total", outcome="resumed") > 0
        wait_until(lambda: pair.metric("penstock:engine_up") == 2, WAIT_S, "the start of both engines")
        assert pair.post("/sleep?level=2", {}, timeout=WAIT_S).status_code == 200
        assert pair.post("/wake_up", {}, timeout=WAIT_S).status_code == 200
        assert texts_of(pair.url, bodies[:2]) == undisturbed[:2]
        with Streams(pair.url, bodies[:1]) as streams:
            streams.until_each_has(1)
            pair.process.send_signal(signal.SIGTERM)
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed[:1])
        assert pair.process.wait(60) == 0
        assert "while shutting down" not in pair.log


@pytest.mark.slow
def test_a_model_without_experts_is_refused_before_anything_starts(tmp_path: Path) -> None:
    server = Server("--data-parallel-size", "2", "--enable-expert-parallel", directory=tmp_path)
    assert server.process.wait(WAIT_S) == 2
    server.end()
    assert "--enable-expert-parallel" in server.log
    assert "has no experts" in server.log
