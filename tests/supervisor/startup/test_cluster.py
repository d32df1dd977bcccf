"""The key that hosts share, and what else they must have in common."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.config.options import ServeConfig
from penstock.supervisor.startup.cluster import (
    KEY_FILE_PREFIX,
    read_cluster_key,
    traits_of,
    write_cluster_key,
)
from penstock.supervisor.startup.model_resolution import ResolvedModel
from penstock.wire.curve import ClusterKey


def test_a_key_file_is_read_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    write_cluster_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = read_cluster_key(str(path))
    assert ClusterKey(secret).secret == secret
    assert path.read_text() == f"{KEY_FILE_PREFIX}{secret}\n"


def test_keys_differ_and_none_is_overwritten(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_cluster_key(tmp_path / name)
    before = (tmp_path / "a").read_text()
    assert before != (tmp_path / "b").read_text()
    with pytest.raises(FileExistsError):
        write_cluster_key(tmp_path / "a")
    assert (tmp_path / "a").read_text() == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "no key file"),
        (b"-----BEGIN PRIVATE KEY-----", "no key file"),
        (KEY_FILE_PREFIX.encode() + b"x" * 39, "not a secret key"),
        (b"\xff\xfe", "can't decode"),
    ],
)
def test_what_is_no_key_file(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "fleet.key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^--cluster-key-file {path}: .*{reason}"):
        read_cluster_key(str(path))


def test_a_key_that_everybody_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "fleet.key"
    write_cluster_key(path)
    read_cluster_key(str(path))
    assert caplog.text == ""
    path.chmod(0o644)
    read_cluster_key(str(path))
    assert "chmod o-r" in caplog.text


# -- traits


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
    ],
)
def test_options_that_shape_replies_are_traits(
    model: ResolvedModel, changed: dict[str, int], name: str
) -> None:
    before = traits_of(ServeConfig(), model)
    assert differing(model, before, ServeConfig(**changed)) == [name]  # type: ignore[arg-type]


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
