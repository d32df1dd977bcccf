"""``penstock bench speculation`` as a whole, with the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.engine.base import StepRows
from penstock.engine.torch.engine import TorchEngine
from tests.engine.support import byte_level_tokenizer
from tests.engine.torch.harness import make_model

FEW = ["--streams", "1", "3", "--tokens", "40", "--rounds", "1", "--dtype", "float32"]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_repeated_answers_are_drafted_and_random_text_is_not(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    arguments = ["--method", method, "--workloads", "repeat", "random", *FEW, "--json", str(path)]
    arguments += ["--speculative-tokens", "5"]  # "auto" depends on how long steps take
    assert main(["bench", "speculation", *arguments]) == 0
    runs = json.loads(path.read_bytes())["runs"]
    assert [(run["workload"], run["streams"]) for run in runs] == [
        ("repeat", 1),
        ("repeat", 3),
        ("random", 1),
        ("random", 3),
    ]
    for run in runs:
        assert run["least"] <= run["ratio"] <= run["most"]
        assert run["accepted"] <= run["drafted"]
        if run["workload"] == "repeat":
            assert run["accepted"] > run["drafted"] / 2
            assert run["tokens_per_step"] > 1.5
            assert run["different_streams"] == 0
    assert "--speculative-method " + method in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "draft"], "--method draft: needs --draft-model"),
        (["--draft-model", "somewhere"], "--draft-model somewhere: needs --method draft"),
        (["--model", "nowhere"], "--model nowhere: there is no tokenizer.json"),
        (["--workloads", "edit"], "--workloads"),
        (["--tokens", "5000"], "--tokens 5000: the model takes 2048 tokens in all"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["bench", "speculation", *arguments])
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    assert status != 0
    assert message in capsys.readouterr().err


def test_a_request_that_the_model_cannot_run_ends_the_benchmark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model("llama", tmp_path, max_position_embeddings=64)  # the workload's prompts have 100 tokens
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    arguments = ["--model", str(tmp_path), "--workloads", "random", *FEW]
    assert main(["bench", "speculation", *arguments]) != 0
    assert "the model cannot run a request of the workload: " in capsys.readouterr().err


def test_a_stream_that_fails_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = TorchEngine.step

    def failing(engine: TorchEngine) -> StepRows:
        rows = step(engine)
        return rows if not len(rows.stream) else engine.fail_all("engine_error", "no reason")

    monkeypatch.setattr(TorchEngine, "step", failing)
    assert main(["bench", "speculation", "--workloads", "random", *FEW]) != 0
    assert "a stream failed: no reason" in capsys.readouterr().err
