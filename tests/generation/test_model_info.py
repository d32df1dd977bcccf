from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.generation.model_info import SamplingDefaults, sampling_defaults


def write(directory: Path, **fields: object) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return directory


def test_without_a_file_the_defaults_are_openais(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == SamplingDefaults()


def test_sampling_fields_are_taken_and_others_ignored(tmp_path: Path) -> None:
    write(tmp_path, temperature=0.6, top_k=20, top_p=0.95, eos_token_id=[1, 2], do_sample=True, min_p=None)
    assert sampling_defaults(tmp_path) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)


def test_a_value_out_of_range_names_file_and_field(tmp_path: Path) -> None:
    write(tmp_path, top_p=1.5)
    with pytest.raises(ValueError, match=r"generation_config.json.*<= 1.*top_p"):
        sampling_defaults(tmp_path)


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config.json"):
        sampling_defaults(tmp_path)
