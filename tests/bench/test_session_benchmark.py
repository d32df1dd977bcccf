"""``penstock bench session`` as a whole, and what a turn of a long conversation costs, counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType

import pytest

from penstock.bench import session_benchmark
from penstock.bench.noop_engine import NoOpEngine
from penstock.cli.main import main
from penstock.engine.loop.kept_prompts import KeptPrompts


@pytest.mark.parametrize("how", [[], ["--websocket"]], ids=["http", "websocket"])
def test_a_small_run(how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    load = ["--sessions", "2", "--history-tokens", "500", "--history-turns", "3", "--turns", "2", *how]
    assert main(["bench", "session", *load, "--new-tokens", "20", "--json", str(path)]) == 0
    report = json.loads(path.read_bytes())
    assert report["turns"] == 4
    assert report["prompt_tokens"] > 500
    assert report["new_tokens"] >= 20
    assert (report["body_bytes"] < 2_500) == bool(how), "over a WebSocket only what is new is sent"
    assert report["api_server_ms"] > report["body_json_ms"] > 0
    assert min(report["engine_ms"], report["scheduler_ms"]) > 0
    assert "a turn of" in capsys.readouterr().out


def test_the_scheduler_does_not_count_the_blocks_of_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn calls as many functions after 50,000 tokens as after 5,000."""
    run_turn = session_benchmark._run_turn
    counts: list[int] = []

    def counted(engine: NoOpEngine, kept: KeptPrompts, submit: bytes) -> None:
        calls = 0

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            run_turn(engine, kept, submit)
        finally:
            sys.setprofile(None)
        counts.append(calls)

    monkeypatch.setattr(session_benchmark, "_run_turn", counted)
    last = []
    for history in (5_000, 50_000):
        session_benchmark.scheduler_turn_s(history, 100, 3)
        last.append(counts[-1])
    assert last[1] <= 1.05 * last[0]
