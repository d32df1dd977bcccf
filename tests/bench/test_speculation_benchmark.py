"""``penstock bench speculation`` as a whole, with the demo model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import main

pytest.importorskip("torch")

FEW = ["--streams", "1", "3", "--tokens", "40", "--rounds", "1", "--dtype", "float32"]


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_repeated_answers_are_drafted_and_random_text_is_not(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    arguments = ["--method", method, "--workloads", "repeat", "random", *FEW, "--json", str(path)]
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
        (["--model", "nowhere"], "model nowhere: there is no tokenizer.json"),
        (["--workloads", "edit"], "--workloads"),
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
