"""``penstock bench embed`` as a whole, and its load."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.bench.embed.whole_replies import WholeReplies
from penstock.bench.errors import BenchError
from penstock.bench.server_process import ServerProcess
from penstock.cli.main import main


def test_a_small_run_beside_another_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    serve = ["serve", "--engine=synthetic", "--runner=pooling", "--synthetic-dimensions=8", "--port=0"]
    with ServerProcess([*serve, "--synthetic-step-ms=0"], 60) as other:
        load = ["--inputs", "3", "--requests", "20", "--rounds", "1", "--concurrency", "4"]
        peer = ["--compare-url", f"{other.url}/v1", "--compare-pid", str(other.pid)]
        given = ["--dimensions", "48", "--beside", "300", "--json", str(path)]
        assert main(["bench", "embed", *load, *peer, *given]) == 0
        with WholeReplies(other.url, 1) as client:
            assert client.one(client.get("/health"), 10).status == 200
            with pytest.raises(BenchError, match="404"):
                client.one(client.get("/nowhere"), 10)
    report = json.loads(path.read_bytes())
    assert (report["inputs"], report["dimensions"]) == (3, 48)
    assert report["tokens_per_input"] > 5
    costs = {(each["server"], each["format"]): each for each in report["costs"]}
    assert list(costs) == [
        (server, kind) for server in ("penstock", "other") for kind in ("float", "base64", "binary")
    ]
    assert costs["penstock", "binary"]["body_bytes"] == 3 * 48 * 4
    assert costs["other", "binary"]["body_bytes"] == 3 * 8 * 4
    assert min(each["requests_per_cpu_s"] for each in costs.values()) > 0
    assert set(report["ratios"]) >= {"base64, other / penstock", "penstock base64 / binary"}
    assert report["delay"]["inputs"] == 300
    assert report["delay"]["beside"] > 0
    shown = capsys.readouterr().out
    assert "3 inputs of" in shown
    assert "requests of 300 inputs" in shown


def test_options_that_need_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "embed", "--compare-pid", str(os.getpid())]) != 0
    assert "--compare-url and --compare-pid need each other" in capsys.readouterr().err


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(BenchError, match="cannot connect"):
        WholeReplies("http://127.0.0.1:9", 1)
