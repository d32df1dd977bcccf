"""What is made of measured rounds: ratios, and a fleet of 64 API servers."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from penstock.bench.process_usage import CpuTime
from penstock.cli.main import run_script
from scripts.bench import scaling
from scripts.bench.scaling import COMMAND, ScalingOptions, ScalingPoint, ScalingSample, coordinator_messages
from tests.bench.test_report import measured

SMALL = ["--streams", "4", "--tokens", "5", "--rounds", "2", "--timeout", "60"]
CONFIG = ScalingOptions(streams=100, tokens=10)
"""As many requests as :func:`measured` says, 1,000 tokens in 10 steps of 100 rows, within 2 s."""


def sample(us_per_token: float, engine_s: float = 0.1, coordinator_s: float = 0.0) -> ScalingSample:
    of_one = measured(us_per_token / 1000)
    round_ = msgspec.structs.replace(of_one, engine_cpu_s=CpuTime(engine_s))
    return ScalingSample(round_, coordinator_s)


def point(
    api_servers: int, *samples: ScalingSample, first: tuple[ScalingSample, ...], accept: float | None = 20.0
) -> ScalingPoint:
    return scaling.point(CONFIG, api_servers, samples, first, None if api_servers == 1 else accept)


def test_ratios_are_taken_within_a_round() -> None:
    first = sample(5.0), sample(10.0), sample(20.0)
    made = point(2, sample(5.5), sample(12.0), sample(20.0), first=first)
    assert made.ratio == pytest.approx(1.1)
    assert made.us_per_token == pytest.approx(12.0)


def test_a_step_has_the_rows_of_all_requests_and_the_coordinator_a_share_of_a_core() -> None:
    only = sample(5.0, engine_s=0.05, coordinator_s=0.01)
    made = point(1, only, only, first=(only, only))
    assert made.engine_ms_per_step == pytest.approx(5.0)
    assert made.coordinator_share == pytest.approx(0.005)
    assert made.events_per_token == pytest.approx(1.0)


def test_shared_parts_are_computed_for_64_api_servers() -> None:
    first = sample(10.0, 0.010)
    points = [
        point(1, first, first=(first,)),
        point(2, sample(11.0, 0.012, 2 * 0.0001 * coordinator_messages(2, 1)), first=(first,)),
        point(4, sample(13.0, 0.016, 2 * 0.0001 * coordinator_messages(4, 1)), first=(first,)),
    ]
    far = scaling.limit(CONFIG, points)
    assert far.us_per_token == pytest.approx(73.0)
    assert far.tokens_per_s == pytest.approx(64 * 1e6 / 73)
    assert far.engine_ms_per_step == pytest.approx(1.0 + 63 * 0.2)
    assert far.engine_tokens_per_s == pytest.approx(100 * 1000 / 13.6)
    assert far.coordinator_share == pytest.approx(0.0001 * coordinator_messages(64, 1))
    assert far.connections_per_s == pytest.approx(50_000)


def test_noise_that_falls_is_not_a_trend() -> None:
    first = sample(10.0)
    points = [point(1, first, first=(first,)), point(2, sample(9.0), first=(first,))]
    assert scaling.limit(CONFIG, points).us_per_token == pytest.approx(9.5)


def test_messages_of_the_coordinator_grow_with_the_square_of_api_servers() -> None:
    assert coordinator_messages(2, 1) == 4 + 10 + 2 + 2 + 20
    assert coordinator_messages(64, 8) == 128 + 80 + 64 * 63 + 64 + 640


def test_numbers_of_api_servers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    arguments = ["--counts", "1,2", "--grow-load", "--step-ms", "2", "--json", str(path)]
    assert run_script(COMMAND, [*SMALL, *arguments]) == 0
    report = json.loads(path.read_bytes())
    one, two = report["points"]
    assert [(each["api_servers"], each["streams"]) for each in (one, two)] == [(1, 4), (2, 8)]
    assert one["ratio"] == 1.0
    assert min(one["us_per_token"], two["us_per_token"], two["ratio"]) > 0
    assert two["coordinator_share"] > 0
    assert two["supervisor_us_per_connection"] >= 0  # less than a tick of the clock, with so few
    assert report["errors"] == 0
    out, err = capsys.readouterr()
    assert "computed for 64 API servers with a core each" in out
    assert "round 2 of 2" in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--counts", "2,2"], "--counts 2 2: has a number twice"),
        (["--slow-readers", "1"], "--slow-readers 1: is for one server"),
        (["--api-server-count", "2"], "--api-server-count 2: is for one server"),
        (["--grow-load", "--requests", "8"], "--grow-load: takes no --requests"),
        (
            ["--http2", "--connections", "1", "--counts", "1,2"],
            "--http2: 1 connections leave some of --counts [1, 2] without load",
        ),
    ],
)
def test_options_that_contradict_are_errors(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(COMMAND, [*SMALL, *arguments]) == 2
    assert reason in capsys.readouterr().err
