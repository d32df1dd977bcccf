"""``penstock bench host`` as a whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.bench.deadline import Deadline
from penstock.bench.errors import BenchError
from penstock.bench.server_process import ServerProcess, serve_arguments
from penstock.cli.main import main
from penstock.config.bench import BenchHostConfig

pytestmark = pytest.mark.usefixtures("few_sends")
SMALL = ["bench", "host", "--streams", "4", "--tokens", "5", "--rounds", "2", "--timeout", "60"]


def run(arguments: list[str], path: Path) -> dict[str, object]:
    """Runs the command and returns what it wrote to ``--json``."""
    assert main([*SMALL, *arguments, "--json", str(path)]) == 0
    report: dict[str, object] = json.loads(path.read_bytes())
    return report


def test_it_measures_a_server_that_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(["--step-ms", "2", "--requests", "12", "--concurrency", "3"], tmp_path / "report.json")
    assert (report["requests"], report["errors"]) == (24, 0)
    assert 1.0 <= report["events_per_request"] <= 5.0  # type: ignore[operator]  # fewer where it was behind
    assert 100 < report["tokens_per_cpu_s"] < 10_000_000  # type: ignore[operator]
    assert report["ttft_ms"]["p50"] > 0  # type: ignore[index]
    assert report["subject"]["model"]  # type: ignore[index]
    out, err = capsys.readouterr()
    assert "tokens per API-server CPU-second" in out
    assert "round 2 of 2" in err


def test_slow_readers_are_compared_to_rounds_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(["--slow-readers", "2", "--step-ms", "1", "--tokens", "50"], tmp_path / "report.json")
    slow = report["slow_readers"]
    assert slow["readers"] == 2  # type: ignore[index, call-overload]
    assert slow["itl_p99_ratio"] > 0  # type: ignore[index, call-overload]
    assert report["requests"] == 4  # two rounds of the two that are read
    out, err = capsys.readouterr()
    assert "others' p99 between events, ratio" in out
    assert "starting 2 slow readers" in err


def test_numbers_of_api_servers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(["--api-server-count", "1,2", "--grow-load", "--step-ms", "2"], tmp_path / "report.json")
    one, two = report["points"]  # type: ignore[misc]
    assert [(each["api_servers"], each["streams"]) for each in (one, two)] == [(1, 4), (2, 8)]
    assert one["ratio"] == 1.0
    assert min(one["us_per_token"], two["us_per_token"], two["ratio"]) > 0
    assert two["coordinator_share"] > 0
    assert two["supervisor_us_per_connection"] >= 0  # less than a tick of the clock, with so few
    assert report["errors"] == 0
    out, err = capsys.readouterr()
    assert "computed for 64 API servers with a core each" in out
    assert "round 2 of 2" in err


def test_http2_and_http1_are_compared_by_turns_on_one_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--http2", "--connections", "2", "--tls", "--step-ms", "2", "--compare-with=--no-http2"]
    report = run(arguments, tmp_path / "report.json")
    first, second = report["first"], report["second"]
    assert first["protocol"] == "HTTP/2 with TLS over 2 connections"  # type: ignore[index]
    assert second["protocol"] == "HTTP/1.1 with TLS over 4 connections"  # type: ignore[index]
    assert report["errors"] == 0
    for name in ("tokens_per_cpu_s", "us_per_token", "us_per_event", "ttft_p99_ms", "itl_p99_ms"):
        figure = report[name]
        assert 0 < figure["least"] <= figure["ratio"] <= figure["most"]  # type: ignore[index]
    out, err = capsys.readouterr()
    assert "second: the same with --no-http2" in out
    assert err.count("starting penstock serve") == 1
    assert "round 2 of 2: " in err


@pytest.mark.parametrize(
    "arguments", [["--endpoint", "chat"], ["--prompt-kind", "ids", "--prompt-tokens", "100"]]
)
def test_it_measures_a_running_server(tmp_path: Path, arguments: list[str]) -> None:
    with ServerProcess(serve_arguments(BenchHostConfig(step_ms=1.0)), 60.0) as server:
        where = ["--url", f"{server.url}/v1", "--pid", str(server._process.pid)]
        report = run([*where, *arguments], tmp_path / "report.json")
        assert server._process.poll() is None
    assert report["errors"] == 0
    assert report["subject"]["api_servers"] == 1  # type: ignore[index]
    assert report["subject"]["prompt_tokens"] > 30  # type: ignore[index]
    assert "step_ms" not in report["subject"]["options"]  # type: ignore[index]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_all_its_processes(signum: signal.Signals) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", *SMALL, "--step-ms", "1", "--requests", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("warm-up"):
            assert process.poll() is None
        family = psutil.Process(process.pid).children(recursive=True)
        expected = 5 if sys.platform == "linux" else 4
        assert (
            len(family) == expected
        )  # supervisor, its template of children, engine, API server, load client
        os.kill(process.pid, signum)
        process.communicate(timeout=60)
    assert process.returncode == 130
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_time_that_is_over_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--timeout", "0.05"]) == 1
    assert "penstock: error: the server was not ready in 0 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--concurrency", "5"], "--concurrency 5: requests cannot be in flight on 4 streams"),
        (["--slow-readers", "4"], "--slow-readers 4: leave none of 4 streams to compare"),
        (["--url", "http://x", "--pid", "1", "--slow-readers", "1"], "--slow-readers is for a server"),
        (["--api-server-count", "2,2"], "--api-server-count 2 2: has a number twice"),
        (
            ["--api-server-count", "1,2", "--slow-readers", "1"],
            "--slow-readers 1: takes one --api-server-count",
        ),
        (["--grow-load"], "--grow-load: takes several --api-server-count"),
        (["--prompt-kind", "ids", "--endpoint", "chat"], "--prompt-kind ids: chat takes text only"),
        (["--url", "http://x"], "--url http://x: CPU time can be read only of known processes"),
        (["--pid", "1"], "--pid 1: names processes of a running server"),
        (["--url", "https://x", "--pid", "1"], "--url: 'https://x' is not valid"),
        (["--server-args", "'a"], "--server-args: No closing quotation"),
        (["--url", "http://x", "--pid", "1", "--step-ms", "3"], "--step-ms is for a server that is started"),
        (["--url", "http://x", "--pid", "1", "--tls"], "--tls is for a server that is started"),
        (["--connections", "2"], "--connections 2: needs --http2"),
        (["--http2", "--connections", "5"], "--connections 5: are more than 4 streams"),
        (
            ["--http2", "--connections", "1", "--api-server-count", "2"],
            "--http2: 1 connections leave some of --api-server-count [2] without load",
        ),
        (
            ["--compare-with=--http2", "--slow-readers", "1"],
            "--compare-with --http2: takes no --slow-readers",
        ),
        (["--compare-with=--rounds 3"], "--compare-with: --rounds holds for both measurements"),
        (["--compare-with=--http3"], "--compare-with: unknown option --http3"),
        (["--compare-with=--connections 2"], "--compare-with: --connections 2: needs --http2"),
        (["--compare-with=--tokens 0"], "--compare-with: --tokens: '0' is not valid"),
        (["--compare-with='a"], "--compare-with: No closing quotation"),
    ],
)
def test_options_that_contradict_are_errors(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_a_deadline_counts_down_and_says_what_it_ended() -> None:
    time = [100.0]
    deadline = Deadline(5.0, lambda: time[0])
    assert deadline.left("round 1") == 5.0
    time[0] = 104.0
    assert deadline.left("round 2") == 1.0
    time[0] = 105.0
    with pytest.raises(BenchError, match=r"--timeout: 5 s are over before round 3"):
        deadline.left("round 3")
