from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from penstock.cli.main import main
from penstock.config.origins import Origin, Origins
from penstock.config.serve import ServeConfig


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
