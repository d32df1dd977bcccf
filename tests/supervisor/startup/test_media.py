"""How many media workers there are, and for which models."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.config.errors import ConfigError
from penstock.config.serve import ServeConfig
from penstock.supervisor.startup import media
from penstock.supervisor.startup.media import Media, media_of
from penstock.supervisor.startup.model_resolution import ResolvedModel

DEMO = str(Path(penstock.__file__).parent / "demo")


@pytest.fixture
def llava(tmp_path: Path) -> ResolvedModel:
    """A directory as far as the supervisor looks at it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "vision_config": {}}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    return ResolvedModel(str(tmp_path), str(tmp_path), ["m"])


def media_for(model: ResolvedModel, api_servers: int = 1, **options: Any) -> Media:
    with media_of(ServeConfig(**options), model, api_servers) as found:
        assert found.directory is None or os.stat(found.directory).st_mode & 0o777 == 0o700
    assert found.directory is None or not os.path.exists(found.directory)
    return found


def test_one_worker_for_four_cores(llava: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers in ((1, 1), (7, 1), (8, 2), (64, 8)):
        monkeypatch.setattr(media, "_cores", lambda cores=cores: cores)
        assert media_for(llava).workers == workers
    assert media_for(llava, media_workers=3, media_cache=1 << 20)[1:] == (3, 1 << 20)


@pytest.mark.parametrize(
    "options",
    [
        {"media_workers": 0},
        {"language_model_only": True},
        {"limit_mm_per_prompt": '{"image": 0}'},
        {"runner": "pooling"},
        {"engine": "vllm"},  # whose engines see only with --media-workers or --media-python
    ],
)
def test_no_worker_for_text(llava: ResolvedModel, options: dict[str, Any]) -> None:
    assert media_for(llava, **options) == Media()


def test_a_host_of_engines_alone_has_a_store_and_no_workers(llava: ResolvedModel) -> None:
    """Its engines get pages from the API servers of other hosts."""
    found = media_for(llava, api_servers=0, media_cache=1 << 20)
    assert (found.directory is not None, *found[1:]) == (True, 0, 1 << 20)
    for options in ({"media_workers": 0}, {"language_model_only": True}, {"engine": "vllm"}):
        assert media_for(llava, api_servers=0, **options) == Media()


def test_the_synthetic_engine_takes_pictures_when_it_is_told_to() -> None:
    demo = ResolvedModel(DEMO, DEMO, ["m"])
    assert media_for(demo, engine="synthetic") == Media()
    assert media_for(demo, engine="synthetic", synthetic_image_tokens=9, media_workers=2).workers == 2


def test_what_is_missing_is_named(llava: ResolvedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = ResolvedModel(DEMO, DEMO, ["m"])
    with pytest.raises(ConfigError, match="--media-workers 2: the model takes no images"):
        media_for(demo, engine="synthetic", media_workers=2)
    (Path(llava.model_dir) / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=r"has neither processor_config.json nor .*--language-model-only"):
        media_for(llava)
    (Path(llava.model_dir) / "processor_config.json").write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"Pillow is not installed; run .*pip install"):
        media_for(llava)
