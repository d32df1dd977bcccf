from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from penstock.cli.main import main
from penstock.cli.parser import parse
from penstock.cli.serve import COMMAND
from penstock.config.origins import Origin, Origins
from penstock.config.serve import ServeConfig
from penstock.config.sources import OtherServers, resolve
from penstock.distribution import pip_install


def test_the_supervisor_gets_config_and_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[ServeConfig, Origins]] = []

    def serve(config: ServeConfig, origins: Origins) -> int:
        served.append((config, origins))
        return 7

    supervisor = ModuleType("penstock.supervisor.main")
    supervisor.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock.supervisor.main", supervisor)
    monkeypatch.setenv("PENSTOCK_SEED", "3")
    assert main(["serve", "./llama", "--max-model-len", "2k", "--api-key", "a", "b"]) == 7
    assert served == [
        (
            ServeConfig(model="./llama", max_model_len=2000, api_key=["a", "b"], seed=3),
            {
                "model": Origin("command line", "MODEL"),
                "max_model_len": Origin("command line", "--max-model-len"),
                "api_key": Origin("command line", "--api-key"),
                "seed": Origin("environment", "PENSTOCK_SEED"),
            },
        )
    ]


@pytest.mark.parametrize(
    ("described", "why", "behind"),
    [
        ({"model_type": "qwen3_5"}, "keep a recurrent state", []),
        ({"model_type": "brand_new"}, "is not supported by the torch engine: it runs", []),
        (
            {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}},
            "weights are quantized (fp8)",
            [],
        ),
        (
            {"model_type": "qwen3", "max_position_embeddings": 4096, "rope_theta": 1},
            "the model takes at most 4096 tokens",
            ["--hf-overrides"],
        ),
        ({"model_type": "deberta-v2"}, "its attention has a part for the distance of two tokens", None),
    ],
)
def test_a_model_that_needs_vllm_is_told_with_the_whole_line(
    described: dict[str, object],
    why: str,
    behind: list[str] | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    options = ["--port", "0", "--max-model-len", "8192", "--trust-remote-code", "--device", "cpu"]
    assert main(["serve", str(tmp_path), *options, "--batch-invariant"]) == 2
    told = capsys.readouterr().err
    assert why in told
    line = told.partition("\nWrite: penstock serve ")[2].partition("\n")[0]
    if behind is None:
        assert not line
        return
    read = parse(COMMAND, shlex.split(line))
    config = resolve(
        ServeConfig, read.arguments, {}, other_servers=OtherServers(read.foreign, read.rest)
    ).config
    assert (config.model, config.engine, config.max_model_len) == (str(tmp_path), "vllm", 8192)
    assert [each for each in config.engine_args or () if each.startswith("--")] == [
        "--trust-remote-code",
        *behind,
    ]
    assert pip_install("vllm") in told or importlib.util.find_spec("vllm")


def test_a_host_without_api_servers_takes_none_of_their_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = str(tmp_path / "fleet.key")
    assert main(["keys", "cluster", key]) == 0
    fleet = ["serve", "--headless", "--coordinator", "tcp://127.0.0.1:1", "--cluster-key-file", key]
    assert main([*fleet, "--api-server-count", "2"]) == 2
    assert "--api-server-count: a --headless host has no API server" in capsys.readouterr().err
    assert main([*fleet, "--enable-lora", "--lora-modules", "a=/a"]) == 2
    assert "--lora-modules: a --headless host has no API server" in capsys.readouterr().err
    monkeypatch.setenv("PENSTOCK_API_SERVER_COUNT", "2")
    assert main([*fleet, "--run-dir", str(tmp_path)]) == 2
    assert "--run-dir" in capsys.readouterr().err, "what hosts share may hold options of the head"
