"""The server of a measurement starts with the right options, and leaves nothing behind."""

from __future__ import annotations

import os

import httpx
import pytest

from penstock.bench.errors import BenchError
from penstock.bench.process_usage import pids_of_supervisor
from penstock.bench.server_process import ServerProcess, serve_arguments
from penstock.cli import parser
from penstock.cli.serve import COMMAND
from penstock.config.bench import BenchHostConfig
from penstock.config.serve import ServeConfig
from penstock.config.sources import resolve


def served(config: BenchHostConfig, api_servers: int = 1) -> ServeConfig:
    """What ``penstock serve`` makes of the command line."""
    arguments = parser.parse(COMMAND, serve_arguments(config, api_servers)[1:]).arguments
    return resolve(ServeConfig, arguments, {})[0]


def test_options_reach_the_server() -> None:
    config = BenchHostConfig(step_ms=2.5, tokens_per_step=3, stream_interval="auto", engines=3, streams=5000)
    options = served(config, 2)
    assert (options.engine, options.port, options.synthetic_step_ms) == ("synthetic", 0, 2.5)
    assert (options.stream_interval, options.api_server_count, options.data_parallel_size) == ("auto", 2, 3)
    assert options.max_num_seqs == 5000
    assert (options.synthetic_tokens_per_step, options.synthetic_acceptance_rate) == (3, 1.0)


def test_slots_are_for_requests_in_flight_and_lengths_for_the_longest() -> None:
    options = served(BenchHostConfig(streams=5000, concurrency=64, prompt_tokens=4000, tokens=100))
    assert options.max_num_seqs == 1024
    assert options.max_model_len is not None
    assert 4200 < options.max_model_len < 5000


def test_own_options_of_the_server_win() -> None:
    options = served(BenchHostConfig(server_args="--max-num-seqs 7 --served-model-name 'a b'"))
    assert options.max_num_seqs == 7
    assert options.served_model_name == ["a b"]


def test_it_serves_and_ends_with_all_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_API_KEY", "VLLM_API_KEY"):  # do not reach it
        monkeypatch.setenv(name, "of the user")
    config = BenchHostConfig(step_ms=1.0)
    with ServerProcess(serve_arguments(config, 2), 60.0) as server:
        processes = pids_of_supervisor(server.pid)
        assert (len(processes.api_servers), len(processes.engines)) == (2, 1)
        assert httpx.get(f"{server.url}/v1/models", trust_env=False).status_code == 200
    for pid in processes.api_servers + processes.engines:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_server_that_does_not_start_is_quoted() -> None:
    with pytest.raises(BenchError, match=r"(?s)the server did not start:.*unknown option --no-such"):
        ServerProcess(["serve", "--no-such", "1"], 60.0)


def test_a_server_that_is_not_ready_in_time_is_ended() -> None:
    with pytest.raises(BenchError, match=r"the server was not ready in 0 s"):
        ServerProcess(serve_arguments(BenchHostConfig()), 0.001)
