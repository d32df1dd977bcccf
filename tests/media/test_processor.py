"""Pictures as the processors of model families make them: the same tokens and pixels as in their own call."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.media.families import FAMILIES


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.media.processor_cases",
        str(tmp_path_factory.mktemp("f")),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_those_of_the_processor_itself(results: dict[str, Any], family: str) -> None:
    assert results[family]["equal"]
    assert results[family]["pixels"]
    assert results[family]["digest"]


def test_what_stands_around_pictures(results: dict[str, Any]) -> None:
    around = {family: tuple(results[family]["description"][:3]) for family in FAMILIES}
    assert around == {
        "llava": ("<image>", "", ""),
        "llava_next": ("<image>", "", ""),
        "idefics3": ("<image>", "", ""),
        "smolvlm": ("<image>", "", ""),
        "gemma3": ("<start_of_image>", "\n\n", "\n\n"),
        "qwen2_vl": ("<|image_pad|>", "", ""),
    }


def test_pages_of_each_family(results: dict[str, Any]) -> None:
    qwen, idefics = results["qwen2_vl"], results["idefics3"]
    assert (qwen["grids"], qwen["features"]) == ([[1, 4, 4], [1, 2, 6]], [4, 3])
    assert qwen["arrays"] == {"pixel_values": [16, 1176], "image_grid_thw": [1, 3]}
    assert idefics["arrays"] == {"pixel_values": [1, 5, 3, 32, 32], "pixel_attention_mask": [1, 5, 32, 32]}
    assert (idefics["features"], idefics["tokens"]) == ([20, 12], [33, 20])
    assert idefics["low"] == 4  # one tile
    assert (results["gemma3"]["features"], results["gemma3"]["tokens"]) == ([4, 4], [6, 6])


def test_processors_that_cannot_be_used_are_named(results: dict[str, Any]) -> None:
    assert "size must have one of" in results["kwargs"]
    assert "has no processor 'NoProcessor'" in results["unknown"]
    assert results["other"] == 1  # --mm-processor-kwargs


def test_pytorch_is_not_imported(results: dict[str, Any]) -> None:
    assert not results["torch"]
