import sys
from types import ModuleType

import pytest

from penstock.cli.main import main
from penstock.config import Origin, Origins, ServeConfig


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
