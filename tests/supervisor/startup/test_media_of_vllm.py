"""Where media workers of vLLM's engines run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.module_command import module_command
from penstock.supervisor.startup.media import media_of
from penstock.supervisor.startup.model_resolution import ResolvedModel


def workers(directory: Path, **options: object) -> int:
    config = ServeConfig(engine="vllm", media_cache=1 << 20, **options)
    with media_of(config, ResolvedModel(str(directory), str(directory), ["m"]), 1) as media:
        return media.workers


def test_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    (tmp_path / "preprocessor_config.json").write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert workers(tmp_path) == 0
    assert workers(tmp_path, media_workers=3, media_python="python") == 3
    assert workers(tmp_path, media_python="python") >= 1
    assert workers(tmp_path, media_workers=0) == 0
    with pytest.raises(ConfigError, match="prepared by vLLM, which is not installed here; --media-python"):
        workers(tmp_path, media_workers=1)


def test_another_interpreter_finds_our_modules_behind_its_own() -> None:
    command = module_command("penstock.exit_codes", first="print(sys.path[-1])", python=sys.executable)
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == str(Path(__file__).parents[3])
