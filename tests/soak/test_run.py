"""Soaks of real servers, short ones."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.soak.__main__ import main
from tests.soak.config import SoakConfig
from tests.soak.report import SoakReport, render
from tests.soak.run import measure


def test_a_small_soak(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    load = ["--minutes", "0.03", "--round-s", "2", "--concurrency", "8", "--requests", "60"]
    server = ["--api-server-count", "1", "--engines", "2", "--step-ms", "2"]
    assert main(["server", *load, *server, "--json", str(path)]) == 0
    captured = capsys.readouterr()
    assert "all checks passed" in captured.out
    assert "round 1: " in captured.err
    report = msgspec.json.decode(path.read_bytes(), type=SoakReport)
    assert report.passed
    assert report.requests == sum(report.ends.values()) >= 8
    assert report.tokens.unaccounted == 0
    assert report.tokens.generated == report.tokens.delivered + report.tokens.discarded > 0
    assert report.tokens.clients_complete > 0
    assert report.options["engines"] == 2
    assert "json" not in json.loads(path.read_bytes())["options"]


def test_a_server_that_fails_a_stream_does_not_pass() -> None:
    config = SoakConfig(
        minutes=0.02,
        round_s=1.0,
        concurrency=8,
        api_server_count=1,
        engines=1,
        step_ms=2.0,
        server_args="--synthetic-fault stream-error@50",
    )
    report = measure(config, lambda line: None)
    assert not report.passed
    assert report.defects["failed"] == 1
    assert "injected by --synthetic-fault" in report.findings["failed"][0]
    assert "1 requests failed by the API servers' count" in report.findings["books"][0]
    assert "CHECKS FAILED" in render(report)


@pytest.mark.slow
def test_a_soak_through_a_gateway() -> None:
    config = SoakConfig(
        minutes=0.2, round_s=6.0, concurrency=8, api_server_count=1, engines=2, gateway=True, seed=5
    )
    report = measure(config, lambda line: None)
    assert report.passed, render(report)
    assert report.ends["hostile, and may generate tokens"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_soak_with_deaths() -> None:
    config = SoakConfig(minutes=1.0, round_s=8.0, concurrency=24, disturb_every=1.0, seed=3)
    report = measure(config, lambda line: None)
    assert report.passed, render(report)
    assert report.disturbances
    assert "disturbances" in render(report)
