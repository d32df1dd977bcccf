"""Real headless engines of vLLM's, attached, that are killed and taken over. What else an engine of vLLM's
does is tested of attached ones, too: in test_vllm.py, test_vllm_lora.py, test_vllm_transfer.py and
test_golden.py."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.attached_vllm import AttachedVllm
from tests.integration.clients import Streams, texts_of
from tests.integration.server import VLLM_START_S, in_vllm, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

GREEDY: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}
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


def test_64_streams_over_the_kill_of_one_engine(pair: AttachedVllm, undisturbed: list[str]) -> None:
    with Streams(pair.url, BODIES) as streams:
        streams.until_each_has(3)
        pair.kill_engine(0)
        streams.until_all_ended(300)
    assert (streams.failures, streams.texts) == ([], undisturbed)
    assert pair.metric("penstock:streams_interrupted_total", outcome="resumed") > 0
    command = pair.commands()[0]
    pair.start_engine(command)
    up(pair, 2)
    assert texts_of(pair.url, BODIES) == undisturbed


def test_a_killed_adapter_takes_its_engine_over(pair: AttachedVllm, undisturbed: list[str]) -> None:
    with Streams(pair.url, BODIES) as streams:
        streams.until_each_has(3)
        pair.children("engine")[1].kill()
        streams.until_all_ended(300)
    assert (streams.failures, streams.texts) == ([], undisturbed)
    up(pair, 2)
    assert "was attached before, and is taken over" in pair.log
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
