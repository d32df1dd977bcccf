"""Values that must be the same on all hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.serve import ServeConfig
from penstock.supervisor.startup.cluster import traits_of
from penstock.supervisor.startup.model_resolution import ResolvedModel


@pytest.fixture
def model(tmp_path: Path) -> ResolvedModel:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    return ResolvedModel(str(tmp_path), str(tmp_path), ["m"])


def differing(model: ResolvedModel, before: dict[str, str], config: ServeConfig) -> list[str]:
    after = traits_of(config, model)
    assert after.keys() == before.keys()
    return [name for name, value in after.items() if value != before[name]]


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"data_parallel_size": 3}, "--data-parallel-size"),
        ({"block_size": 32}, "--block-size"),
        ({"seed": 1}, "--seed"),
        ({"max_loras": 2}, "--max-loras"),
        ({"max_lora_rank": 32}, "--max-lora-rank"),
    ],
)
def test_options_that_shape_replies_are_traits(
    model: ResolvedModel, changed: dict[str, int], name: str
) -> None:
    before = traits_of(ServeConfig(enable_lora=True), model)
    assert differing(model, before, ServeConfig(enable_lora=True, **changed)) == [name]  # type: ignore[arg-type]


def test_limits_of_adapters_are_traits_where_there_are_adapters(model: ResolvedModel) -> None:
    before = traits_of(ServeConfig(), model)
    assert "--enable-lora" in differing(model, before, ServeConfig(enable_lora=True))


def test_where_a_model_lies_is_none(model: ResolvedModel, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in tmp_path.glob("*.*"):
        (elsewhere / path.name).write_bytes(path.read_bytes())
    copy = ResolvedModel(str(elsewhere), str(elsewhere), ["m"])
    assert traits_of(ServeConfig(), copy) == traits_of(ServeConfig(), model)


@pytest.mark.parametrize("place", [0, (1 << 20) - 1])
def test_other_weights_are_another_model(model: ResolvedModel, place: int) -> None:
    before = traits_of(ServeConfig(), model)
    with (Path(model.model_dir) / "model.safetensors").open("r+b") as file:
        file.seek(place)
        file.write(b"x")
    assert differing(model, before, ServeConfig()) == ["model (digest)"]
    assert differing(model, traits_of(ServeConfig(engine="synthetic"), model), ServeConfig()) == [
        "--engine",
        "model (digest)",
    ]


def test_another_tokenizer_is_told(model: ResolvedModel) -> None:
    before = traits_of(ServeConfig(), model)
    (Path(model.tokenizer_dir) / "tokenizer.json").write_text("[]")
    assert differing(model, before, ServeConfig()) == ["tokenizer (digest)"]
