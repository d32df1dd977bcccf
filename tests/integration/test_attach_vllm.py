"""Real headless engines of vLLM's, attached, that are killed and taken over. What else an engine of vLLM's
does is tested of attached ones, too: in test_vllm.py, test_vllm_lora.py, test_vllm_transfer.py and
test_golden.py."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.attached_vllm import AttachedVllm
from tests.integration.clients import Streams, texts_of
from tests.integration.control import call, of_all
from tests.integration.server import VLLM_START_S, in_vllm, wait_until
from tests.integration.weight_marks import update

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TAKEN_OVER = "was attached before, and is taken over"
GREEDY: dict[str, Any] = {"max_tokens": 1000, "ignore_eos": True, "temperature": 0}
TOLD = [
    GREEDY | {"prompt": f"{place}: The with", "max_tokens": 1900, "return_weight_versions": True}
    for place in range(4)
]
BODIES = [GREEDY | {"prompt": f"{place}: The with statement"} for place in range(64)]


@pytest.fixture(scope="module")
def pair(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttachedVllm]:
    """Two engines, which tests kill and start again."""
    arguments = in_vllm(vllm_model, "--data-parallel-size", "2")
    with (
        tempfile.TemporaryDirectory() as run_dir,
        AttachedVllm(*arguments, directory=tmp_path_factory.mktemp("pair"), run_dir=run_dir) as running,
    ):
        up(running, 2)
        yield running


@pytest.fixture(scope="module")
def undisturbed(pair: AttachedVllm) -> list[str]:
    return texts_of(pair.url, BODIES)


def up(server: AttachedVllm, engines: int) -> None:
    wait_until(
        lambda: server.metric("penstock:engine_up") == engines, VLLM_START_S, f"{engines} engines being up"
    )


@contextlib.contextmanager
def paused_amid_streams(
    pair: AttachedVllm, client: httpx.Client, bodies: list[dict[str, Any]], **labels: str
) -> Iterator[Streams]:
    """Streams, some of which have begun and stand still, at the engine of ``labels`` as well. An engine that
    has few processors may have made all its tokens before the other one, or the pause, has its turn: then
    they are begun anew."""
    for _ in range(20):
        with Streams(pair.url, bodies) as streams:
            streams.until_each_has(1)
            paused = call(client, "/pause?mode=keep")
            assert paused["status"] == 200, paused
            assert of_all(paused, "result") == [{"paused": True, "mode": "keep"}] * 2
            left = sum(pair.metric(f"vllm:num_requests_{state}") for state in ("running", "waiting"))
            wait_until(partial(_runs, streams, left), 60, "the ends of the other streams")
            try:
                if pair.metric("vllm:num_requests_running", **labels):
                    yield streams
                    return
            finally:
                call(client, "/resume")
    raise AssertionError("no stream was running when the engines were paused")


def _runs(streams: Streams, count: float) -> bool:
    return streams.running == count


def test_64_streams_over_the_kill_of_one_engine(pair: AttachedVllm, undisturbed: list[str]) -> None:
    with (
        httpx.Client(base_url=pair.url, timeout=300) as client,
        paused_amid_streams(pair, client, BODIES, engine="0") as streams,
    ):
        pair.kill_engine(0)
        up(pair, 1)
        pair.start_engine(pair.commands()[0])
        up(pair, 2)
        assert call(client, "/resume")["status"] == 200
        streams.until_all_ended(300)
    assert (streams.failures, streams.texts) == ([], undisturbed)
    assert pair.metric("penstock:streams_interrupted_total", outcome="resumed") > 0
    assert texts_of(pair.url, BODIES) == undisturbed


def test_a_killed_adapter_takes_its_engine_over(pair: AttachedVllm, undisturbed: list[str]) -> None:
    with Streams(pair.url, BODIES) as streams:
        streams.until_each_has(3)
        pair.children("engine")[1].kill()
        streams.until_all_ended(300)
    assert (streams.failures, streams.texts) == ([], undisturbed)
    up(pair, 2)
    assert TAKEN_OVER in pair.log
    wait_until(
        lambda: pair.metric("vllm:num_requests_running") == 0, 60, "aborting what the engine still ran"
    )


def test_an_engine_that_is_told_to_end_gives_its_streams_away(
    pair: AttachedVllm, undisturbed: list[str]
) -> None:
    with Streams(pair.url, BODIES) as streams:
        streams.until_each_has(3)
        pair.engines[1].terminate()
        streams.until_all_ended(300)
    assert (streams.failures, streams.texts) == ([], undisturbed)
    command = pair.commands()[1]
    pair.start_engine(command)
    up(pair, 2)


def test_a_pause_keeps_streams(pair: AttachedVllm) -> None:
    expected = texts_of(pair.url, TOLD)
    with (
        httpx.Client(base_url=pair.url, timeout=300) as client,
        paused_amid_streams(pair, client, TOLD) as streams,
        Streams(pair.url, [GREEDY | {"prompt": "x", "max_tokens": 3}]) as queued,
    ):
        running, tokens = streams.running, pair.metric("vllm:generation_tokens_total")
        wait_until(lambda: pair.metric("vllm:num_requests_waiting") > 0, 60, "the queue")
        assert pair.metric("vllm:generation_tokens_total") == tokens
        assert streams.running == running
        used = [receipt["error"] for receipt in call(client, "/flush_cache")["engines"] if receipt["error"]]
        assert set(used) == {"vLLM cannot empty its prefix cache, as requests use it; try again"}
        assert call(client, "/resume")["status"] == 200
        queued.until_all_ended(300)
        streams.until_all_ended(300)
        assert (queued.failures, streams.failures, streams.texts) == ([], [], expected)
        flushed = call(client, "/flush_cache")
        assert (flushed["status"], flushed["outcome"]) == (200, "done"), flushed


def test_weights_change_under_streams_and_stay_over_kills(
    pair: AttachedVllm, undisturbed: list[str], vllm_model: Path, tmp_path: Path
) -> None:
    """A killed engine begins with the weights of its start; a killed adapter's successor finds an engine that
    has others."""
    files: Any = pytest.importorskip("safetensors.torch")
    start = files.load_file(vllm_model / "model.safetensors")
    weights = {name: tensor.flip(0).contiguous() for name, tensor in start.items()}
    other, strange = str(tmp_path / "other.safetensors"), str(tmp_path / "strange.safetensors")
    files.save_file(weights, other)
    name, tensor = next(iter(weights.items()))
    files.save_file(weights | {f"{name}.more": tensor.clone()}, strange)
    with httpx.Client(base_url=pair.url, timeout=300) as client:
        with paused_amid_streams(pair, client, TOLD) as streams:
            running = streams.running
            updated = update(client, other, "v1")
            assert (updated["status"], updated["weight_version"]) == (200, "v1"), updated
            assert [result["version"] for result in of_all(updated, "result")] == ["v1"] * 2
            assert [result["loaded"] for result in of_all(updated, "result")] == [len(weights)] * 2
            assert call(client, "/resume")["status"] == 200
            streams.until_all_ended(300)
        assert streams.failures == []
        spans = [completion.last_choice["weight_versions"] for completion in streams.completions]
        versions = [[span["version"] for span in each] for each in spans]
        assert sorted(versions) == [["default"]] * (len(TOLD) - running) + [["default", "v1"]] * running
        assert all(each[0]["end"] == each[-1]["start"] or len(each) == 1 for each in spans)
        assert all(each[-1]["end"] == TOLD[0]["max_tokens"] for each in spans)
        checksums = client.get("/weights_checksum").json()
        assert (checksums["outcome"], checksums["equal"]) == ("done", True)
        after = texts_of(pair.url, BODIES)
        assert after != undisturbed
        refused = update(client, strange, "v2")
        assert (refused["status"], refused["outcome"]) == (502, "aborted")
        assert "vLLM: " in refused["error"]["message"]
        for replace in (replace_adapter, replace_engine):
            replace(pair)
            up(pair, 2)
            assert versions_of(client) == ["v1"] * 2
            found = client.get("/weights_checksum").json()
            assert of_all(found, "result") == of_all(checksums, "result")
            assert texts_of(pair.url, BODIES) == after


def replace_adapter(pair: AttachedVllm) -> None:
    before = pair.log.count(TAKEN_OVER)
    pair.children("engine")[1].kill()
    wait_until(lambda: pair.log.count(TAKEN_OVER) > before, VLLM_START_S, "its successor")


def replace_engine(pair: AttachedVllm) -> None:
    program: Any = pair.engines[-1].args
    pair.kill_engine(-1)
    up(pair, 1)
    pair.start_engine(["vllm", *program[2:]])


def versions_of(client: httpx.Client) -> list[str]:
    return [engine["weight_version"] for engine in client.get("/weight_version").json()["engines"]]
