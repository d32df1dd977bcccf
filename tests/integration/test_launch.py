"""Engines of vLLM's that the server starts itself, with a command that makes tokens on a clock."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.exit_codes import EXIT_FAILED
from penstock.supervisor.startup.model_resolution import DEMO_DIR
from tests.integration import fake_vllm
from tests.integration.clients import Streams, texts_of
from tests.integration.server import START_S, Server, wait_until

COMMAND = shlex.join([sys.executable, str(fake_vllm.__file__)])
ENVIRON = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
LONG: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True}
BODIES = [LONG | {"prompt": f"{place} is the number"} for place in range(16)]


def serve(directory: Path, *options: str, ranks: int = 2, own: tuple[str, ...] = ()) -> Server:
    engine = ("--engine", "vllm", "--vllm-command", COMMAND, "--data-parallel-size", str(ranks))
    arguments = (str(DEMO_DIR), *engine, "--served-model-name", "m", *options, *(("--", *own) if own else ()))
    return Server(*arguments, directory=directory, environ=ENVIRON)


def both_up(server: Server) -> None:
    wait_until(lambda: server.metric("penstock:engine_up") == 2, START_S, "both engines being up")


def of_vllm(server: Server, rank: int) -> list[psutil.Process]:
    """All processes below the engine process of ``rank``."""
    return server.children("engine")[rank].children(recursive=True)


def clock_of(processes: list[psutil.Process]) -> psutil.Process:
    """The process that makes the tokens."""
    [clock] = [each for each in processes if "penstock.bench.clock.engine" in each.cmdline()]
    return clock


def ended(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What BODIES are answered."""
    with serve(tmp_path_factory.mktemp("one"), ranks=1) as server:
        return texts_of(server.url, BODIES)


def test_streams_go_on_over_the_death_of_vllm_and_of_its_adapter(
    undisturbed: list[str], tmp_path: Path
) -> None:
    """vLLM is started again, and nothing of the first one is left."""
    with serve(tmp_path) as server:
        for victim in ("vllm", "engine"):
            both_up(server)
            before = of_vllm(server, 0)
            with Streams(server.url, BODIES) as streams:
                streams.until_each_has(3)
                (clock_of(before) if victim == "vllm" else server.children("engine")[0]).kill()
                streams.until_all_ended()
            assert (streams.failures, streams.texts) == ([], undisturbed)
            wait_until(lambda: ended(before), START_S, "the end of all of the first vLLM")  # noqa: B023
        both_up(server)
        assert "engine 0 ended with exit code 1: vLLM's engine is lost" in server.log
        assert "Traceback" not in server.log


def test_a_killed_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    with serve(tmp_path, ranks=1) as server:
        below = psutil.Process(server.process.pid).children(recursive=True)
        clock_of(below)
        server.process.kill()
        wait_until(lambda: ended(below), START_S, "the end of all processes")


def test_running_streams_finish_before_vllm_is_told_to_end(undisturbed: list[str], tmp_path: Path) -> None:
    with serve(tmp_path, "--drain-timeout", "60", ranks=1) as server:
        below = of_vllm(server, 0)
        with Streams(server.url, BODIES) as streams:
            streams.until_each_has(3)
            server.process.send_signal(signal.SIGTERM)
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        assert server.process.wait(START_S) == 0
        assert ended(below)


def test_one_that_does_not_start_is_told_in_its_own_words_and_not_started_again(tmp_path: Path) -> None:
    server = serve(tmp_path, own=("--fail", "no room for the weights"))
    assert server.process.wait(START_S) == EXIT_FAILED
    assert not server.end()
    told, _, last = server.log.partition("vLLM ended with exit code 1; its last lines:\n")
    assert "engine" in told
    assert last.splitlines()[0].endswith("supervisor     no room for the weights")
    assert "started again" not in server.log


def test_arguments_that_vllm_refuses_are_told_by_name(tmp_path: Path) -> None:
    server = serve(tmp_path, ranks=1, own=("--no-such-flag",))
    assert server.process.wait(START_S) == EXIT_FAILED
    server.end()
    assert "vllm serve: error: unrecognized arguments: --no-such-flag" in server.log


def test_one_that_falls_silent_is_ended_and_started_again(undisturbed: list[str], tmp_path: Path) -> None:
    with serve(tmp_path, "--engine-hang-timeout", "2") as server:
        before = of_vllm(server, 0)
        with Streams(server.url, BODIES) as streams:
            streams.until_each_has(3)
            clock_of(before).send_signal(signal.SIGSTOP)
            streams.until_all_ended()
        assert (streams.failures, streams.texts) == ([], undisturbed)
        wait_until(lambda: ended(before), START_S, "the end of a process that does nothing")
        both_up(server)


def test_sleep_and_calls(tmp_path: Path) -> None:
    with serve(tmp_path, ranks=1) as server:
        assert server.post("/reset_prefix_cache", {}).status_code == 200
        assert server.post("/sleep?level=1", {}).status_code == 200
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 503
        assert server.post("/wake_up", {}).status_code == 200
        assert server.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("/no/vllm x", "there is no program /no/vllm"),
        ("'vllm", "it is no command"),
        (" ", "it is no command"),
    ],
)
def test_a_command_that_is_none_is_refused_by_name(command: str, reason: str, tmp_path: Path) -> None:
    server = Server(str(DEMO_DIR), "--engine", "vllm", "--vllm-command", command, directory=tmp_path)
    assert server.process.wait(START_S) == 2
    server.end()
    assert f"--vllm-command {command}: {reason}" in server.log
