"""Engines that are killed under running requests, which go on elsewhere as if nothing had happened."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.clients import Completion, Http2Connection, Streams, address_of, texts_of
from tests.integration.server import SYNTHETIC, Server, wait_until

PACED = (*SYNTHETIC, "--synthetic-step-ms", "5")
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 600, "ignore_eos": True, "seed": 1}


def engines_up(server: Server, count: int) -> None:
    wait_until(lambda: server.metric("penstock:engine_up") == count, 90, f"{count} engines being up")


def interrupted(server: Server, outcome: str) -> float:
    return server.metric("penstock:streams_interrupted_total", outcome=outcome)


def test_streams_of_a_killed_engine_go_on(server: Server, tmp_path: Path) -> None:
    bodies = [LONG | {"seed": seed, "stop": ["no such stop"] if seed % 2 else None} for seed in range(12)]
    undisturbed = texts_of(server.url, bodies)
    with (
        Server(*PACED, "--data-parallel-size", "2", directory=tmp_path) as pair,
        ThreadPoolExecutor() as pool,
    ):
        whole = [pool.submit(pair.complete, **body, logprobs=1) for body in bodies[:2]]
        with Streams(pair.url, bodies) as streams:
            streams.until_each_has(3)
            pair.children("engine")[0].kill()
            streams.until_all_ended()
        assert streams.failures == []
        assert streams.texts == undisturbed
        for reply, text in zip(whole, undisturbed, strict=False):
            choice = reply.result(60)["choices"][0]
            assert choice["text"] == text
            assert len(choice["logprobs"]["tokens"]) == LONG["max_tokens"]
        assert interrupted(pair, "resumed") > 0


def test_streams_wait_for_the_only_engine(server: Server, tmp_path: Path) -> None:
    undisturbed = texts_of(server.url, [LONG] * 2)
    with Server(*PACED, directory=tmp_path) as alone, Streams(alone.url, [LONG] * 2) as streams:
        streams.until_each_has(3)
        (engine,) = alone.children("engine")
        engine.kill()
        streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        assert interrupted(alone, "resumed") == 2


def test_a_client_may_leave_while_its_stream_waits(tmp_path: Path) -> None:
    with Server(*PACED, directory=tmp_path) as server:
        (engine,) = server.children("engine")
        with Streams(server.url, [LONG] * 2) as streams:
            streams.until_each_has(3)
            engine.kill()
        wait_until(lambda: server.metric("penstock:streams") == 0, 90, "forgetting the stream")
        engines_up(server, 1)
        assert server.complete(**LONG)["usage"]["completion_tokens"] == LONG["max_tokens"]


def test_streams_that_wait_too_long_end_truthfully(server: Server, tmp_path: Path) -> None:
    (undisturbed,) = texts_of(server.url, [LONG])
    with Server(*PACED, "--resume-timeout", "0.01", directory=tmp_path) as alone:
        with ThreadPoolExecutor() as pool, Streams(alone.url, [LONG] * 2) as streams:
            waiting = pool.submit(alone.post, "/v1/completions", LONG | {"max_tokens": 1900})
            wait_until(lambda: alone.metric("penstock:streams") == 3, 90, "starting all streams")
            streams.until_each_has(3)
            (engine,) = alone.children("engine")
            engine.kill()
            streams.until_all_ended()
            reply = waiting.result(60)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        assert reply.json()["error"]["code"] == "engine_died"
        assert len(streams.failures) == 2
        for (code, message), text in zip(streams.failures, streams.texts, strict=True):
            assert code == "engine_died"
            assert "0.01 s (--resume-timeout)" in message
            assert 0 < len(text) < len(undisturbed)
            assert undisturbed.startswith(text)
        assert interrupted(alone, "expired") == 3


def test_without_resumption_streams_end_and_the_engine_comes_back(tmp_path: Path) -> None:
    """Each stream of an HTTP/2 connection ends with an error event, and the connection goes on."""
    lost, later = [Completion(LONG) for _ in range(2)], Completion(LONG | {"max_tokens": 3})
    with (
        Server(*PACED, "--resume-timeout", "0", directory=tmp_path) as alone,
        Http2Connection(address_of(alone.url), lost) as connection,
    ):
        with Streams(alone.url, [LONG]) as streams:
            streams.until_each_has(1)
            connection.until_each_has(1)
            (engine,) = alone.children("engine")
            engine.kill()
            streams.until_all_ended()
            connection.until_all_ended()
        failures = [*streams.failures, *(each.failure for each in lost)]
        assert [failure[0] for failure in failures if failure is not None] == ["engine_died"] * 3
        engines_up(alone, 1)
        connection.start(later)
        connection.until_all_ended()
        assert (later.done, later.failure) == (True, None)


def test_an_engine_that_breaks_in_order_hands_its_streams_on(server: Server, tmp_path: Path) -> None:
    """Each engine breaks once it has made 60 steps with work; what it held back is delivered, too."""
    arguments = (*PACED, "--synthetic-fault", "error@60", "--data-parallel-size", "2")
    bodies = [LONG | {"max_tokens": 100, "stream_interval": 7}]
    undisturbed = texts_of(server.url, bodies)
    with Server(*arguments, directory=tmp_path) as pair:
        assert texts_of(pair.url, bodies) == undisturbed
        assert interrupted(pair, "resumed") == 1


def test_an_engine_that_hangs_is_replaced_and_its_streams_go_on(server: Server, tmp_path: Path) -> None:
    undisturbed = texts_of(server.url, [LONG])
    arguments = (*PACED, "--engine-hang-timeout", "2")
    with Server(*arguments, directory=tmp_path) as alone, Streams(alone.url, [LONG]) as streams:
        streams.until_each_has(3)
        (engine,) = alone.children("engine")
        engine.suspend()
        streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        assert "not heard of for 2 s (--engine-hang-timeout)" in alone.log


def test_a_request_that_seems_to_end_engines_is_given_up(tmp_path: Path) -> None:
    """Every engine breaks at its first step with work, so each resumption is followed by a death."""
    arguments = (*PACED, "--synthetic-fault", "exit@0", "--data-parallel-size", "3")
    with Server(*arguments, directory=tmp_path) as server:
        reply = server.post("/v1/completions", LONG, timeout=90)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "engine_died"
        assert "not tried again" in reply.json()["error"]["message"]
        assert interrupted(server, "given_up") == 1
        assert interrupted(server, "resumed") == 2


def test_streams_that_wait_in_a_full_queue_outlive_the_loss_of_engines(tmp_path: Path) -> None:
    """Each engine has two slots and two places in its queue. The streams of a lost one find no place
    elsewhere, and most only wait there, too, when that engine is lost."""
    limits = ("--max-num-seqs", "2", "--max-num-queued-reqs", "4", "--data-parallel-size", "2")
    bodies = [LONG | {"seed": seed, "max_tokens": 70} for seed in range(2 * (2 + 2))]
    with (
        Server(*SYNTHETIC, "--synthetic-step-ms", "40", *limits, directory=tmp_path) as pair,
        Streams(pair.url, bodies) as streams,
    ):
        wait_until(lambda: pair.metric("penstock:streams") == len(bodies), 90, "accepting all streams")
        for again in range(3):
            wait_until(lambda: pair.log.count("is ready again") == again, 90, "its successor")  # noqa: B023
            engines_up(pair, 2)
            # the older one: the other was killed before, so its streams are here
            pair.kill(min(pair.children("engine"), key=psutil.Process.create_time))
        streams.until_all_ended()
        assert streams.failures == []
        assert interrupted(pair, "given_up") == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_goes_on_as_it_would_have(tmp_path: Path) -> None:
    """Greedy and seeded streams, penalties and limits, over the kill of one of two engines with a model."""
    pytest.importorskip("torch")
    common: dict[str, Any] = {"prompt": "The with statement", "max_tokens": 400, "ignore_eos": True}
    bodies = [
        common | {"temperature": 0},
        common | {"temperature": 0, "frequency_penalty": 0.5, "prompt": "def main():\n"},
        common | {"temperature": 0.8, "seed": 5},
        common | {"temperature": 0.8, "seed": 6, "presence_penalty": 0.3, "repetition_penalty": 1.1},
        common | {"temperature": 0.8, "seed": 7, "ignore_eos": False, "min_tokens": 300},
    ]
    options = ("--dtype", "float32", "--threads", "1", "--data-parallel-size", "2")
    with Server(*options, directory=tmp_path) as pair:
        undisturbed = texts_of(pair.url, bodies)
        with Streams(pair.url, bodies) as streams:
            streams.until_each_has(3)
            pair.children("engine")[0].kill()
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        assert interrupted(pair, "resumed") > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_engines_killed_under_512_streams(server: Server, tmp_path: Path) -> None:
    """Zero failed requests, zero lost or repeated tokens; streams resume without waiting for the restart."""
    count, kills = 512, 20
    bodies = [LONG | {"seed": seed, "max_tokens": 1900} for seed in range(count)]
    undisturbed = texts_of(server.url, bodies)
    arguments = (*SYNTHETIC, "--synthetic-step-ms", "120", "--data-parallel-size", "2")
    with Server(*arguments, directory=tmp_path) as pair:
        pauses = []
        with Streams(pair.url, bodies) as streams:
            streams.until_each_has(1)
            for _ in range(kills):
                engines_up(pair, 2)
                assert streams.running == count
                # the older one: the other was killed before, so its streams are here
                min(pair.children("engine"), key=psutil.Process.create_time).kill()
                pauses.append(streams.longest_pause_after(time.monotonic()))
            streams.until_all_ended()
        assert streams.failures == []
        assert streams.texts == undisturbed
        assert interrupted(pair, "resumed") >= (kills - 1) * count
        print("resumed:", interrupted(pair, "resumed"))
        print("longest pause after each kill, s:", " ".join(f"{pause:.2f}" for pause in sorted(pauses)))
